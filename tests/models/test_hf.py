"""Reading and writing Hugging Face folders: layouts, slices, shards, and everything damaged."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

import c2
from c2 import models
from c2.config import ConfigError
from c2.models import hf
from c2.models.config import GQAConfig, RopeConfig
from c2.models.hf import files, names, writer

# Our layout of a parameter, and the stored tensors by hand.
LAYOUTS = {
    "embed": lambda w, layer: {"model.embed_tokens.weight": w},
    "head": lambda w, layer: {"lm_head.weight": w.T},
    "norm": lambda w, layer: {"model.norm.weight": w},
    "moe.attention.q_up": lambda w, layer: {
        f"{at}.self_attn.q_b_proj.weight": w[i].reshape(24, 2 * 20).T for i, at in enumerate(layer)
    },
    "moe.attention.out": lambda w, layer: {
        f"{at}.self_attn.o_proj.weight": w[i].reshape(2 * 10, 32).T for i, at in enumerate(layer)
    },
    "moe.moe.bias": lambda w, layer: {
        f"{at}.mlp.gate.e_score_correction_bias": w[i] for i, at in enumerate(layer)
    },
    "moe.moe.gate_up": lambda w, layer: {
        f"{at}.mlp.experts.{e}.{name}_proj.weight": w[i, e, :, half].T
        for i, at in enumerate(layer)
        for e in range(8)
        for half, name in enumerate(["gate", "up"])
    },
    "moe.moe.down": lambda w, layer: {
        f"{at}.mlp.experts.{e}.down_proj.weight": w[i, e].T
        for i, at in enumerate(layer)
        for e in range(8)
    },
}
LLAMA = {
    "vocab": 11,
    "hidden": 8,
    "layers": 1,
    "dense_layers": 1,
    "dense_intermediate": 4,
    "attention": GQAConfig(heads=2, kv_heads=1, head_dim=4),
    "moe": None,
    "rope": RopeConfig(layout="halves"),
    "tied": True,
}
DAMAGE = {
    "missing": (
        lambda tensors: tensors.pop("model.layers.1.self_attn.o_proj.weight"),
        r"model\.layers\.1\.self_attn\.o_proj\.weight: missing in \S*checkpoint$",
    ),
    "unused": (
        lambda tensors: tensors.update({"model.layers.1.self_attn.o_proj.bias": np.ones(4, "f4")}),
        r"layers\.1\.self_attn\.o_proj\.bias: in \S*model\.safetensors belongs to no parameter",
    ),
    "shape": (
        lambda tensors: tensors.update({"lm_head.weight": np.ones((60, 32), "f4")}),
        r"lm_head\.weight: in \S*safetensors has shape \(60, 32\), expected \(61, 32\)",
    ),
    "type": (
        lambda tensors: tensors.update({"model.norm.weight": np.ones(32, "i4")}),
        r"model\.norm\.weight: in \S*safetensors has type int32",
    ),
    "copy": (
        lambda tensors: tensors["model.layers.3.embed_tokens.weight"].__setitem__((7, 7), 3),
        r"layers\.3\.embed_tokens\.weight: in \S*safetensors differs from model\.embed_tokens",
    ),
}


@pytest.fixture(scope="module")
def cfg(tiny_config):
    return replace(tiny_config, mtp=1)


@pytest.fixture(scope="module")
def params(cfg, random_params):
    return jax.device_get(random_params(cfg))


@pytest.fixture
def checkpoint(cfg, params, tmp_path):
    """A folder with one file, to be damaged."""
    hf.save(params, cfg, tmp_path / "checkpoint", dtype="float32")
    sharded = tmp_path / "checkpoint" / "model-00001-of-00001.safetensors"
    sharded.rename(tmp_path / "checkpoint" / "model.safetensors")
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("path", LAYOUTS)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=15, deadline=None)
def test_any_part_of_a_parameter_is_read_from_the_right_places(path, data, cfg):
    flat, _ = jax.tree_util.tree_flatten_with_path(names.sources(cfg, names.table(cfg)))
    source = {jax.tree_util.keystr(p, simple=True, separator="."): s for p, s in flat}[path]
    whole = np.random.default_rng(0).normal(size=source.spec.shape).astype(np.float32)
    stored = LAYOUTS[path](whole, ["model.layers.1", "model.layers.2"])
    ranges = [st.tuples(st.integers(0, n), st.integers(0, n)) for n in whole.shape]
    index = [slice(min(r), max(r)) for r in data.draw(st.tuples(*ranges))]
    np.testing.assert_array_equal(source.read(stored, index, np.float32), whole[tuple(index)])
    assert dict.fromkeys(stored) == dict.fromkeys(name for name, _ in source.tensors())
    for name, place in source.tensors():
        part = whole[tuple(place.get(axis, slice(None)) for axis in range(whole.ndim))]
        np.testing.assert_array_equal(source.to_stored(part), stored[name])


SHARDED = """
import collections
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from c2.models import hf
from c2.models.hf import files

mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
def by_axis(spec):
    for name in ("expert", "embed"):
        if name in spec.axes:
            split = ["x" if axis == name else None for axis in spec.axes]
            return NamedSharding(mesh, PartitionSpec(*split))
    return NamedSharding(mesh, PartitionSpec())

_, whole = hf.load(sys.argv[1])
elements, read = collections.Counter(), files.Tensor.__getitem__
def counted(tensor, index):
    part = read(tensor, index)
    elements[id(tensor.data), tensor.data.size] += part.size
    return part
files.Tensor.__getitem__ = counted
cfg, params = hf.load(sys.argv[1], sharding=by_axis)
# embed and head are compared with their copies in the module too
largest = cfg.vocab * cfg.hidden
over = [(size, n) for (_, size), n in elements.items() if n > size and size != largest]
assert not over, over
jax.tree.map(np.testing.assert_array_equal, params, whole)
assert params.moe.moe.gate_up.addressable_shards[1].data.shape == (2, 2, 32, 2, 16)
assert params.moe.attention.out.addressable_shards[3].data.shape == (2, 2, 10, 8)
"""


def test_every_device_gets_its_shard_and_no_more_is_read(checkpoint):
    root = Path(c2.__file__).parent.parent
    subprocess.run([sys.executable, "-c", SHARDED, checkpoint], cwd=root, check=True)


def test_types_and_missing_modules(cfg, params, checkpoint):
    half_cfg, half = hf.load(checkpoint, dtype=jnp.bfloat16)
    assert half_cfg == replace(cfg, dtype="bfloat16")
    assert half.moe.moe.bias.dtype == jnp.float32 and half.embed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half.embed, params.embed.astype(jnp.bfloat16))
    tensors = load_file(checkpoint / "model.safetensors")
    main = {name: t for name, t in tensors.items() if "layers.3." not in name}
    save_file(main, checkpoint / "model.safetensors")
    assert hf.load(checkpoint)[0] == replace(cfg, mtp=0)  # config.json promises one
    save_file({n: t.astype(np.float16) for n, t in main.items()}, checkpoint / "model.safetensors")
    rounded = params.embed.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(hf.load(checkpoint)[1].embed, rounded)
    with pytest.raises(ConfigError, match="dtype: 'float16' is not supported"):
        hf.load(checkpoint, dtype=jnp.float16)


def test_a_tied_head_may_be_stored_as_a_copy(tmp_path, random_params):
    cfg = models.ModelConfig(**LLAMA)
    hf.save(jax.device_get(random_params(cfg)), cfg, tmp_path / "x")
    tensors = load_file(tmp_path / "x" / "model-00001-of-00001.safetensors")
    tensors |= {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, "f4")}
    save_file(tensors, tmp_path / "x" / "model.safetensors")
    assert hf.load(tmp_path / "x")[0] == cfg
    tensors |= {"lm_head.weight": tensors["lm_head.weight"][:-1].copy()}
    save_file(tensors, tmp_path / "x" / "model.safetensors")
    message = r"lm_head\.weight: .* shape \(10, 8\), but model\.embed_tokens\.weight \(11, 8\)"
    with pytest.raises(ConfigError, match=message):
        hf.load(tmp_path / "x")


@pytest.mark.parametrize("kind", DAMAGE)
def test_tensors_must_fit(kind, checkpoint):
    damage, message = DAMAGE[kind]
    tensors = load_file(checkpoint / "model.safetensors")
    damage(tensors)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        hf.load(checkpoint)


def test_files_must_be_whole(cfg, params, checkpoint, tmp_path):
    file = checkpoint / "model.safetensors"
    data = file.read_bytes()
    for damaged in (data[:-1], data + b"\0", data[:500], data[:4], b"", b"\xff" * 100):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"model\.safetensors: "):
            hf.load(checkpoint)
    file.unlink()
    (checkpoint / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match=r"contains neither model\.safetensors nor"):
        hf.load(checkpoint)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not readable as JSON"):
        hf.load(checkpoint)
    with pytest.raises(ConfigError, match=r"nowhere/config\.json: not found"):
        hf.load(tmp_path / "nowhere")

    hf.save(params, cfg, tmp_path / "sharded", shard_bytes=10_000)
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    first, *_, last = sorted(set(listed["weight_map"].values()))
    for change, message in {
        ("lm_head.weight", last): rf"lm_head\.weight: in \S+{first}, but \S+ says {last}",
        ("lm_head.bias", first): r"lm_head\.bias: in \S+index\.json but not in any file",
        ("lm_head.weight", "gone"): r"gone: No such file",
        ("lm_head.weight", 3): r"weight_map: expected an object of file names",
    }.items():
        changed = listed["weight_map"] | dict([change])
        index.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(ConfigError, match=message):
            hf.load(tmp_path / "sharded")


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60, deadline=None)
def test_any_file_is_read_or_refused(data, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "F4", None]),
            "shape": st.lists(st.integers(-1, 4), max_size=2) | st.none(),
            "data_offsets": st.lists(st.integers(-4, 20), min_size=1, max_size=3),
        }
    )
    header = data.draw(st.dictionaries(st.text(max_size=3), entry, max_size=2) | st.integers())
    encoded = json.dumps(header).encode()
    length = len(encoded) + data.draw(st.sampled_from([0, 0, 0, 1, 2**60]))
    file.write_bytes(length.to_bytes(8, "little") + encoded + data.draw(st.binary(max_size=20)))
    try:
        tensors = files.open_file(file)
    except ConfigError as error:
        assert str(error).startswith(f"{file}: ")
    else:  # then the reference implementation reads the same
        theirs = load_file(file)
        assert {n: t.data.tobytes() for n, t in tensors.items()} == {
            n: t.tobytes() for n, t in theirs.items()
        }


def test_nothing_is_written_over_or_half_written(cfg, params, tmp_path, monkeypatch):
    hf.save(params, cfg, tmp_path / "x" / "y", extra={"eos_token_id": 7})
    assert json.loads((tmp_path / "x" / "y" / "config.json").read_text())["eos_token_id"] == 7
    assert len({file.stat().st_mode for file in (tmp_path / "x" / "y").iterdir()}) == 1
    with pytest.raises(ConfigError, match="y: exists already"):
        hf.save(params, cfg, tmp_path / "x" / "y")
    for key in ("hidden_act", "model_type"):
        with pytest.raises(ConfigError, match=rf"extra\.{key}: may change"):
            hf.save(params, cfg, tmp_path / "z", extra={key: "gelu"})
    wrong = replace(params, norm=params.norm[1:])
    message = r"model\.norm\.weight .* shape \(31,\), expected \(32,\)"
    with pytest.raises(ConfigError, match=message):
        hf.save(wrong, cfg, tmp_path / "z")

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        hf.save(params, cfg, tmp_path / "z")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_shards_follow_the_layers_and_the_limit(cfg, params, tmp_path):
    hf.save(params, replace(cfg), tmp_path / "x", shard_bytes=20_000)
    sizes, layers = [], []
    for file in sorted((tmp_path / "x").glob("*.safetensors")):
        tensors = load_file(file)
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        layers += sorted({int(name.split(".")[2]) for name in tensors if "layers" in name})
    assert max(sizes) <= 20_000 < sizes[0] + sizes[1]
    assert layers == sorted(layers)
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)


def test_the_example_in_the_readme_runs(random_params, tmp_path, monkeypatch, capsys):
    root = Path(c2.__file__).parent.parent
    (example,) = re.findall(r"```python\n([^`]*hf\.load[^`]*)```", (root / "README.md").read_text())
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    cfg = models.ModelConfig(**LLAMA | {"vocab": len(alphabet)})
    monkeypatch.chdir(tmp_path)
    hf.save(jax.device_get(random_params(cfg)), cfg, "SmolLM2-135M")
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save("SmolLM2-135M/tokenizer.json")
    Path("c2/models").mkdir(parents=True)
    Path("c2/models/rope.py").write_text("def nothing():\n    pass\n")
    exec(compile(example, "README.md", "exec"), {})
    bits = float(capsys.readouterr().out.removesuffix(" bits per byte\n"))
    assert 7 < bits < 11  # of 8: a random model with single bytes as tokens
