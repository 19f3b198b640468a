"""MXFP8: E4M3 elements in blocks of 32 that share a power of two."""

from pallas_kernels.mxfp8.api import MXFP8, dequantize, quantize, quantize_groups

__all__ = ["MXFP8", "dequantize", "quantize", "quantize_groups"]
