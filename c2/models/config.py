"""Model configuration: every number that changes the function a model computes."""

from dataclasses import dataclass
from typing import Literal

from c2.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN rotary scaling (Peng et al. 2023), with the DeepSeek-V2/V3 attention temperature.

    Switching a model from short to long context changes this block and nothing else.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def __post_init__(self):
        if self.factor < 1:
            raise ConfigError(f"factor must be at least 1, got {self.factor}")
        if self.original_context < 1:
            raise ConfigError(f"original_context must be positive, got {self.original_context}")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base frequency and optional YaRN scaling."""

    theta: float = 10_000.0
    yarn: YarnConfig | None = None

    def __post_init__(self):
        if self.theta <= 1:
            raise ConfigError(f"theta must exceed 1, got {self.theta}")


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2 section 2.1).

    Queries and keys have ``nope + rope`` features per head, values have ``v``. ``latent_norm_eps``
    is a field of its own because implementations of the same checkpoints disagree about it: the
    reference code fixes 1e-6, some engines use the model's ``norm_eps``.
    """

    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int
    latent_norm_eps: float = 1e-6

    def __post_init__(self):
        for name in ("heads", "q_lora", "kv_lora", "nope", "rope", "v"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.rope % 2:
            raise ConfigError(f"rope must be even (features rotate in pairs), got {self.rope}")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts with a sigmoid router and a selection bias (DeepSeek-V3 section 2.1.2).

    ``groups`` > 1 limits each token to its ``top_groups`` best groups of experts.
    """

    experts: int
    top_k: int
    intermediate: int
    shared: int = 1
    groups: int = 1
    top_groups: int = 1
    norm_top_k: bool = True
    scale: float = 1.0

    def __post_init__(self):
        if self.experts < 1 or self.intermediate < 1 or self.shared < 0:
            raise ConfigError(
                "experts and intermediate must be positive and shared at least 0, got "
                f"{self.experts}, {self.intermediate}, {self.shared}"
            )
        if self.groups < 1 or self.experts % self.groups:
            raise ConfigError(f"groups = {self.groups} must divide experts = {self.experts}")
        if not 1 <= self.top_groups <= self.groups:
            raise ConfigError(
                f"top_groups must be in 1..groups = {self.groups}, got {self.top_groups}"
            )
        if self.groups > 1 and self.experts // self.groups < 2:
            raise ConfigError(
                f"a group is scored by its two best experts, but experts / groups = "
                f"{self.experts} / {self.groups} leaves fewer than 2"
            )
        eligible = self.experts // self.groups * self.top_groups
        if not 1 <= self.top_k <= eligible:
            raise ConfigError(f"top_k must be in 1..{eligible} eligible experts, got {self.top_k}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of ``dense_layers`` dense blocks followed by mixture-of-experts blocks.

    ``dtype`` is the type activations and matmul operands are computed in; parameters are stored
    in f32. ``remat`` names what the backward pass recomputes: ``none`` keeps every residual,
    ``dots`` keeps matmul results only, ``full`` keeps one hidden state per layer.
    """

    vocab: int
    hidden: int
    layers: int
    dense_layers: int
    dense_intermediate: int
    attention: MLAConfig
    moe: MoEConfig
    rope: RopeConfig = RopeConfig()
    norm_eps: float = 1e-6
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "dots", "full"] = "none"

    def __post_init__(self):
        for name in ("vocab", "hidden", "layers", "dense_intermediate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.dense_layers <= self.layers:
            raise ConfigError(
                f"dense_layers must be in 0..layers = {self.layers}, got {self.dense_layers}"
            )

    @property
    def moe_layers(self) -> int:
        """Number of mixture-of-experts blocks."""
        return self.layers - self.dense_layers
