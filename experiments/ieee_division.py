"""What does an approximate division do to NVFP4 and MXFP8, and to log-probs of engine and trainer?

The report's NVFP4 quantiser needs IEEE division, while fast paths are fine for MXFP8 (section 6.1).
Here published ways to divide are counted against the IEEE rule, code by code; then a trainer scores
what an engine with the same weights and the IEEE rule sampled.

    python -m launch.main --config=experiments/ieee_division.py --workdir=runs/ieee_division

Expect every path but IEEE division to change 2 to 35 of 10,000 NVFP4 codes, and 43 times as many or
more next to ties, at the same relative error of .0952; no MXFP8 scale of a bf16 maximum to change
by a product with fl(1 / 448), 247 if that constant is rounded up, and those of 2.6 % of normal
blocks by a logarithm in bf16. Trainers are .006 to .018 nats (rms) from the engine after one
mixture layer and .081 to .095 after eight, whatever path they use. One claim comes out as "not
shown": that this is less than half of what rounding to NVFP4 does to log-probs (it is .73 of it).
About 2 minutes on 2 cores; `ieee_division.py:smoke` counts less.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from c2.config import ConfigError
from experiments import division_report as report
from experiments import plotting
from experiments.division_gap import NATIVE, Models, compare_models
from experiments.division_rules import BF16, IEEE, RULES, SCALE_PATHS, Codes
from experiments.study import Result, Run
from pallas_kernels import float_bits as fb
from pallas_kernels import mxfp8, nvfp4

VARIANTS = ("default", "smoke")

PATHS = tuple(RULES)[1:]
MODEL_PATHS = (
    "x * rcp",
    "x * rcp, +2 ulp",
    "torchao: x * ((1 / g) / s)",
    "TE: x * (1 / (s * (1 / e)))",
    "TE, fast: bf16 coefficient",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the study.

    Attributes:
      paths: ways to divide whose codes are counted, of `PATHS`.
      model_paths: those that a trainer uses.
      tokens: of the matrix whose codes are counted.
      features: of each token.
      blocks: of the MXFP8 blocks with normal numbers.
      depths: mixture layers of the model, rising.
      batch: rows that the model scores.
      context: tokens of a row.
      seeds: models.
    """

    paths: tuple[str, ...] = PATHS
    model_paths: tuple[str, ...] = MODEL_PATHS
    tokens: int = 2048
    features: int = 4096
    blocks: int = 65_536
    depths: tuple[int, ...] = (1, 2, 4, 8)
    batch: int = 8
    context: int = 128
    seeds: int = 3

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        for key in ("paths", "model_paths"):
            names = getattr(self, key)
            if not names or not set(names) <= set(PATHS):
                raise ConfigError(f"{key}: {names}; legal: one or more of {', '.join(PATHS)}")
        for key in ("tokens", "blocks", "batch", "context", "seeds"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}: {getattr(self, key)}; legal: at least 1")
        if self.features < 16 or self.features % 16:
            raise ConfigError(f"features: {self.features}; legal: multiples of 16")
        if not self.depths or self.depths[0] < 1 or list(self.depths) != sorted(set(self.depths)):
            raise ConfigError(f"depths: {self.depths}; legal: rising numbers from 1")


def get_config(variant: str = VARIANTS[0]) -> Config:
    """The study's sizes."""
    match variant:
        case "default":
            return Config()
        case "smoke":
            few = ("x * rcp, +2 ulp", "TE, fast: bf16 coefficient")
            return Config(
                paths=few,
                model_paths=few,
                tokens=64,
                features=512,
                blocks=4096,
                depths=(1, 2),
                batch=2,
                context=32,
                seeds=1,
            )
    raise ConfigError(f"variant: {variant!r}; legal: {', '.join(VARIANTS)}")


# --- NVFP4 codes ---


def normal(tokens: int, features: int, seed: int) -> np.ndarray:
    """Standard normal numbers in bf16, what activations behind a norm look like."""
    return np.random.default_rng(seed).normal(size=(tokens, features)).astype(BF16)


def near_ties(x: np.ndarray, seed: int) -> np.ndarray:
    """Bf16 numbers closest to a tie between two codes, in blocks with the scales of those of x.

    The first of each block is its largest, all others are random ties times s * g.
    """
    rng = np.random.default_rng(seed)
    blocks = x.astype(np.float32).reshape(len(x), -1, 16)
    blocks[..., 0] = np.abs(blocks).max(-1)
    q = nvfp4.quantize(jnp.asarray(blocks.astype(BF16).reshape(x.shape)))
    d = np.asarray(fb.decode_e4m3(q.block_scales) * q.outer_scale[:, None])[..., None]
    ties = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], (*d.shape[:2], 15))
    blocks[..., 1:] = ties * d * rng.choice([-1, 1], ties.shape)
    return blocks.reshape(x.shape).astype(BF16)


def compare(x: np.ndarray, names: tuple[str, ...]) -> dict[str, Codes]:
    """Every path's codes for x [tokens, features], and those of the IEEE rule."""
    wide = x.astype(np.float64)
    size = np.sqrt((wide**2).mean())

    def codes(name: str) -> tuple[np.ndarray, np.ndarray, float]:
        q = jax.jit(RULES[name])(x)
        error = np.asarray(nvfp4.dequantize(q)) - wide
        rmse = np.sqrt((error**2).mean()) / size
        return np.asarray(fb.unpack_nibbles(q.codes)), np.asarray(q.block_scales), rmse

    right, right_scales, rmse = codes(IEEE)
    found = {IEEE: Codes(0, np.nan, 0, rmse)}
    for name in names:
        got, scales, rmse = codes(name)
        changed = got != right
        upwards = ((got & 7) > (right & 7)).sum() / max(changed.sum(), 1)
        found[name] = Codes(changed.mean(), upwards, (scales != right_scales).mean(), rmse)
    return found


# --- MXFP8 scales ---


def right_scales(amax: np.ndarray) -> np.ndarray:
    """E8M0 codes of blocks with these maxima, f32 [block]."""
    blocks = np.zeros((len(amax), 32), np.float32)
    blocks[:, 0] = amax
    return np.asarray(jax.jit(mxfp8.quantize)(blocks).scales)[:, 0]


def compare_scales(config: Config) -> dict[str, dict[str, int]]:
    """How many scales each path gets wrong, in three sets of block maxima."""
    edges = np.nextafter(np.float32(448) * np.exp2(np.arange(-100, 100, dtype=np.float32)), np.inf)
    sets = {
        "bf16 amax": np.arange(1, 0x7F80, dtype=np.uint16).view(BF16).astype(np.float32),
        "N(0,1) blocks": np.abs(normal(config.blocks, 32, seed=1)).max(-1).astype(np.float32),
        "just above 448 * 2^k": edges,
    }
    maxima = np.concatenate(list(sets.values()))
    ends = np.cumsum([len(amax) for amax in sets.values()])[:-1]
    right = right_scales(maxima)
    return {
        name: {
            kind: int(wrong.sum())
            for kind, wrong in zip(sets, np.split(path(maxima) != right, ends), strict=True)
        }
        for name, path in SCALE_PATHS.items()
    }


# --- The study ---


def run(config: Config, run: Run) -> Result:
    """Measures, judges and draws."""
    x = normal(config.tokens, config.features, seed=0)
    random = compare(x, config.paths)
    ties = compare(near_ties(x, seed=2), config.paths)
    run.console.print("codes counted", highlight=False)
    mxfp8_scales = compare_scales(config)
    models = compare_models(config, run)
    with plotting.style():
        figures = [
            report.draw_codes(config, run, random, ties),
            report.draw_gaps(config, run, models),
        ]
    return Result(
        summary=summary(config, random, models),
        claims=report.judge(config, random, ties, mxfp8_scales, models),
        figures=figures,
        tables={
            "NVFP4 codes that are not those of the IEEE rule": [
                {
                    "path": name,
                    "changed": found.changed,
                    "changed near ties": ties[name].changed,
                    "of these to a larger magnitude": found.upwards,
                    "block scales changed": found.scales,
                    "relative RMSE": round(found.rmse, 6),
                }
                for name, found in random.items()
            ],
            f"MXFP8 scales that are wrong, of 32,639 bf16 maxima, {config.blocks:,} blocks of"
            " normal numbers and 200 f32 maxima just above 448 * 2^k": [
                {"path": name, **wrong} for name, wrong in mxfp8_scales.items()
            ],
            f"Engine by the IEEE rule against trainers, {config.depths[-1]} mixture layers": [
                report.model_row(name, models) for name in models.gaps
            ],
        },
        metrics={
            f"rms_gap/{name}": float(models.gaps[name].rms[:, -1].mean()) for name in models.gaps
        },
    )


def summary(config: Config, random: dict[str, Codes], models: Models) -> str:
    """The findings in words, and what they cannot say."""
    shares = [random[name].changed for name in config.paths]
    errors = [found.rmse for found in random.values()]
    rms = {name: gap.rms[:, -1].mean() for name, gap in models.gaps.items()}
    trainers = [rms[name] for name in config.model_paths]
    bias = [abs(models.gaps[name].mean[:, -1].mean()) / rms[name] for name in config.model_paths]
    return f"""\
Every way to divide that is not IEEE division changes {min(shares):.1e} to {max(shares):.1e} of the
NVFP4 codes of normal numbers, and far more next to ties; the relative error is {min(errors):.4f} to
{max(errors):.4f} in all of them, so only a comparison of codes can find the difference. Plain jnp
is one of these ways: XLA replaces a division by a broadcast with a product, on CPUs too. MXFP8
scales survive a multiplication by fl(1 / 448), but neither a constant rounded up nor a logarithm in
bf16.

Between an engine with the IEEE rule and trainers without, sampled tokens' log-probs are
{min(trainers):.3f} to {max(trainers):.3f} nats apart (rms) after {config.depths[-1]} mixture
layers, where rounding to NVFP4 at all costs {rms[NATIVE]:.3f}. A few changed codes are enough: each
later quantiser turns a small difference into whole steps. Averaged over tokens the gap is at most
{max(bias):.1%} of its rms, and the error of the head's gradient hardly adds up over contexts. But
it is no noise that more samples of a context would average out: the same tokens get the same gap
every time.

**Limits.** Random weights, random text and {config.depths[-1]} small layers: expect the order of
magnitude of the shares to carry over, not the gaps. That RL diverges after about 100 steps, as the
report says, a CPU cannot show.
"""
