"""Model configuration: every number that changes the function a model computes."""

from dataclasses import dataclass
from typing import Literal

from c2.config import ConfigError, runtime
from pallas_kernels.mxfp8.rounding import BLOCK


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
    """Rotary position embedding: base frequency and optional YaRN scaling.

    ``layout`` says which features form a pair: neighbours (0,1), (2,3), ... as in DeepSeek and Kimi
    checkpoints, or i and i + features / 2 as in Llama and Qwen checkpoints.
    """

    theta: float = 10_000.0
    yarn: YarnConfig | None = None
    layout: Literal["neighbours", "halves"] = "neighbours"

    def __post_init__(self):
        if self.theta <= 1:
            raise ConfigError(f"theta must exceed 1, got {self.theta}")


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2 section 2.1).

    Queries and keys have ``nope + rope`` features per head, values have ``v``. ``latent_norm_eps``
    is a field of its own because implementations of the same checkpoints disagree about it: the
    reference code fixes 1e-6, some engines use the model's ``norm_eps``. Without ``q_lora``
    queries are projected directly.

    ``absorb`` says how cached tokens are attended to: as the latents that they are, or, in as much
    time as it takes to expand them at every step, as the keys and values that training computes.
    In low precision only the latter rounds as training does.
    """

    kind: Literal["mla"] = "mla"
    heads: int
    q_lora: int | None
    kv_lora: int
    nope: int
    rope: int
    v: int
    latent_norm_eps: float = 1e-6
    absorb: bool = runtime(True)

    def __post_init__(self):
        for name in ("heads", "kv_lora", "nope", "rope", "v"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.q_lora is not None and self.q_lora < 1:
            raise ConfigError(f"q_lora must be positive or none, got {self.q_lora}")
        if self.rope % 2:
            raise ConfigError(f"rope must be even (features rotate in pairs), got {self.rope}")

    @property
    def rotary(self) -> int:
        """Features per head that carry the position."""
        return self.rope

    @property
    def qk(self) -> int:
        """Features per head of queries and keys."""
        return self.nope + self.rope


@dataclass(frozen=True, kw_only=True)
class GQAConfig:
    """Grouped-query attention (Ainslie et al. 2023).

    Query head i uses key and value head ``i // (heads / kv_heads)``. ``qk_norm`` norms each head's
    queries and keys before rotation, as Qwen3 does.
    """

    kind: Literal["gqa"] = "gqa"
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False

    def __post_init__(self):
        for name in ("heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads = {self.kv_heads} must divide heads = {self.heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even (features rotate in pairs): {self.head_dim}")

    @property
    def rotary(self) -> int:
        """Features per head that carry the position."""
        return self.head_dim

    @property
    def qk(self) -> int:
        """Features per head of queries and keys."""
        return self.head_dim


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts (DeepSeek-V3 section 2.1.2; Qwen3 with softmax and no bias).

    ``scoring`` turns router logits into scores. ``bias`` adds a selection bias per expert, which
    training moves towards equal load. ``groups`` > 1 limits each token to its ``top_groups`` best
    groups of experts. ``precision`` is that of the routed experts' products (report section 6.1):
    ``native`` is the compute dtype; below it operands are quantised in blocks from bf16, by MXFP8
    in both passes or by NVFP4 with a scale per token in the forward and MXFP8 in the backward pass.
    """

    experts: int
    top_k: int
    intermediate: int
    shared: int = 1
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    bias: bool = True
    groups: int = 1
    top_groups: int = 1
    norm_top_k: bool = True
    scale: float = 1.0
    precision: Literal["native", "mxfp8", "nvfp4_fwd_mxfp8_bwd"] = "native"

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

    ``tied`` uses the embedding as the head. ``mtp`` is the number of multi-token-prediction modules
    (DeepSeek-V3 section 2.2; report section 3.1). ``dtype`` is the type activations and matmul
    operands are computed in; parameters are stored in f32. ``remat`` names what the backward pass
    recomputes: ``none`` keeps every residual, ``dots`` keeps matmul results only, ``full`` keeps
    one hidden state per layer. ``kernels`` names the backend of attention and routed experts, see
    `pallas_kernels`: ``xla`` runs everywhere and is made for CPUs.
    """

    vocab: int
    hidden: int
    layers: int
    dense_layers: int
    dense_intermediate: int
    attention: MLAConfig | GQAConfig
    moe: MoEConfig | None
    rope: RopeConfig = RopeConfig()
    norm_eps: float = 1e-6
    tied: bool = False
    mtp: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "dots", "full"] = "none"
    kernels: Literal["xla", "tpu", "hopper", "blackwell"] = "xla"

    def __post_init__(self):
        for name in ("vocab", "hidden", "layers", "dense_intermediate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.dense_layers <= self.layers:
            raise ConfigError(
                f"dense_layers must be in 0..layers = {self.layers}, got {self.dense_layers}"
            )
        if self.moe is None and self.dense_layers < self.layers:
            raise ConfigError(
                f"moe may be none only if dense_layers = {self.dense_layers} equals layers = "
                f"{self.layers}"
            )
        if self.mtp < 0:
            raise ConfigError(f"mtp must be at least 0, got {self.mtp}")
        if self.moe is not None and self.moe.precision != "native":
            sizes = self.hidden, self.moe.intermediate
            if any(size % BLOCK for size in sizes):
                raise ConfigError(
                    f"moe.precision: {self.moe.precision!r} needs multiples of {BLOCK}, the length "
                    f"of a block, as hidden and moe.intermediate; got {sizes}"
                )

    @property
    def moe_layers(self) -> int:
        """Number of mixture-of-experts blocks."""
        return self.layers - self.dense_layers
