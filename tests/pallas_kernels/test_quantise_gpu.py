"""The quantisers' kernels for NVIDIA GPUs, as jax interprets and lowers them on any machine."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mxfp8, nvfp4
from pallas_kernels.mxfp8 import reference as mxfp8_reference
from pallas_kernels.nvfp4 import arg_specs
from pallas_kernels.nvfp4 import reference as nvfp4_reference

FAST_COMPILE = {"xla_backend_optimization_level": 0}  # every program here runs once
BF16, F32 = ml_dtypes.bfloat16, np.float32
interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"), reason="this jax can't interpret GPU kernels"
)


def check(quantize, formula, x, *args):
    with plgpu.force_gpu_interpret_mode():
        run = jax.jit(lambda x: quantize(x, *args, impl="gpu"), compiler_options=FAST_COMPILE)
        got = run(x)
    for ours, theirs in zip(got, formula(x, *args), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@interpreted
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("shape", "axis"), [((2, 48, 128), -1), ((64, 512), 0)])
def test_mxfp8_bytes_equal_the_formula(shape, axis, dtype):
    x = arg_specs.wild(shape, dtype)
    x[1, 5], x[-1, -1, ...] = np.nan, np.inf
    x[0, :40] = 0
    check(mxfp8.quantize, mxfp8_reference.quantize, x, axis)


@interpreted
@pytest.mark.parametrize(("scale", "dtype"), [("token", BF16), ("token", F32), ("tensor", BF16)])
def test_nvfp4_bytes_equal_the_formula(scale, dtype):
    x = arg_specs.wild((2, 4, 1024), dtype)
    x[0, 1] = 0
    if scale == "token":
        x[0, 2, 7], x[1, 0, 1000] = np.nan, -np.inf
    check(nvfp4.quantize, nvfp4_reference.quantize, x, scale)


@interpreted
def test_nvfp4_next_to_ties_is_ieee_division():
    check(nvfp4.quantize, nvfp4_reference.quantize, arg_specs.near_ties(4, 1024))


@pytest.mark.parametrize(
    "quantize",
    [partial(mxfp8.quantize, axis=0), mxfp8.quantize, nvfp4.quantize],
    ids=["mxfp8 down", "mxfp8 across", "nvfp4"],
)
def test_a_kernel_lowers_for_gpus(quantize):
    x = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16)
    quantize = jax.jit(partial(quantize, impl="gpu"))
    assert "mosaic_gpu" in quantize.trace(x).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("quantize", "shape", "message"),
    [
        (mxfp8.quantize, (4, 992), r"\(4, 992\).*\(124, 32\).*\(128, 32\)"),
        (mxfp8.quantize, (0, 32), "empty"),
        (partial(mxfp8.quantize, axis=0), (32, 128), r"\(32, 128\).*\(32, 256\)"),
        (partial(mxfp8.quantize, axis=0), (32, 2, 128), "axis 0 of 3"),
        (nvfp4.quantize, (3, 512), "3 tokens of 512.* 4 and 512"),
        (nvfp4.quantize, (4, 256), "4 tokens of 256.* 4 and 512"),
        (nvfp4.quantize, (0, 512), "empty"),
    ],
)
def test_what_does_not_fit_is_named(quantize, shape, message):
    with pytest.raises(NotImplementedError, match=message):
        quantize(jnp.zeros(shape, jnp.bfloat16), impl="gpu")
