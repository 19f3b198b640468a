"""NVFP4 as a Mosaic GPU kernel for Hopper and Blackwell, with the scale of tokens in the same pass.

A warp works on a token, each of its lanes on one block at a time. It reads the token twice, for the
maximum and then, from the cache, for the codes. The scale of a tensor takes a pass before that.

What is shown: compiled for H100 and B200 down to machine code, and byte for byte "xla" where jax
interprets it. It has not run on a chip yet.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import float_bits as fb
from pallas_kernels import registers
from pallas_kernels.nvfp4 import rounding

# Of a program: one token for each warp, one block for each lane. The elements of a block are in
# pairs, whose codes share a byte.
_TOKENS, _BLOCKS = 4, 32
_TILE = (_TOKENS, _BLOCKS, rounding.BLOCK // 2, 2)
_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling((_TILE,)), (-4,), (-3,), -1)
_BLOCK_LAYOUT, _TOKEN_LAYOUT = _LAYOUT.reduce((2, 3)), _LAYOUT.reduce((1, 2, 3))


def quantize(x: jax.Array, scale: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes, block scales and outer scale; see `pallas_kernels.nvfp4.quantize`.

    Args:
      x: [..., n] with n a multiple of 512 and a multiple of 4 tokens.
      scale: "token" or "tensor".
    """
    n = x.shape[-1]
    tokens, blocks = x.size // max(n, 1), n // rounding.BLOCK
    if x.size == 0 or tokens % _TOKENS or blocks % _BLOCKS:
        raise NotImplementedError(
            f"x {x.shape} is {tokens} tokens of {n}: must not be empty, and multiples of {_TOKENS} "
            f"and {_BLOCKS * rounding.BLOCK}"
        )
    steps = blocks // _BLOCKS

    def kernel(x_ref, *refs):
        *tensor_amax_ref, codes_ref, scales_ref, g_ref = refs
        mine = pl.ds(jax.lax.axis_index("program") * _TOKENS, _TOKENS)

        def load(step):
            here = x_ref.at[mine, pl.ds(step * _BLOCKS, _BLOCKS)]
            bits = fb.widen(fb.native_bits(registers.load(here, _LAYOUT)))
            return bits, fb.magnitude(bits).max(3).max(2)

        if scale == "tensor":
            amax = registers.load(tensor_amax_ref[0].at[mine], _TOKEN_LAYOUT)
        else:
            zeros = plgpu.layout_cast(jnp.zeros(_TILE[:2], jnp.int32), _BLOCK_LAYOUT)
            larger = lambda step, amax: jnp.maximum(amax, load(step)[1])  # noqa: E731
            amax = jax.lax.fori_loop(0, steps, larger, zeros).max(1)
        g = rounding.outer_scale(amax)
        registers.store(g_ref.at[mine], fb.as_float(g))
        g = registers.spread(g, _TILE[:2], [0], _BLOCK_LAYOUT)
        high = 4 * plgpu.broadcasted_iota(jnp.int32, _TILE, 3, layout=_LAYOUT)

        @pl.loop(0, steps)
        def _(step):
            bits, block_amax = load(step)
            scales = rounding.block_scales(rounding.sixths(block_amax), g)
            borders = rounding.borders(rounding.bases(rounding.divisors(scales, g)))
            spread = [registers.spread(border, _TILE, [0, 1], _LAYOUT) for border in borders]
            codes = (rounding.element_codes(bits, spread) << high).sum(3)
            here = mine, pl.ds(step * _BLOCKS, _BLOCKS)
            registers.store(codes_ref.at[here], codes.astype(jnp.uint8))
            registers.store(scales_ref.at[here], scales.astype(jnp.uint8))

    args = [x.reshape(tokens, blocks, *_TILE[2:])]
    if scale == "tensor":
        amax = fb.widen(fb.magnitude(fb.native_bits(x)).max())
        args.append(jnp.broadcast_to(amax, tokens))
    codes, scales, g = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((tokens, blocks, _TILE[2]), jnp.uint8),
            jax.ShapeDtypeStruct((tokens, blocks), jnp.uint8),
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
        ],
        grid=(tokens // _TOKENS,),
        grid_names=("program",),
    )(*args)
    outer = g.reshape(x.shape[:-1]) if scale == "token" else g[0]
    return codes.reshape(*x.shape[:-1], -1), scales.reshape(*x.shape[:-1], -1), outer
