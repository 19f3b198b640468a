"""Which gradient does a KL estimator give, as a loss and in the reward?

The report uses k1 because it is the better estimate of the value of KL(q||p) (section 3, Fig. 4;
`kl_estimators`), and does not say where it puts it. That decides whether the policy is drawn to the
reference at all: an estimator can be differentiated as a loss on samples of the policy q, or be
subtracted, as a constant, from the reward of a policy gradient. Here q and the reference p are
categorical, so that every expectation is a sum; nothing is sampled.

    python -m launch.main --config=experiments/kl_placement.py --workdir=runs/kl_placement

Expect two of the six uses to have the gradient of KL(q||p), k1 in the reward and k2 as a loss; no
gradient for k1 as a loss; that of KL(p||q) for k3 as a loss; and for k3 in the reward one that
drives 39% of the policies away from their reference. About 3 seconds on 2 cores;
`kl_placement.py:quick` tries fewer policies.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from c2.config import ConfigError
from c2.losses import kl
from c2.losses.config import PolicyGradientConfig
from c2.losses.policy_gradient import policy_gradient
from experiments import plotting
from experiments.study import Claim, Figure, Result, Run, new_figure

VARIANTS = ("full", "quick")

# How an estimator can be used: from right over misleading to useless.
USES = ("k1 in reward", "k2 as loss", "k3 as loss", "k2 in reward", "k3 in reward", "k1 as loss")
EXAMPLE = ((0.5, -0.2, 0.1), (0.0, 0.3, -0.4))  # logits of a policy and of its reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the study.

    Attributes:
      policies: random pairs of a policy and a reference.
      vocab: size of their alphabet.
    """

    policies: int = 2000
    vocab: int = 8

    def __post_init__(self) -> None:
        """Checks ranges."""
        for key, bound in {"policies": 1, "vocab": 2}.items():
            if getattr(self, key) < bound:
                raise ConfigError(f"{key}: {getattr(self, key)}; legal: at least {bound}")


def get_config(variant: str = VARIANTS[0]) -> Config:
    """The study's sizes."""
    match variant:
        case "full":
            return Config()
        case "quick":
            return Config(policies=200)
    raise ConfigError(f"variant: {variant!r}; legal: {', '.join(VARIANTS)}")


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
        batch = {
            "weights": q,
            "advantages": -kl.estimate(log_p, log_q(theta), estimator),
            "sampled": log_q(theta),
            "segment_ids": jnp.ones(q.shape, jnp.int32),
        }
        batch = {name: x[None] for name, x in batch.items()}  # one row
        config = PolicyGradientConfig()
        return jax.grad(lambda t: policy_gradient(log_q(t)[None], batch, config)[0])(theta)

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


def measure(config: Config) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
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


def judge(config: Config, pairs: dict[str, np.ndarray]) -> list[Claim]:
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


def run(config: Config, run: Run) -> Result:
    """Measures, judges and draws."""
    example, pairs = measure(config)
    with plotting.style():
        figure = draw_gradients(run, pairs)
    return Result(
        summary=summary(pairs),
        claims=judge(config, pairs),
        figures=[figure],
        tables={
            "Expected gradients at logits (0.5, -0.2, 0.1), reference (0, 0.3, -0.4)": [
                {"gradient": name}
                | {f"logit {i}": round(g, 8) + 0.0 for i, g in enumerate(example[name])}
                for name in ("KL(q||p)", "KL(p||q)", *USES)
            ],
        },
        metrics={"k3_in_reward_wrong_way": wrong_way(pairs)},
    )


def summary(pairs: dict[str, np.ndarray]) -> str:
    """The findings in words, and what they cannot say."""
    return f"""\
Two of the six ways to use an estimator follow KL(q||p): k1 in the reward and k2 as a loss. k1 as a
loss has no gradient, k3 as a loss has that of KL(p||q), and k3 in the reward has the difference of
the two, which points the wrong way for {wrong_way(pairs):.0%} of the pairs.

**Limits.** Exact expectations over a few tokens are no language models: expect the signs to carry
over, not the shares. The report says that it uses k1, not whether it puts it in the reward or in
the loss; only one of the two can have worked.
"""
