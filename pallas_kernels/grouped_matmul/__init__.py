"""Matrix products of groups of rows, each with a matrix of its own, in four precisions."""

from pallas_kernels.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
