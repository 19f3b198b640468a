"""FLOPs of matrix products and of kernels made of them, in a compiled module.

Per device and run of the instruction; `launch.hlo.Module.runs` says how often a computation runs.
XLA's own `cost_analysis` counts the body of a loop once and kernels not at all.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from launch.hlo import Instruction, Module, Shape

_KERNEL_TARGETS = re.compile(r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*)"')


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What shapes do not say.

    Attributes:
      visible: share of query-key pairs that attention kernels compute; causal and balanced, half.
      rows: rows of a grouped product that hold tokens; buffers are as large as the worst case.
      sent: share of the rows of a ragged exchange that are sent.
    """

    visible: float = 0.5
    rows: float = math.inf
    sent: float = 1.0


@dataclass(frozen=True)
class Product:
    """A matrix product, or a kernel made of them: FLOPs of one run and the type it computes in."""

    flops: float
    dtype: str
    kernel: str = ""


def products(
    module: Module, computation: str, instruction: Instruction, given: Assumptions
) -> Iterator[Product]:
    """Yields the `Product` of an instruction, or those inside a fusion or call."""
    if found := _product(module, computation, instruction, given):
        yield found
    if instruction.opcode in ("fusion", "call", "async-start"):
        for name in instruction.called:
            for inner in module.computations.get(name, {}).values():
                yield from products(module, name, inner, given)


def _product(
    module: Module, computation: str, instruction: Instruction, given: Assumptions
) -> Product | None:
    if instruction.opcode not in ("dot", "convolution", "custom-call"):
        return None
    operands = [x.shapes[0] for x in module.operands(computation, instruction) if x.shapes]
    out = instruction.shapes
    if instruction.opcode == "dot":
        return _dot(operands, out, r"lhs_contracting_dims=\{([\d,]*)\}", instruction)
    if instruction.opcode == "convolution":
        return Product(_convolution(operands, out[0], instruction.attributes), operands[0].dtype)
    if "__cublas$" in instruction.attributes:
        pattern = r'"lhs_contracting_dimensions":\[([\d,"]*)\]'
        return _dot(operands, out, pattern, instruction)
    if _KERNEL_TARGETS.search(instruction.attributes):
        kernel = _kernel(module.sources(instruction))
        if kernel in _KERNEL_FLOPS:
            on_tpu = "tpu_custom_call" in instruction.attributes
            flops, dtype = _KERNEL_FLOPS[kernel](operands, out, given, on_tpu)
            return Product(flops, dtype, kernel)
    return None


def _dot(operands, out, pattern, instruction) -> Product | None:
    found = re.search(pattern, instruction.attributes)
    if not found or len(operands) < 2:
        return None
    summed = (operands[0].dims[int(d)] for d in re.findall(r"\d+", found[1]))
    return Product(2.0 * out[0].elements * math.prod(summed), operands[0].dtype)


def _convolution(operands: list[Shape], out: Shape, attributes: str) -> float:
    """Two for every pair of an input and a kernel element that meet, padding and holes left out.

    TPUs write products with a batch as convolutions over it in which one pair in many meets.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    _, kernel_labels, out_labels = labels.groups()
    lhs, kernel = operands[:2]
    window = dict(re.findall(r"(\w+)=([\w\-]+)", re.search(r"window=\{(.*?)\}|$", attributes)[0]))
    spatial = sorted(label for label in out_labels if label.isdigit())

    def option(name: str, place: int, default: str) -> str:
        return window[name].split("x")[place] if name in window else default

    met = 1
    for place, label in enumerate(spatial):
        size = int(option("size", place, "1"))
        low = int(option("pad", place, "0_0").split("_")[0])
        stride, hole, step = (
            int(option(name, place, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        length = lhs.dims[labels[1].index(label)]
        at = np.arange(out.dims[out_labels.index(label)])[:, None] * stride
        at = at + np.arange(size) * step - low
        met *= int(((at >= 0) & (at < (length - 1) * hole + 1) & (at % hole == 0)).sum())
    features = kernel.dims[kernel_labels.index("i")]  # of one feature group
    outside = out.dims[out_labels.index("b")] * out.dims[out_labels.index("f")]
    groups = re.search(r"batch_group_count=(\d+)", attributes)
    return 2.0 * outside * features * met / (int(groups[1]) if groups else 1)


def _kernel(sources: tuple[str, ...]) -> str:
    """The op in `pallas_kernels` that a call comes from, innermost first."""
    folders = (re.search(r"pallas_kernels/(\w+)/", source) for source in sources)
    return next((folder[1] for folder in folders if folder), "")


def _grouped_matmul(operands: list[Shape], out, given: Assumptions, on_tpu: bool):
    """``[rows, k] x [group, k, n] -> [rows, n]``, or ``[rows, k] x [rows, n] -> [group, k, n]``."""
    lhs = next(x for x in operands if len(x.dims) == 2)
    matrices = next(x for x in (*operands, *out) if len(x.dims) == 3)
    rows = min(lhs.dims[0], given.rows)
    return 2.0 * rows * matrices.dims[1] * matrices.dims[2], lhs.dtype


def _flash_attention(operands: list[Shape], out, given: Assumptions, on_tpu: bool):
    """Over the visible pairs: two products forward, three for queries', four for keys' gradients.

    Operands are [batch, heads, seq, feature] on TPUs and [batch, seq, heads, feature] on GPUs; of
    queries and keys, values and gradients of results one pair each is as wide and as long.
    """
    heads_at, seq_at = (1, 2) if on_tpu else (2, 1)
    read, written = (
        [x for x in shapes if len(x.dims) == 4 and x.dims[seq_at] > 1] for shapes in (operands, out)
    )
    seqs, widths = [x.dims[seq_at] for x in read], [x.dims[3] for x in read]
    pairs = read[0].dims[0] * read[0].dims[heads_at] * min(seqs) * max(seqs) * given.visible
    qk, v = max(widths), min(widths)
    features = qk + v
    if len(read) == 4:
        features = 2 * qk + (v if len(written) == 1 else 2 * v)
    return 2.0 * pairs * features, read[0].dtype


_KERNEL_FLOPS: dict[str, Callable[..., tuple[float, str]]] = {
    "grouped_matmul": _grouped_matmul,
    "flash_attention": _flash_attention,
}
