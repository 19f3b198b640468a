"""Routed SwiGLU experts: every token passes through its own few experts, none is dropped."""

from pallas_kernels.expert_mlp.api import expert_mlp

__all__ = ["expert_mlp"]
