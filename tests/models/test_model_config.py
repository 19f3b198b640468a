"""Validation of model configurations."""

from dataclasses import replace

import pytest

from c2.config import ConfigError
from c2.models import MLAConfig, MoEConfig, RopeConfig, YarnConfig

MLA = MLAConfig(heads=2, q_lora=4, kv_lora=4, nope=4, rope=4, v=4)
MOE = MoEConfig(experts=8, top_k=2, intermediate=4, groups=4, top_groups=2)


@pytest.mark.parametrize(
    ("cfg", "change", "named"),
    [
        (MLA, {"heads": 0}, "heads"),
        (MLA, {"v": -1}, "v must"),
        (MLA, {"rope": 3}, "rope must be even"),
        (MOE, {"groups": 3}, "groups = 3 must divide experts = 8"),
        (MOE, {"groups": 8}, "two best experts"),
        (MOE, {"top_groups": 5}, "top_groups must be in 1..groups = 4"),
        (MOE, {"top_k": 5}, "top_k must be in 1..4"),
        (MOE, {"top_k": 0}, "top_k"),
        (MOE, {"shared": -1}, "shared"),
        (RopeConfig(), {"theta": 1.0}, "theta"),
        (YarnConfig(factor=2.0, original_context=8), {"factor": 0.5}, "factor"),
        (YarnConfig(factor=2.0, original_context=8), {"original_context": 0}, "original_context"),
    ],
)
def test_illegal_values_are_refused_by_name(cfg, change, named):
    with pytest.raises(ConfigError, match=named):
        replace(cfg, **change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab": 0}, "vocab"),
        ({"dense_layers": 4}, r"dense_layers must be in 0..layers = 3"),
        (
            {"moe": replace(MOE, precision="mxfp8")},
            r"^moe.precision: .* multiples of 32.*\(32, 4\)",
        ),
    ],
)
def test_illegal_model_is_refused_by_name(tiny_config, change, named):
    with pytest.raises(ConfigError, match=named):
        replace(tiny_config, **change)
