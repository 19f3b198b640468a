"""NVFP4 as its formula says, in numpy: every operation an IEEE f32 operation."""

import ml_dtypes
import numpy as np

BLOCK = 16


def quantize(x: np.ndarray, scale: str = "token") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, block scales and outer scale; same contract as `pallas_kernels.nvfp4.quantize`."""
    x = np.asarray(x).astype(np.float32)
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    with np.errstate(all="ignore"):
        amax = np.abs(blocks).max(-1)
        g = amax.max(-1 if scale == "token" else None, initial=0) / np.float32(2688)
        g = np.where(g == 0, np.float32(1), np.where(np.isfinite(g), g, np.float32(np.nan)))
        ratio = amax / np.float32(6) / g[..., None]
        s = np.minimum(ratio, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        divisor = (s.astype(np.float32) * g[..., None])[..., None]
        quotient = np.where((s > 0)[..., None], blocks / divisor, np.copysign(0, blocks))
        codes = quotient.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    low, high = codes.reshape(x.shape)[..., 0::2], codes.reshape(x.shape)[..., 1::2]
    return low | high << 4, s.view(np.uint8), g
