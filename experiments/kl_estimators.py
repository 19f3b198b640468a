"""Which estimator of KL(q||p) stays usable when the policy moves away from the reference?

The report regularises RL with k1 = -log r because the variance of k3 = (r - 1) - log r explodes
(section 3, Fig. 4; r = p / q, samples from the policy q). Here q = N(0, 1) and p = N(mu, 1), so
KL = mu^2 / 2 and every moment is known. A second part asks which gradient each estimator gives,
as a loss and as a reward: exact expectations over categorical policies.

    python -m launch.main --config=experiments/kl_estimators.py --workdir=runs/kl_estimators

Expect Schulman's table (std / KL of k1, k2, k3: 20, 1.42, 1.42 at mu = 0.1; 2, 1.73, 1.70 at
mu = 1), k3 noisier than k1 from KL = 0.628 on, and at mu = 4 a k3 whose standard deviation is
373 times the KL, of which a million samples show next to nothing.
About 10 seconds on 2 cores; `kl_estimators.py:quick` with fewer samples takes 5.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from c2.config import ConfigError
from c2.losses import kl
from experiments import plotting
from experiments.study import Claim, Figure, Result, Run, new_figure

VARIANTS = ("full", "quick")

# Schulman, "Approximating KL Divergence" (2020): mu -> estimator -> bias / KL and std / KL as
# printed there, except that a plain 0 is written with the digits of its column.
PUBLISHED = {
    0.1: {"k1": ("0.000", "20"), "k2": ("0.002", "1.42"), "k3": ("0.000", "1.42")},
    1.0: {"k1": ("0.00", "2"), "k2": ("0.25", "1.73"), "k3": ("0.00", "1.7")},
}
CROSSOVER = 0.6282  # KL = u / 2 at which Var k3 = e^u - 1 - u passes Var k1 = u
# How an estimator can be used: from right over misleading to useless.
USES = ("k1 in reward", "k2 as loss", "k3 as loss", "k2 in reward", "k3 in reward", "k1 as loss")
EXAMPLE = ((0.5, -0.2, 0.1), (0.0, 0.3, -0.4))  # logits of a policy and of its reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the study.

    Attributes:
      samples: Monte-Carlo samples per estimate.
      seeds: independent repetitions.
      mu_min: smallest distance between the means of q and p.
      mu_max: largest distance; float32 overflows in k3 soon after 6.
      points: distances between the two, evenly spaced on a log scale.
      unreliable: a sample variance is flagged if its relative standard error is above this.
      policies: random pairs of policy and reference for the gradients.
      vocab: size of their alphabet.
    """

    samples: int = 1_000_000
    seeds: int = 5
    mu_min: float = 0.05
    mu_max: float = 4.0
    points: int = 24
    unreliable: float = 0.05
    policies: int = 2000
    vocab: int = 8

    def __post_init__(self) -> None:
        """Checks ranges."""
        least = {"samples": 1000, "seeds": 1, "points": 2, "policies": 1, "vocab": 2}
        for key, bound in least.items():
            if getattr(self, key) < bound:
                raise ConfigError(f"{key}: {getattr(self, key)}; legal: at least {bound}")
        if not 0 < self.mu_min < self.mu_max <= 6:
            given = f"{self.mu_min}, {self.mu_max}"
            raise ConfigError(f"mu_min, mu_max: {given}; legal: 0 < mu_min < mu_max <= 6")
        if not self.unreliable > 0:
            raise ConfigError(f"unreliable: {self.unreliable}; legal: above 0")


def get_config(variant: str = VARIANTS[0]) -> Config:
    """The study's sizes."""
    match variant:
        case "full":
            return Config()
        case "quick":
            return Config(samples=50_000, seeds=3, points=8, policies=200)
    raise ConfigError(f"variant: {variant!r}; legal: {', '.join(VARIANTS)}")


# --- As values: q = N(0, 1), p = N(mu, 1) ---


class Moments(NamedTuple):
    """What one estimator gives, each [mu]."""

    mean: np.ndarray
    variance: np.ndarray
    tail: np.ndarray  # sqrt(kurtosis - 1); over sqrt(n): relative error of n samples' variance


def quadrature(mu: Sequence[float] | np.ndarray) -> dict[str, Moments]:
    """Estimator -> its moments, by the trapezoidal rule through `kl.estimate`."""
    # The widest integrand, the fourth moment of k3, has its peak at x = 4 mu.
    x = np.linspace(-12.0, 4 * np.max(mu) + 12.0, 6001)
    weight = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    with jax.enable_x64(True):
        moments = _moments(x, weight, np.asarray(mu)[:, None])
    return jax.tree.map(np.asarray, moments)


@jax.jit
def _moments(x: jax.Array, weight: jax.Array, mu: jax.Array) -> dict[str, Moments]:
    moments = {}
    for estimator, k in _estimates(x, mu).items():  # [mu, x]
        mean = k @ weight
        centred = k - mean[:, None]
        variance = centred**2 @ weight
        tail = jnp.sqrt(centred**4 @ weight / variance**2 - 1)
        moments[estimator] = Moments(mean, variance, tail)
    return moments


@functools.partial(jax.jit, static_argnames="samples")
def monte_carlo(key: jax.Array, mu: jax.Array, *, samples: int) -> dict[str, jax.Array]:
    """Estimator -> mean and variance of a sample, [2]."""
    estimates = _estimates(jax.random.normal(key, samples), mu)
    return {name: jnp.stack([k.mean(), k.var(ddof=1)]) for name, k in estimates.items()}


def _estimates(x: jax.Array, mu: jax.Array) -> dict[str, jax.Array]:
    log_p, log_q = -jnp.square(x - mu) / 2, -jnp.square(x) / 2  # up to the same constant
    return {estimator: kl.estimate(log_p, log_q, estimator) for estimator in kl.ESTIMATORS}


def crossover() -> float:
    """The KL at which the variance of k3 passes that of k1, by bisection on the quadrature."""
    low, high = 0.5, 2.0
    for _ in range(30):
        mu = (low + high) / 2
        at = quadrature([mu])
        low, high = (mu, high) if at["k3"].variance < at["k1"].variance else (low, mu)
    return mu**2 / 2


class Values(NamedTuple):
    """The first part's measurements."""

    mu: np.ndarray
    exact: dict[str, Moments]
    means: dict[str, np.ndarray]  # of samples, [seed, mu]
    variances: dict[str, np.ndarray]
    flagged: np.ndarray  # [mu], where no sample tells the variance of k3
    crossover: float


def measure_values(config: Config, run: Run) -> Values:
    """Quadrature and independent samples for every distance and seed."""
    mu = np.geomspace(config.mu_min, config.mu_max, config.points)
    mu = np.union1d(mu, list(PUBLISHED))
    exact = quadrature(mu)
    sampled = {e: np.zeros((2, config.seeds, len(mu))) for e in kl.ESTIMATORS}
    for seed in range(config.seeds):
        run.console.print(f"seed {seed}: {len(mu)} x {config.samples:,} samples")
        for i, key in enumerate(jax.random.split(jax.random.key(seed), len(mu))):
            for estimator, moments in monte_carlo(key, mu[i], samples=config.samples).items():
                sampled[estimator][:, seed, i] = moments
    means, variances = ({e: s[i] for e, s in sampled.items()} for i in range(2))
    flagged = exact["k3"].tail / math.sqrt(config.samples) > config.unreliable
    return Values(mu, exact, means, variances, flagged, crossover())


def published_table(values: Values) -> list[dict[str, Any]]:
    """Schulman's numbers next to ours."""
    rows = []
    for mu, estimators in PUBLISHED.items():
        i = int(np.searchsorted(values.mu, mu))
        divergence = mu**2 / 2
        for estimator, printed in estimators.items():
            moments = values.exact[estimator]
            bias = moments.mean[i] / divergence - 1
            std = math.sqrt(moments.variance[i]) / divergence
            sampled = values.variances[estimator][:, i].mean()
            rows.append(
                {
                    "mu": mu,
                    "estimator": estimator,
                    "bias/KL": round(bias, 6) + 0.0,  # + 0.0: no minus
                    "bias, published": printed[0],
                    "bias, sampled": values.means[estimator][:, i].mean() / divergence - 1,
                    "std/KL": std,
                    "std, published": printed[1],
                    "std, sampled": math.sqrt(sampled) / divergence,
                    "off by, last digits": max(
                        abs(ours - float(text)) * 10 ** len(text.partition(".")[2])
                        for ours, text in zip((bias, std), printed, strict=True)
                    ),
                }
            )
    return rows


def value_claims(config: Config, values: Values, table: list[dict[str, Any]]) -> list[Claim]:
    """What Fig. 4 says, and that our numbers can be trusted."""
    u = values.mu**2
    expected = {"k1": u / 2, "k2": u / 2 + u**2 / 8}
    errors = {
        e: (values.means[e] - mean) / np.sqrt(values.variances[e] / config.samples)
        for e, mean in expected.items()
    }
    true = {e: moments.variance for e, moments in values.exact.items()}
    shares = {e: values.variances[e] / true[e] for e in kl.ESTIMATORS}  # [seed, mu]
    trusted = [shares["k1"], shares["k2"], shares["k3"][:, ~values.flagged]]
    ratio = true["k3"] / true["k1"]
    exact, sampled = (functools.partial(Claim, seeds=n) for n in (1, config.seeds))
    near, far = f"{u[0] / 2:.2g}", f"{u[-1] / 2:.2g}"
    return [
        exact(
            statement="Schulman's table comes out (largest difference in units of his last digit)",
            measured=max(row["off by, last digits"] for row in table),
            bound=1,
            relation="<=",
            note="He prints 0.002 for the bias of k2 at mu = 0.1, which is exactly 0.0025.",
        ),
        exact(
            statement=f"k3 becomes noisier than k1 at KL = {CROSSOVER} (distance)",
            measured=abs(values.crossover - CROSSOVER),
            bound=1e-3,
            relation="<=",
            note=f"Bisection on the variances by quadrature gives {values.crossover:.5f}.",
        ),
        exact(
            statement=f"Near the reference k3 is the quieter one (Var k3 / Var k1 at KL {near})",
            measured=ratio[0],
            bound=0.1,
            relation="<=",
        ),
        exact(
            statement=f"Far from it the variance of k3 explodes (Var k3 / Var k1 at KL {far})",
            measured=ratio[-1],
            bound=1000,
            relation=">=",
        ),
        sampled(
            statement="Sampled means of k1 and k2 are where theory has them, k1 without bias"
            " (largest error in standard errors)",
            measured=max(np.abs(error).max() for error in errors.values()),
            bound=4,
            relation="<=",
        ),
        sampled(
            statement="Sampled variances are right outside the flagged region"
            " (largest relative error)",
            measured=max(np.abs(share - 1).max() for share in trusted),
            bound=4 * config.unreliable,
            relation="<=",
        ),
        sampled(
            statement=f"At KL {far} samples show only a fraction of the variance of k3 (largest)",
            measured=shares["k3"][:, -1].max(),
            bound=0.1,
            relation="<=",
            note=f"{config.samples:,} samples each; the tail that carries it is never drawn.",
        ),
    ]


def draw_variance(config: Config, run: Run, values: Values) -> Figure:
    """Fig. 4: variance against the true KL."""
    mu = np.geomspace(values.mu[0], values.mu[-1], 200)
    lines = {e: moments.variance for e, moments in quadrature(mu).items()}
    divergence, end = mu**2 / 2, mu[-1] ** 2 / 2
    figure, axes = new_figure(width=7.2, height=4.8)
    for estimator, color, dashes, name in (
        ("k3", plotting.VERMILION, "-", "$k_3$"),
        ("k2", plotting.GREEN, (0, (4, 2)), "$k_2$, biased"),  # dashed: k3 shows through
        ("k1", plotting.BLUE, "-", "$k_1$"),
    ):
        axes.plot(divergence, lines[estimator], color=color, linestyle=dashes)
        for sampled in values.variances[estimator]:
            axes.plot(values.mu**2 / 2, sampled, "o", color=color, alpha=0.6, markeredgewidth=0)
        plotting.label(axes, end, lines[estimator][-1], name, color=color)
    at = np.interp(values.crossover, divergence, lines["k1"])
    axes.plot(values.crossover, at, "o", color=plotting.INK, markersize=6)
    text = f"KL = {values.crossover:.3f}: $k_3$ overtakes $k_1$"
    plotting.label(axes, values.crossover, at, text, offset=(-8, 8))
    axes.set(xscale="log", yscale="log", xlabel="true KL(q||p), nats", ylabel="variance")
    axes.set_xlim(right=3.5 * end)
    axes.set_title("Near the reference $k_3$ is quiet; away from it its variance explodes")
    samples = f"{config.samples:,} samples"
    plotting.corner(axes, f"lines: exact\ndots: {config.seeds} times {samples}", "upper left")
    if values.flagged.any():
        start = values.mu[np.argmax(values.flagged)] ** 2 / 2
        axes.axvspan(start, end, color=plotting.SHADE, zorder=0)
        floor = axes.get_ylim()[0]
        note = "flagged:\nsamples miss\nthe tail of $k_3$"
        plotting.label(axes, start, floor, note, color=plotting.GREY, offset=(5, 6))
    return run.save_figure(
        figure,
        "variance",
        caption="Variance of one sample against the true KL(q||p) in nats for unit Gaussians:"
        f" exact (lines) and of {config.seeds} times {samples} (dots). In the shaded region the"
        " standard error of the sampled variance of k3 is more than"
        f" {config.unreliable:.0%} of it: dots there say nothing.",
    )


# --- As gradients: a categorical policy q with logits theta, and its reference p ---


def gradients(theta: jax.Array, reference: jax.Array) -> dict[str, jax.Array]:
    """Exact expected gradients with respect to the policy's logits, each [vocab].

    Args:
      theta: logits of the policy, [vocab].
      reference: logits of the reference, [vocab].

    Returns:
      The gradients of KL(q||p) and KL(p||q), and what gradient descent follows if an estimator is
      differentiated as a loss on samples of q, or subtracted from the reward of a policy gradient.
    """
    log_p = jax.nn.log_softmax(reference)
    log_q = jax.nn.log_softmax
    q = jnp.exp(log_q(theta))  # where the samples come from: not differentiated

    def as_loss(estimator: kl.Estimator) -> jax.Array:
        return jax.grad(lambda t: q @ kl.estimate(log_p, log_q(t), estimator))(theta)

    def in_reward(estimator: kl.Estimator) -> jax.Array:
        penalty = kl.estimate(log_p, log_q(theta), estimator)
        return jax.grad(lambda t: (q * penalty) @ log_q(t))(theta)

    return {
        "KL(q||p)": jax.grad(lambda t: jnp.exp(log_q(t)) @ (log_q(t) - log_p))(theta),
        "KL(p||q)": jax.grad(lambda t: jnp.exp(log_p) @ (log_p - log_q(t)))(theta),
        **{f"{estimator} as loss": as_loss(estimator) for estimator in kl.ESTIMATORS},
        **{f"{estimator} in reward": in_reward(estimator) for estimator in kl.ESTIMATORS},
    }


def random_policies(seed: int, number: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of logits, [pair, vocab]: from nearly equal to far apart (KL of about 1e-4 to 10)."""
    rng = np.random.default_rng(seed)
    theta = rng.normal(size=(number, vocab))
    distance = np.exp(rng.uniform(np.log(0.03), np.log(3), (number, 1)))
    return theta, theta + distance * rng.normal(size=(number, vocab))


def measure_gradients(config: Config) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The worked example, each [3], and random pairs, each [pair, vocab]."""
    with jax.enable_x64(True):
        example = jax.jit(gradients)(*map(jnp.asarray, EXAMPLE))
        policies = random_policies(0, config.policies, config.vocab)
        pairs = jax.jit(jax.vmap(gradients))(*policies)
    return jax.tree.map(np.asarray, example), jax.tree.map(np.asarray, pairs)


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Between the rows of two matrices."""
    return (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


def wrong_way(pairs: dict[str, np.ndarray], name: str = "k3 in reward") -> float:
    """The share of the pairs that gradient descent drives away from their reference."""
    return (cosine(pairs[name], pairs["KL(q||p)"]) < 0).mean()


def gradient_claims(config: Config, pairs: dict[str, np.ndarray]) -> list[Claim]:
    """What each estimator does to the policy."""
    reverse, forward = pairs["KL(q||p)"], pairs["KL(p||q)"]
    right = ("k1 in reward", "k2 as loss")
    note = f"{config.policies} random pairs of policies over {config.vocab} tokens."
    claim = functools.partial(Claim, seeds=1, note=note)

    def largest_difference(gradient: np.ndarray, target: np.ndarray) -> float:
        return (np.abs(gradient - target).max(-1) / np.abs(target).max(-1)).max()

    return [
        claim(
            statement="k1 differentiated as a loss has no gradient (largest entry)",
            measured=np.abs(pairs["k1 as loss"]).max(),
            bound=1e-12,
            relation="<=",
        ),
        claim(
            statement="k1 in the reward and k2 as a loss have the gradient of KL(q||p)"
            " (largest relative difference)",
            measured=max(largest_difference(pairs[name], reverse) for name in right),
            bound=1e-9,
            relation="<=",
        ),
        claim(
            statement="k3 as a loss has the gradient of the other divergence, KL(p||q)"
            " (largest relative difference)",
            measured=largest_difference(pairs["k3 as loss"], forward),
            bound=1e-9,
            relation="<=",
        ),
        claim(
            statement="k3 in the reward often drives the policy away from the reference"
            " (share of the pairs)",
            measured=wrong_way(pairs),
            bound=0.25,
            relation=">=",
        ),
    ]


def draw_gradients(run: Run, pairs: dict[str, np.ndarray]) -> Figure:
    """How each use of an estimator is aligned with the true gradient."""
    rows = USES[:-1]
    notes = ["exact", "exact", "that of KL(p||q)"]
    notes += [f"wrong way for {wrong_way(pairs, name):.0%}" for name in rows[3:]]
    colors = [plotting.BLUE] * 2 + [plotting.ORANGE] + [plotting.VERMILION] * 2
    figure, axes = new_figure(width=7.2, height=4.0)
    jitter = np.random.default_rng(0).uniform(-0.3, 0.3, len(pairs[rows[0]]))
    axes.axvspan(-1.05, 0, color=plotting.SHADE, zorder=0)
    for row, (name, note, color) in enumerate(zip(rows, notes, colors, strict=True)):
        x = cosine(pairs[name], pairs["KL(q||p)"])
        axes.plot(x, row + jitter, "o", color=color, alpha=0.3, markersize=2.2, mew=0)
        plotting.label(axes, 1.02, row, note, color=color)
    axes.text(0, len(rows), "no gradient at all", ha="center", va="center", color=colors[-1])
    for x, text in ((-0.5, "drives the policy away"), (0.5, "drives it to the reference")):
        axes.text(x, -0.62, text, ha="center", va="center", color=plotting.GREY)
    labels = [f"$k_{name[1]}${name[2:]}" for name in USES]
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlim=(-1.05, 1.5), ylim=(5.5, -0.9), xticks=(-1, -0.5, 0, 0.5, 1))
    axes.set_xlabel("cosine between the expected gradient and the gradient of KL(q||p)", x=0.41)
    axes.grid(axis="y", visible=False)
    axes.set_title("Two of six ways to use an estimator follow the gradient of KL(q||p)")
    return run.save_figure(
        figure,
        "gradients",
        caption="Each dot is a random pair of policy and reference; across, the cosine between"
        " the expected gradient of an estimator, as a loss or in the reward, and the true one.",
    )


# --- Both ---


def run(config: Config, run: Run) -> Result:
    """Measures, judges and draws."""
    values = measure_values(config, run)
    example, pairs = measure_gradients(config)
    table = published_table(values)
    with plotting.style():
        figures = [draw_variance(config, run, values), draw_gradients(run, pairs)]
    return Result(
        summary=summary(values, pairs),
        claims=[*value_claims(config, values, table), *gradient_claims(config, pairs)],
        figures=figures,
        tables={
            "Bias and standard deviation of one sample, over the KL": table,
            "Expected gradients at logits (0.5, -0.2, 0.1), reference (0, 0.3, -0.4)": [
                {"gradient": name}
                | {f"logit {i}": round(g, 8) + 0.0 for i, g in enumerate(example[name])}
                for name in ("KL(q||p)", "KL(p||q)", *USES)
            ],
        },
        metrics={"crossover_kl": values.crossover, "k3_in_reward_wrong_way": wrong_way(pairs)},
    )


def summary(values: Values, pairs: dict[str, np.ndarray]) -> str:
    """The findings in words, and what they cannot say."""
    std = {e: math.sqrt(m.variance[-1]) / (values.mu[-1] ** 2 / 2) for e, m in values.exact.items()}
    return f"""\
**As values.** k3 is the better estimator near the reference and useless far from it: its variance
passes that of k1 at a KL of {values.crossover:.3f} and is carried by samples so rare that a
sampled variance does not show it. At mu = {values.mu[-1]:g} the standard deviation of one sample
is {std["k1"]:.3g} (k1), {std["k2"]:.3g} (k2, biased) and {std["k3"]:.3g} (k3) times the KL.

**As gradients.** Two of the six ways to use an estimator follow KL(q||p): k1 in the reward and k2
as a loss. k1 as a loss has no gradient, k3 as a loss has that of KL(p||q), and k3 in the reward
has the difference of the two, which points the wrong way for {wrong_way(pairs):.0%} of the pairs.

**Limits.** Gaussians of one width and categorical policies over a few tokens are no language
models: expect the signs to carry over, not the numbers. The report says that it uses k1, not
whether it puts it in the reward or in the loss.
"""
