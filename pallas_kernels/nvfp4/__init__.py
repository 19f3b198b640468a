"""NVFP4: E2M1 elements in blocks of 16 with an E4M3 scale, and an f32 scale per token or tensor."""

from pallas_kernels.nvfp4.api import NVFP4, dequantize, quantize

__all__ = ["NVFP4", "dequantize", "quantize"]
