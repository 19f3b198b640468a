"""FP8 and INT4 checkpoints give exact values: compared with decoders written from the formats."""

import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from c2.config import ConfigError
from c2.models import hf
from c2.models.hf.files import Tensor
from c2.models.hf.quantized import Fp8Blocks, Int4Groups, dequantized

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
INT4_WEIGHTS = {
    "actorder": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
INT4 = {
    "config_groups": {
        "group_0": {"input_activations": None, "targets": ["Linear"], "weights": INT4_WEIGHTS}
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
}


def e4m3(byte):
    """The number a byte stands for: 4 bits of exponent (bias 7), 3 of fraction, no infinities."""
    sign, exponent, fraction = -1 if byte & 0x80 else 1, byte >> 3 & 0xF, byte & 7
    if exponent == 0xF and fraction == 7:
        return np.nan
    scale = 2.0 ** (max(exponent, 1) - 7)
    return sign * scale * (fraction / 8 + (exponent > 0))


E4M3 = np.array([e4m3(byte) for byte in range(256)], np.float32)


def tensor(values):
    return Tensor("memory", np.asarray(values))


def fp8(codes):
    return tensor(codes.astype(np.uint8).view(jnp.float8_e4m3fn))


def test_every_fp8_code():
    codes = np.arange(256).reshape(2, 128)
    stored = Fp8Blocks(fp8(codes), tensor(np.ones((1, 1), np.float32)), (128, 128))
    np.testing.assert_array_equal(stored[0:2, 0:128].ravel(), E4M3)


@pytest.mark.parity
def test_every_fp8_code_is_that_of_torch():
    torch = pytest.importorskip("torch")
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    np.testing.assert_array_equal(theirs.numpy(), E4M3)


def pack(values):
    """Words of eight codes; the first column is in the lowest bits."""
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns // 8)), np.uint32)
    for row in range(rows):
        for column in range(columns):
            words[row, column // 8] |= (int(values[row, column]) + 8) << 4 * (column % 8)
    return words.view(np.int32)


def test_the_packing_is_that_of_compressed_tensors():
    values = np.array([[-8, -7, -1, 0, 1, 2, 3, 7]])
    word = np.array([[0xFBA98710]], np.uint32).view(np.int32)  # from the library itself
    np.testing.assert_array_equal(pack(values), word)
    stored = Int4Groups(tensor(word), tensor(np.ones((1, 1), np.float32)), (1, 8), 32)
    np.testing.assert_array_equal(stored[0:1, 0:8], values)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=30, deadline=None)
def test_any_part_equals_the_formula(data):
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 40)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows, columns = (
        (min(r), max(r))
        for r in (data.draw(st.tuples(st.integers(0, n), st.integers(0, n))) for n in shape)
    )
    part = (slice(*rows), slice(*columns))
    at = np.indices(shape)

    codes = rng.integers(0, 127, shape)
    block = (4, 7)
    scales = rng.normal(size=(-(-shape[0] // 4), -(-shape[1] // 7))).astype(np.float32)
    whole = E4M3[codes] * scales[at[0] // 4, at[1] // 7]
    np.testing.assert_array_equal(Fp8Blocks(fp8(codes), tensor(scales), block)[part], whole[part])

    values = rng.integers(-8, 8, shape)
    scales = rng.normal(size=(shape[0], -(-shape[1] // 16))).astype(jnp.bfloat16)
    whole = values.astype(np.float32) * scales.astype(np.float32)[at[0], at[1] // 16]
    stored = Int4Groups(tensor(pack(values)), tensor(scales), shape, 16)
    np.testing.assert_array_equal(stored[part], whole[part])


def quantize_fp8(name, rng, tensors, plain):
    rows, columns = tensors[name].shape
    codes = rng.integers(0, 127, (rows, columns)).astype(np.uint8)
    scales = rng.normal(size=(-(-rows // 128), -(-columns // 128))).astype(np.float32)
    tensors |= {name: codes.view(jnp.float8_e4m3fn), f"{name}_scale_inv": scales}
    plain[name] = E4M3[codes] * np.repeat(np.repeat(scales, 128, 0), 128, 1)[:rows, :columns]


def quantize_int4(name, rng, tensors, plain):
    rows, columns = tensors.pop(name).shape
    values = rng.integers(-8, 8, (rows, columns))
    scales = rng.normal(size=(rows, -(-columns // 32))).astype(jnp.bfloat16)
    tensors |= {
        f"{name}_packed": pack(values),
        f"{name}_scale": scales,
        f"{name}_shape": np.array([rows, columns], np.int32),
    }
    plain[name] = values * np.repeat(scales.astype(np.float32), 32, 1)[:, :columns]


@pytest.mark.parametrize(
    ("scheme", "quantize", "parts"),
    [(FP8, quantize_fp8, ("_proj", "with_mqa")), (INT4, quantize_int4, (".experts.",))],
    ids=["fp8", "int4"],
)
def test_a_quantised_checkpoint_loads_as_the_plain_one(
    scheme, quantize, parts, tiny_config, random_params, tmp_path
):
    tensors, plain, rng = {}, {}, np.random.default_rng(0)
    hf.save(jax.device_get(random_params(tiny_config)), tiny_config, tmp_path / "plain")
    for file in (tmp_path / "plain").glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    plain |= tensors
    for name in list(tensors):
        if any(part in name for part in parts):
            quantize(name, rng, tensors, plain)
    save_file(
        {n: t.astype(np.float32) for n, t in plain.items()}, tmp_path / "plain/model.safetensors"
    )
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "quantised").mkdir()
    save_file(tensors, tmp_path / "quantised" / "model.safetensors")
    for folder, fields in {"quantised": {"quantization_config": scheme}, "unsaid": {}}.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "config.json").write_text(json.dumps(config | fields))
    (tmp_path / "unsaid" / "model.safetensors").symlink_to(tmp_path / "quantised/model.safetensors")

    cfg, params = hf.load(tmp_path / "quantised")
    assert cfg == tiny_config
    jax.tree.map(np.testing.assert_array_equal, params, hf.load(tmp_path / "plain")[1])
    with pytest.raises(ConfigError, match=r"has type (int32|float8_e4m3fn), and what that means"):
        hf.load(tmp_path / "unsaid")


def int4_with(**changes):
    group = {"weights": INT4_WEIGHTS | changes}
    return INT4 | {"config_groups": {"group_0": group}}


CODES = {"w": fp8(np.zeros((200, 130))), "w_scale_inv": tensor(np.ones((2, 2), np.float32))}
WORDS = {
    "w_packed": tensor(np.zeros((4, 8), np.int32)),
    "w_scale": tensor(np.ones((4, 2), np.float32)),
    "w_shape": tensor(np.array([4, 64])),
}


@pytest.mark.parametrize(
    ("stored", "config", "message"),
    [
        (CODES, {"quant_method": "awq"}, r"quant_method: 'awq' is not supported; fp8 or"),
        (CODES, FP8 | {"fmt": "e5m2"}, r"quantization_config\.fmt: 'e5m2' is not supported"),
        (CODES, FP8 | {"weight_block_size": 128}, r"weight_block_size: expected \[rows, columns\]"),
        (
            CODES | {"w_scale_inv": tensor(np.ones((2, 1)))},
            FP8,
            r"w_scale_inv: .*expected \(2, 2\)",
        ),
        ({"w_scale_inv": CODES["w_scale_inv"]}, FP8, "w: missing, but memory has w_scale_inv"),
        (
            CODES | {"w": tensor(np.ones((200, 130)))},
            FP8,
            "w: in memory is float64, expected float8",
        ),
        (WORDS, int4_with(symmetric=False), r"weights\.symmetric: False is not supported"),
        (WORDS, int4_with(actorder="group"), r"weights\.actorder: 'group'"),
        (WORDS, int4_with(num_bits=8), r"weights\.num_bits: 8 is not supported; legal: 4"),
        (WORDS, int4_with(group_size=None), r"weights\.group_size: expected a positive int"),
        (WORDS, INT4 | {"format": "int-quantized"}, r"quantization_config\.format: 'int-q"),
        (WORDS, INT4 | {"config_groups": {}}, "config_groups: expected one group"),
        (
            WORDS | {"w_shape": tensor([4, 65])},
            INT4,
            r"w_packed: .*shape \(4, 8\), expected \(4, 9\)",
        ),
        (WORDS | {"w_scale": tensor(np.ones((4, 1)))}, INT4, r"w_scale: .*expected \(4, 2\)"),
        ({"w_packed": WORDS["w_packed"]}, INT4, "w_scale: missing, but memory has w_packed"),
    ],
)
def test_what_does_not_fit_is_refused(stored, config, message):
    with pytest.raises(ConfigError, match=message):
        dequantized(stored, config)
