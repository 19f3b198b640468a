"""Expert parallelism: each rank holds some experts of a layer, and tokens travel to them.

Report section 5: tokens may be rounded to MXFP8 before they are sent, results come back in the
dtype of the tokens (bf16), and tokens are split into micro-batches: one travels while another is
computed.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from c2.parallel import exchange
from c2.parallel.exchange import Addresses, Link
from pallas_kernels.expert_mlp import expert_mlp as local_expert_mlp
from pallas_kernels.grouped_matmul.api import Impl, Precision

Dispatch = Literal["native", "mxfp8"]

# per platform: with these options of XLA a micro-batch travels while another is computed
OVERLAP = {
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "tpu": {
        "xla_tpu_enable_async_ragged_all_to_all": True,
        "xla_tpu_enable_async_all_to_all": True,
    },
}


def expert_mlp(
    x: jax.Array,
    routes: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    axes: tuple[str, ...],
    precision: Precision = "native",
    impl: Impl = "xla",
    dispatch: Dispatch = "native",
    micro_batches: int = 1,
    ragged: bool = False,
) -> jax.Array:
    """The same as `pallas_kernels.expert_mlp.expert_mlp`, with experts spread over ranks.

    To be called inside `jax.shard_map`. Each rank passes its own tokens and its own experts, those
    with ids from rank * expert on. A token goes once to every rank with an expert of its own, which
    sends back its weighted sum over these; the sums are added in f32. With 8 experts chosen evenly
    among 8 ranks these are 5.25 rows per token (8 * (1 - (7 / 8)**8)) instead of 8 if each expert
    were sent its own.

    No token is ever dropped, so a rank has room for all tokens of a micro-batch from every rank,
    ranks * tokens / micro_batches rows of ``embed``: one such buffer is computed while another
    fills. Intermediate results have ``top_k`` times as many rows. With more than one micro-batch
    the backward pass computes them again, from the tokens that arrived: it keeps ranks * tokens
    rows.

    Gradients are those of the sum of all ranks' losses, in every rank for its own arguments. Those
    of matrices are summed over micro-batches in the dtype of the matrices.

    Args:
      x: [token, embed].
      routes: int32 [token, top_k], ids among all ranks' experts; a negative one routes nowhere.
      weights: f32 [token, top_k].
      gate_up: [expert, embed, 2, ffw], gate first.
      down: [expert, ffw, embed].
      axes: mesh axes of the ranks, the first major; axes of length 1 are as good as none.
      precision: of the products.
      impl: their backend.
      dispatch: "mxfp8" rounds tokens, whether or not they leave their rank, in blocks of 32 along
        ``embed``; the gradient is that of tokens that are not rounded, and travels as it is.
      micro_batches: in which tokens are computed one after another. Below native precision the
        gradients of matrices depend on it slightly: blocks begin anew in each.
      ragged: send only what is needed, by `jax.lax.ragged_all_to_all`. Not on CPUs.

    Returns:
      [token, embed] in the dtype of ``x``. A token's value does not depend on the other tokens,
      bit for bit.

    Raises:
      ValueError: if shapes disagree, or ``dispatch`` or ``micro_batches`` is not legal.
    """
    if dispatch not in get_args(Dispatch):
        raise ValueError(f"dispatch {dispatch!r}; legal are {', '.join(get_args(Dispatch))}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches = {micro_batches} must be positive")
    if routes.shape != weights.shape or routes.shape[:1] != x.shape[:1]:
        raise ValueError(f"x {x.shape}, routes {routes.shape}, weights {weights.shape} disagree")
    tokens, embed = x.shape
    link = Link(axes, ragged)
    quantiser = None if dispatch == "native" else "tpu" if impl == "tpu" else "xla"

    def send(x, to):
        with jax.named_scope("dispatch"):
            return exchange.dispatch(x, to, link, quantiser)

    def compute(arrived, routes, weights):
        flat = (a.reshape(-1, a.shape[-1]) for a in (arrived, routes, weights))
        out = local_expert_mlp(*flat, gate_up, down, precision=precision, impl=impl)
        return out.reshape(arrived.shape)

    def collect(out, to):
        with jax.named_scope("combine"):
            return exchange.collect(out, to, link)

    x, routes, weights = (
        _split(a, micro_batches, fill) for a, fill in ((x, 0), (routes, -1), (weights, 0))
    )
    to, *arriving = jax.vmap(partial(_announce, experts=gate_up.shape[0], axes=axes))(
        routes, weights
    )
    if micro_batches == 1:
        x, to, *arriving = jax.tree.map(lambda a: a[0], (x, to, *arriving))
        return collect(compute(send(x, to), *arriving), to)
    stages = send, jax.checkpoint(compute, prevent_cse=False), collect
    return _pipelined(*stages, x, to, arriving).reshape(-1, embed)[:tokens]


def _split(a: jax.Array, parts: int, fill: int) -> jax.Array:
    """[token, ...] as [part, token, ...], the last parts filled up."""
    size = -(-len(a) // parts)
    padded = jnp.pad(a, ((0, parts * size - len(a)), (0, 0)), constant_values=fill)
    return padded.reshape(parts, size, -1)


def _announce(
    routes: jax.Array, weights: jax.Array, experts: int, axes: tuple[str, ...]
) -> tuple[Addresses, jax.Array, jax.Array]:
    """Where the tokens of a micro-batch go, and what the ranks there do with them.

    Returns:
      Addresses; of the tokens that arrive, the routes [rank, slot, top_k] as ids of this rank's
      experts, negative for those elsewhere; the weights, likewise.
    """
    ranks = jnp.arange(lax.axis_size(axes))
    to = exchange.address((routes // experts == ranks[:, None, None]).any(-1), axes)
    whole = Link(axes, ragged=False)  # small, and not worth waiting for the sizes
    own = exchange.dispatch(routes, to, whole) - lax.axis_index(axes) * experts
    own = jnp.where(own < experts, own, -1)
    return to, own, exchange.dispatch(weights, to, whole)


def _pipelined(
    send: Callable,
    compute: Callable,
    collect: Callable,
    x: jax.Array,
    to: Addresses,
    arriving: list[jax.Array],
) -> jax.Array:
    """All micro-batches: a step sends the next one, computes one and collects the one before.

    The three do not depend on each other, so both exchanges can run while the experts compute. Nor
    do they in the backward pass, which is the same pipeline run backwards. Before the first and
    behind the last micro-batch lies an empty one, whose addresses are zeros.
    """

    def step(carry, batch):
        arrived, out = carry
        (x_next, to_next), arriving, to_before = batch
        return (send(x_next, to_next), compute(arrived, *arriving)), collect(out, to_before)

    arrived = send(*jax.tree.map(lambda a: a[0], (x, to)))
    batches = jax.tree.map(_next, (x, to)), arriving, jax.tree.map(_before, to)
    (_, out), done = lax.scan(step, (arrived, jnp.zeros_like(arrived)), batches)
    last = collect(out, jax.tree.map(lambda a: a[-1], to))
    return jnp.concatenate([done[1:], last[None]])


def _next(parts: jax.Array) -> jax.Array:
    return jnp.concatenate([parts[1:], jnp.zeros_like(parts[:1])])


def _before(parts: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros_like(parts[:1]), parts[:-1]])
