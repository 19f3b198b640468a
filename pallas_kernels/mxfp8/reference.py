"""MXFP8 as its formula says, in numpy: scales by exact division, elements in f64."""

import ml_dtypes
import numpy as np

BLOCK = 32


def quantize(x: np.ndarray, axis: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales; same contract as `pallas_kernels.mxfp8.quantize`."""
    x = np.moveaxis(np.asarray(x).astype(np.float64), axis, -1)
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    amax = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(all="ignore"):
        mantissa, exponent = np.frexp(
            amax / 448
        )  # amax has 24 bits: the quotient can't round to 1/2
        power = np.maximum(exponent - (mantissa == 0.5), -127)
        power = np.where(amax == 0, -127, np.where(np.isinf(amax), 127, power))
        codes = np.clip(blocks * 2.0**-power, -448, 448)
        codes = np.where(np.isnan(amax), np.nan, codes).astype(ml_dtypes.float8_e4m3fn)
    scales = np.where(np.isnan(amax), 255, power + 127).astype(np.uint8)
    codes = np.where(np.isnan(amax), 0x7F, codes.view(np.uint8))
    return (
        np.moveaxis(codes.reshape(x.shape), -1, axis),
        np.moveaxis(scales.squeeze(-1), -1, axis),
    )
