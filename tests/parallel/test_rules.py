"""Rule tables at full size: which part of a parameter lies where, from shapes alone."""

import math
from types import SimpleNamespace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2 import models
from c2.config import ConfigError
from c2.models import presets
from c2.models.params import ParamSpec
from c2.parallel import rules
from c2.parallel.mesh import AXES, EXPERTS, MeshConfig, shape


def mesh_of(cfg, devices):
    return SimpleNamespace(shape=dict(zip(AXES, shape(cfg, devices), strict=True)))


def parts(partition, mesh):
    axes = [entry if isinstance(entry, tuple) else (entry,) for entry in partition if entry]
    return math.prod(mesh.shape[axis] for entry in axes for axis in entry)


@given(
    st.integers(0, 4).map(lambda i: 2**i), st.integers(0, 4).map(lambda i: 2**i), st.integers(4, 10)
)
def test_expert_ranks_are_made_of_both_views(context, expert, log_devices):
    devices = 2**log_devices
    cfg = MeshConfig(context=context, expert=expert)
    if expert > max(devices // context, 1) * math.gcd(expert, context):
        with pytest.raises(ConfigError, match=rf"expert: {expert} ranks .* {devices} devices"):
            shape(cfg, devices)
        return
    mesh = mesh_of(cfg, devices)
    assert math.prod(mesh.shape.values()) == devices
    assert mesh.shape["context"] * mesh.shape["context_ep"] == context
    assert mesh.shape["data_ep"] * mesh.shape["context_ep"] == expert


@pytest.mark.parametrize(
    ("devices", "context", "expert"), [(1024, 2, 8), (1024, 8, 8), (1024, 1, 8), (512, 2, 8)]
)
@pytest.mark.parametrize("preset", ["kimi_k25", "deepseek_v3"])
def test_every_matrix_lies_over_all_devices(preset, devices, context, expert):
    cfg = MeshConfig(context=context, expert=expert, weights="sharded")
    mesh = mesh_of(cfg, devices)
    vectors = 0
    for spec in jax.tree.leaves(models.spec(presets.get(preset))):
        found = rules.partition(spec, cfg, mesh)
        if rules.is_vector(spec):
            vectors += spec.size
            assert parts(found, mesh) == 1
        else:
            assert parts(found, mesh) == devices, spec
        if rules.is_routed(spec):
            assert found[spec.axes.index("expert")] == EXPERTS
    assert vectors < 2e6  # what every device holds of a trillion parameters


def test_replicated_weights_share_only_experts():
    cfg = MeshConfig(context=2, expert=4)
    mesh = mesh_of(cfg, 8)
    for spec in jax.tree.leaves(models.spec(presets.get("tiny_mla_moe"))):
        expected = 4 if rules.is_routed(spec) else 1
        assert parts(rules.partition(spec, cfg, mesh), mesh) == expected


def test_dimension_that_does_not_divide_is_named():
    cfg = MeshConfig(context=2, expert=2, weights="sharded")
    spec = ParamSpec((36, 64), ("embed", "q_latent"))
    with pytest.raises(ConfigError, match=r"embed = 36 .*data 4 x data_ep 1 x context 1 x .*_ep 2"):
        rules.partition(spec, cfg, mesh_of(cfg, 8))


def test_dimensions_cannot_share_an_axis():
    cfg = MeshConfig(weights="sharded")
    spec = ParamSpec((64, 64), ("embed", "embed"))
    with pytest.raises(ConfigError, match="an axis to two dimensions"):
        rules.partition(spec, cfg, mesh_of(cfg, 8))
