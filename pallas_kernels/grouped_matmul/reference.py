"""The grouped matmul and its gradients as their formulas say: numpy, f64, group by group."""

import ml_dtypes
import numpy as np

from pallas_kernels.mxfp8 import reference as mxfp8
from pallas_kernels.nvfp4 import reference as nvfp4


def forward(
    lhs: np.ndarray, rhs: np.ndarray, group_sizes: np.ndarray, precision: str = "native"
) -> np.ndarray:
    """Same contract as `pallas_kernels.grouped_matmul.grouped_matmul`, but sums in f64."""
    left, right = lhs, rhs
    if precision == "mxfp8":
        left, right = mxfp8_rounded(lhs, 1), mxfp8_rounded(rhs, 1)
    elif precision == "nvfp4":
        left, right = nvfp4_rounded(lhs), nvfp4_rounded(rhs.swapaxes(1, 2)).swapaxes(1, 2)
    return _matmul(left, right, group_sizes)


def gradients(
    lhs: np.ndarray,
    rhs: np.ndarray,
    group_sizes: np.ndarray,
    d_out: np.ndarray,
    precision: str = "native",
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of lhs and rhs from that of the result, in f64."""
    exact = precision == "native"
    dy, weights = (d_out, rhs) if exact else (mxfp8_rounded(d_out, 1), mxfp8_rounded(rhs, 2))
    d_rhs = np.zeros(rhs.shape)
    for g, group in enumerate(groups(group_sizes)):
        x, dy_rows = lhs[group].astype(np.float64), d_out[group].astype(np.float64)
        if not exact:
            fill = ((0, -len(x) % mxfp8.BLOCK), (0, 0))
            x, dy_rows = (mxfp8_rounded(np.pad(a, fill), 0) for a in (x, dy_rows))
        d_rhs[g] = x.T @ dy_rows
    return _matmul(dy, weights.swapaxes(1, 2), group_sizes), d_rhs


def groups(group_sizes: np.ndarray) -> list[slice]:
    """The rows of every group."""
    ends = np.cumsum(group_sizes)
    return [slice(end - size, end) for end, size in zip(ends, group_sizes, strict=True)]


def mxfp8_rounded(x: np.ndarray, axis: int) -> np.ndarray:
    """F64 numbers that the MXFP8 codes of ``x`` stand for."""
    codes, scales = mxfp8.quantize(x, axis)
    powers = np.ldexp(1.0, scales.astype(int) - 127)
    return _values(codes, ml_dtypes.float8_e4m3fn) * powers.repeat(mxfp8.BLOCK, axis)


def nvfp4_rounded(x: np.ndarray) -> np.ndarray:
    """F64 numbers that the NVFP4 codes of ``x``, with a scale per token, stand for."""
    packed, scales, g = nvfp4.quantize(x)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(x.shape)
    blocks = _values(scales, ml_dtypes.float8_e4m3fn).repeat(nvfp4.BLOCK, -1)
    return _values(codes, ml_dtypes.float4_e2m1fn) * blocks * g[..., None].astype(np.float64)


def _values(codes: np.ndarray, dtype: type) -> np.ndarray:
    return codes.view(dtype).astype(np.float64)


def _matmul(lhs: np.ndarray, rhs: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    out = np.zeros((len(lhs), rhs.shape[2]))
    for group, matrix in zip(groups(group_sizes), rhs, strict=True):
        out[group] = lhs[group].astype(np.float64) @ matrix.astype(np.float64)
    return out
