"""The model: pure functions over typed parameter trees."""

from c2.models import presets
from c2.models.cache import Cache
from c2.models.config import (
    GQAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    YarnConfig,
)
from c2.models.transformer import (
    Output,
    ParamCount,
    Params,
    Trunk,
    abstract,
    count,
    forward,
    head,
    init,
    init_cache,
    logits,
    spec,
    trunk,
)

__all__ = [
    "Cache",
    "GQAConfig",
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
    "head",
    "init",
    "init_cache",
    "logits",
    "presets",
    "spec",
    "trunk",
]
