"""Causal attention over packed documents that never holds a full score matrix."""

from pallas_kernels.flash_attention.api import flash_attention

__all__ = ["flash_attention"]
