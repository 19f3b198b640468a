"""Every op in every form that training uses, at the sizes that its `arg_specs` names.

A new backend needs its name in `CHIPS` and nothing else; a new op needs a function here.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import flash_attention, grouped_matmul, mxfp8, nvfp4
from pallas_kernels.flash_attention import arg_specs as attention_specs
from pallas_kernels.grouped_matmul import arg_specs as matmul_specs
from pallas_kernels.mxfp8 import arg_specs as mxfp8_specs
from pallas_kernels.mxfp8 import reference as mxfp8_reference
from pallas_kernels.nvfp4 import arg_specs as nvfp4_specs
from pallas_kernels.nvfp4 import reference as nvfp4_reference

NVIDIA = ("h100", "b200")
TPUS = ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
CHIPS = {  # that a backend is made for
    "xla": (*NVIDIA, *TPUS),
    "gpu": NVIDIA,
    "hopper": ("h100",),
    "blackwell": ("b200",),
    "tpu": TPUS,
    "reciprocal": (*NVIDIA, "v6e:2x2"),
}
APPROXIMATE = "reciprocal"  # the backend that divides on purpose


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One program of an op.

    Attributes:
      op: name of the op's folder.
      what: form and sizes, for people.
      run: ``run(impl, *arrays)``, the program.
      shapes: of the arrays.
      impls: the backends that the op has.
      exact: whether the result must have no approximate division behind it.
      arrays: makes the arrays, or None if the case is only compiled.
      oracle: ``oracle(*arrays)``, the expected result, on the CPU.
      tolerance: relative to an element, and relative to the root mean square of all elements;
        None if bytes must be equal.
      work: FLOP of the program, or bytes that it must read and write.
      unit: "FLOP" or "B".
      precision: of the matrix units, "bf16", "fp8" or "fp4", whose peak FLOP are held against.
    """

    op: str
    what: str
    run: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    impls: tuple[str, ...]
    exact: bool
    arrays: Callable[[], tuple[np.ndarray, ...]] | None
    oracle: Callable[..., Any]
    tolerance: tuple[float, float] | None
    work: float
    unit: str
    precision: str = "bf16"


def cases() -> list[Case]:
    """All of them, in the order of the table."""
    return [*_mxfp8(), *_nvfp4(), *_grouped_matmul(), *_flash_attention()]


def jobs() -> dict[str, tuple[Case, str]]:
    """Every case with every backend that has chips, by "op, backend, what"."""
    return {
        f"{case.op}, {impl}, {case.what}": (case, impl)
        for case in cases()
        for impl in case.impls
        if chips(case, impl)
    }


def chips(case: Case, impl: str) -> tuple[str, ...]:
    """For which chips a backend of an op is compiled."""
    if impl == "xla" and case.op == "grouped_matmul":  # made for CPUs, of interest for division
        return NVIDIA if case.arrays else ()
    if impl == "xla" and case.op == "flash_attention":
        return ()  # made for CPUs
    if impl == "tpu" and case.op == "grouped_matmul" and case.exact and not case.arrays:
        return ()  # XLA's quantisation around the products takes minutes to compile
    return CHIPS.get(impl, ())


def _shapes(*arrays: tuple[tuple[int, ...], Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays)


def _sizes(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{np.dtype(dtype).name} {' x '.join(map(str, shape))}"


def _mxfp8() -> Iterator[Case]:
    shape, dtype, _ = mxfp8_specs.BENCH
    for axis in (-1, 0):
        yield Case(
            op="mxfp8",
            what=f"{_sizes(shape, dtype)}, blocks along axis {axis}",
            run=lambda impl, x, axis=axis: mxfp8.quantize(x, axis, impl=impl),
            shapes=_shapes((shape, dtype)),
            impls=get_args(mxfp8.api.Impl),
            exact=True,
            arrays=lambda: (mxfp8_specs.wild(shape, dtype),),
            oracle=partial(mxfp8_reference.quantize, axis=axis),
            tolerance=None,
            work=np.prod(shape) * (2 + 1 + 1 / 32),
            unit="B",
        )


def _nvfp4() -> Iterator[Case]:
    shape, dtype, _ = nvfp4_specs.BENCH
    for scale in ("token", "tensor"):
        yield Case(
            op="nvfp4",
            what=f"{_sizes(shape, dtype)}, scale per {scale}",
            run=lambda impl, x, scale=scale: nvfp4.quantize(x, scale, impl=impl),
            shapes=_shapes((shape, dtype)),
            impls=tuple(
                impl for impl in get_args(nvfp4.api.Impl) if impl != APPROXIMATE or scale == "token"
            ),
            exact=True,
            arrays=lambda: (nvfp4_specs.wild(shape, dtype),),
            oracle=partial(nvfp4_reference.quantize, scale=scale),
            tolerance=None,
            work=np.prod(shape) * (2 + 1 / 2 + 1 / 16),
            unit="B",
        )


def _with_gradients(f: Callable) -> Callable:
    """``(*args, d_out)`` -> ``f(*args)`` and what its vector-Jacobian product makes of d_out."""

    def run(*args):
        out, pull = jax.vjp(f, *args[:-1])
        return out, pull(args[-1])

    return run


def _grouped_matmul() -> Iterator[Case]:
    for precision in get_args(grouped_matmul.api.Precision):
        for gradients in (False, True):
            yield _matmul_case(matmul_specs.BENCH, precision, gradients)
        for spec in matmul_specs.AOT.values():
            case = _matmul_case(spec, precision, gradients=True)
            yield dataclasses.replace(case, arrays=None)  # the oracle would take minutes


def _matmul_case(spec: matmul_specs.ArgSpec, precision: str, gradients: bool) -> Case:
    rows, k, n, groups = spec.rows, spec.k, spec.n, len(spec.group_sizes)
    shapes = _shapes(
        ((rows, k), jnp.bfloat16),
        ((groups, k, n), jnp.bfloat16),
        ((groups,), jnp.int32),
        ((rows, n), jnp.bfloat16),
    )[: 3 + gradients]

    def run(impl, lhs, rhs, sizes, *d_out):
        def product(lhs, rhs):
            return grouped_matmul.grouped_matmul(lhs, rhs, sizes, precision=precision, impl=impl)

        return _with_gradients(product)(lhs, rhs, *d_out) if gradients else product(lhs, rhs)

    def arrays():
        *floats, sizes = spec.arrays()
        lhs, rhs, d_out = (x.astype(jnp.bfloat16) for x in floats)
        return (lhs, rhs, sizes, d_out)[: 3 + gradients]

    units = {"native": "bf16", "mxfp8": "fp8", "nvfp4": "fp8" if gradients else "fp4"}
    return Case(
        op="grouped_matmul",
        what=f"{precision}, {rows} x {k} x {n}, {groups} groups" + ", with gradients" * gradients,
        run=run,
        shapes=shapes,
        impls=get_args(grouped_matmul.api.Impl),
        exact=precision != "native",
        arrays=arrays,
        oracle=jax.jit(partial(run, "xla")),
        tolerance=(2.0**-7, 2.0**-12),  # bf16 results of f32 sums in another order
        work=2.0 * rows * k * n * (3 if gradients else 1),
        unit="FLOP",
        precision=units[precision],
    )


def _flash_attention() -> Iterator[Case]:
    for spec in attention_specs.AOT:
        square = spec.q_seq == spec.kv_seq
        for in_order in (True, False) if square else (False,):
            for gradients in (False, True):
                yield _attention_case(spec, in_order, gradients, can_run=square)


def _attention_case(spec, in_order: bool, gradients: bool, can_run: bool) -> Case:
    shapes = spec.shapes()
    if in_order:
        shapes = {name: shapes[name] for name in ("q", "k", "v", "segment_ids")}
    names = tuple(shapes)
    if gradients:
        shapes["d_out"] = jax.ShapeDtypeStruct((*shapes["q"].shape[:3], spec.v), spec.dtype)

    def run(impl, *arrays):
        named = dict(zip(names, arrays, strict=False))
        marks = {name: x for name, x in named.items() if name not in ("q", "k", "v")}

        def attend(q, k, v):
            return flash_attention.flash_attention(q, k, v, scale=spec.qk**-0.5, impl=impl, **marks)

        qkv = [named[name] for name in ("q", "k", "v")]
        return _with_gradients(attend)(*qkv, arrays[-1]) if gradients else attend(*qkv)

    # Scores and their mixture; backward the scores again, and a product for each gradient and for
    # that of the weights. Two FLOP each for half of all pairs, as if a row were one document.
    features = 4 * spec.qk + 3 * spec.v if gradients else spec.qk + spec.v
    return Case(
        op="flash_attention",
        what=f"{spec.q_seq} queries, {spec.kv_seq} keys, {spec.heads} heads of {spec.qk} and "
        f"{spec.v}, {'in order' if in_order else 'with positions'}"
        + ", with gradients"
        * gradients,
        run=run,
        shapes=tuple(shapes.values()),
        impls=get_args(flash_attention.api.Impl),
        exact=False,
        arrays=partial(_attention_arrays, shapes) if can_run else None,
        oracle=jax.jit(partial(run, "xla")),
        tolerance=(2.0**-7, 2.0**-5),  # weights are rounded to bf16 before they are summed
        work=1.0 * spec.batch * spec.heads * spec.q_seq * spec.kv_seq * features,
        unit="FLOP",
    )


def _attention_arrays(shapes: dict[str, jax.ShapeDtypeStruct]) -> tuple[np.ndarray, ...]:
    """Normal numbers; four documents and some padding, with positions from 0 in each."""
    rng = np.random.default_rng(0)
    seq = shapes["q"].shape[1]
    ends = np.array([1, 64, seq // 3, seq - 40])
    token = np.arange(seq)
    document = np.searchsorted(ends, token, side="right")
    marks = {
        "segment_ids": np.where(token < ends[-1], document + 1, 0),
        "positions": token - np.append(0, ends)[document],
    }
    return tuple(
        np.broadcast_to(marks[name.removeprefix("kv_")], shape.shape).astype(np.int32)
        if shape.dtype == jnp.int32
        else rng.standard_normal(shape.shape, np.float32).astype(shape.dtype)
        for name, shape in shapes.items()
    )
