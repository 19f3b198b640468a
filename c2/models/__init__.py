"""The model: pure functions over typed parameter trees."""

from c2.models import presets
from c2.models.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig, YarnConfig
from c2.models.transformer import (
    Output,
    ParamCount,
    Params,
    Trunk,
    abstract,
    count,
    forward,
    init,
    spec,
    trunk,
)

__all__ = [
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "Output",
    "ParamCount",
    "Params",
    "RopeConfig",
    "Trunk",
    "YarnConfig",
    "abstract",
    "count",
    "forward",
    "init",
    "presets",
    "spec",
    "trunk",
]
