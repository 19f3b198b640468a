"""Public entry point of the routed experts."""

import jax
import jax.numpy as jnp

from pallas_kernels.expert_mlp import grouped, xla
from pallas_kernels.grouped_matmul.api import Impl, Precision
from pallas_kernels.nvfp4 import NVFP4


def expert_mlp(
    x: jax.Array,
    routes: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array | NVFP4,
    down: jax.Array | NVFP4,
    *,
    precision: Precision = "native",
    impl: Impl = "xla",
) -> jax.Array:
    """Computes ``sum_k weights[k] * down[e_k] (silu(gate[e_k] x) * up[e_k] x)`` per token.

    Below native precision, each product's operands are quantised from bf16 numbers, whatever the
    dtype of ``x``: tokens, activations and the cotangents of both products are rounded to bf16
    first (report section 6.1). The activation and the weighted sum over experts are f32.

    Args:
      x: [tokens, embed].
      routes: int32 [tokens, top_k], the experts e_k of each token; a negative id routes nowhere.
      weights: f32 [tokens, top_k].
      gate_up: [expert, embed, 2, ffw], gate first.
      down: [expert, ffw, embed]. In precision "nvfp4" both may be codes already, of
        [expert, 2 * ffw, embed] and [expert, embed, ffw]; there is no gradient then.
      precision: of the products, see `pallas_kernels.grouped_matmul.grouped_matmul`.
      impl: its backend. "xla" in native precision is one fused loop made for CPUs; everything else
        goes through the grouped matmul.

    Returns:
      [tokens, embed] in the dtype of ``x``. A token's value does not depend on the other tokens,
      bit for bit. Differentiable in all arguments but ``routes``.

    Raises:
      ValueError: if shapes disagree.
      NotImplementedError: if the grouped matmul has no such product, with the numbers.
    """
    if isinstance(gate_up, NVFP4):
        experts, features, half = gate_up.codes.shape
        embed, legal = 2 * half, (experts, 2 * half, features // 4)
        agree = down.codes.shape == legal
    else:
        experts, embed, two, ffw = gate_up.shape
        agree = two == 2 and down.shape == (experts, ffw, embed)
    if not agree or x.shape[1:] != (embed,):
        shapes = jax.tree.map(jnp.shape, (gate_up, down))
        raise ValueError(f"x {x.shape}, gate_up and down {shapes} disagree")
    if routes.shape != weights.shape or routes.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"routes {routes.shape} and weights {weights.shape} must be [tokens, top_k] for "
            f"x {x.shape}"
        )
    args = x, routes.astype(jnp.int32), weights.astype(jnp.float32), gate_up, down
    if precision == "native" and impl == "xla":
        return xla.expert_mlp(*args)
    return grouped.expert_mlp(*args, precision, impl)
