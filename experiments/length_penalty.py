"""Which length penalty makes easy tasks short without giving hard tasks up?

The report subtracts C_{k,q}(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)) from the reward, x being
the effort of a rollout (section 3, Fig. 6), and publishes neither k nor q. Here a task of
difficulty D is solved with probability 1 - exp(-x / D), and the policy chooses the effort that
maximises success - price * C(x). The price is set such that the easiest task gets the same effort
with every penalty; what happens to the harder ones is then the shape's doing. No training: every
optimum is computed, and checked against all efforts on a fine grid.

    python -m launch.main --config=experiments/length_penalty.py --workdir=runs/length_penalty

Expect, for D = 1, 5, 20 and k = 1, efforts of 3, 6.96, 0.09 (q = 0); 3, 9.33, 0 (q = 0.5);
3, 13.3, 51.6 (q = 1) and 3, 26.1, 144 (q = 2): with q >= 1 the hard task keeps its effort. One
claim is expected to come out as "not shown": with a small k even q = 1 gives the hard task up.
About 10 seconds on 2 cores; `length_penalty.py:quick` uses coarser grids.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.colors import LinearSegmentedColormap, ListedColormap

from c2.config import ConfigError
from c2.losses.length_penalty import length_penalty
from experiments import plotting
from experiments.study import Claim, Figure, Result, Run, new_figure

VARIANTS = ("full", "quick")

Q_MAX = 3.0  # of the maps
COLORS = (plotting.GREY, plotting.GREEN, plotting.BLUE, plotting.VERMILION)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The tasks and the penalties.

    Attributes:
      difficulties: D of each task, from easy to hard.
      easy_effort: what the price makes the first of them spend.
      k: of the penalties that are compared.
      q: the shapes that are compared, from straight (0) to strongly bent.
      other_k: where else the comparison is tried.
      resolution: points per axis of the maps and sweeps over k and q.
      check: efforts per task on which each optimum is checked.
    """

    difficulties: tuple[float, ...] = (1.0, 5.0, 20.0)
    easy_effort: float = 3.0
    k: float = 1.0
    q: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)
    other_k: tuple[float, ...] = (0.1, 0.3, 3.0, 10.0)
    resolution: int = 151
    check: int = 20_001

    def __post_init__(self) -> None:
        """Checks ranges."""
        d = self.difficulties
        if len(d) < 2 or d[0] <= 0 or list(d) != sorted(set(d)):
            raise ConfigError(f"difficulties: {d}; legal: two or more, above 0 and rising")
        if not self.easy_effort > 0:
            raise ConfigError(f"easy_effort: {self.easy_effort}; legal: above 0")
        for key, values in {"k": (self.k,), "other_k": self.other_k}.items():
            if not all(value > 0 for value in values):
                raise ConfigError(f"{key}: {getattr(self, key)}; legal: above 0")
        q = self.q
        if not q or min(q) < 0 or max(q) > Q_MAX or not min(q) < 1 <= max(q):
            raise ConfigError(f"q: {q}; legal: from 0 to {Q_MAX}, some below 1 and some not")
        for key in ("resolution", "check"):
            if getattr(self, key) < 2:
                raise ConfigError(f"{key}: {getattr(self, key)}; legal: at least 2")


def get_config(variant: str = VARIANTS[0]) -> Config:
    """The study's tasks."""
    match variant:
        case "full":
            return Config()
        case "quick":
            return Config(resolution=41, check=2001)
    raise ConfigError(f"variant: {variant!r}; legal: {', '.join(VARIANTS)}")


# --- The model, elementwise: success - price * C(effort) ---

Value = jax.Array | np.ndarray | float


def success(effort: Value, difficulty: Value) -> jax.Array:
    """The probability that a task is solved."""
    return -jnp.expm1(-effort / difficulty)


def utility(effort: Value, difficulty: Value, price: Value, k: Value, q: Value) -> jax.Array:
    """What the policy maximises by its effort."""
    return success(effort, difficulty) - price * length_penalty(effort, k, q)


marginal_cost = jax.jit(jnp.vectorize(jax.grad(length_penalty)))
marginal_utility = jax.jit(jnp.vectorize(jax.grad(utility)))


def best_effort(difficulty: Value, price: Value, k: Value, q: Value) -> jax.Array:
    """The effort with the largest utility, which is not concave.

    The log of marginal success over marginal cost, -x / D + q log(1 + k x) + const, is concave
    with its peak at q D - 1 / k. So the utility has one inner maximum at most, to the right of
    that peak. The only other candidate is no effort at all.
    """
    peak = jnp.maximum(q * difficulty - 1 / k, 0)

    def halve(_, bracket):
        low, high = bracket
        middle = (low + high) / 2
        pays = marginal_utility(middle, difficulty, price, k, q) > 0
        return jnp.where(pays, middle, low), jnp.where(pays, high, middle)

    inner, _ = jax.lax.fori_loop(0, 60, halve, (peak, peak + 100 * difficulty))
    return jnp.where(utility(inner, difficulty, price, k, q) > 0, inner, 0)


class Allocation(NamedTuple):
    """Where the policy puts its effort under the penalties k, q."""

    k: np.ndarray  # [penalty]
    q: np.ndarray
    price: np.ndarray
    effort: np.ndarray  # [penalty, task]
    success: np.ndarray


def allocate(config: Config, k: np.ndarray, q: np.ndarray) -> Allocation:
    """The optimum for each k and q, [penalty], in float64."""
    with jax.enable_x64(True):
        return Allocation(*jax.tree.map(np.asarray, _allocate(config, k, q)))


@functools.partial(jax.jit, static_argnames="config")
def _allocate(config: Config, k: jax.Array, q: jax.Array) -> Allocation:
    easy = config.difficulties[0]
    # The easiest task stops at `easy_effort`: one more unit gains what it costs there.
    gain = jnp.exp(-config.easy_effort / easy) / easy
    price = gain / marginal_cost(config.easy_effort, k, q)
    difficulty = jnp.array(config.difficulties)
    effort = best_effort(difficulty, price[:, None], k[:, None], q[:, None])
    return Allocation(k, q, price, effort, success(effort, difficulty))


def largest_gain(config: Config, found: Allocation) -> float:
    """How much utility any effort on a grid has more than the optimum that was found."""
    gain = jax.jit(lambda grid, effort, *at: utility(grid, *at).max() - utility(effort, *at))
    with jax.enable_x64(True):
        return max(
            float(gain(np.linspace(0, 100 * d, config.check), effort, d, price, k, q))
            for k, q, price, efforts, _ in zip(*found, strict=True)
            for effort, d in zip(efforts, config.difficulties, strict=True)
        )


# --- The study ---


def marginal_error(config: Config) -> float:
    """Of the float32 gradient of the penalty, relative to (1 + k x)^(-q), up to x = 1e6."""
    x = np.geomspace(1e-3, 1e6, config.resolution)
    x, k, q = np.meshgrid(x, (config.k, *config.other_k), config.q)
    gradient = marginal_cost(*(axis.astype(np.float32) for axis in (x, k, q)))
    return np.abs(gradient * (1 + k * x) ** q - 1).max()


def first_step(config: Config, found: Allocation) -> np.ndarray:
    """What one more unit than the easy task's adds to the utility of the hardest, [penalty]."""
    with jax.enable_x64(True):
        hard = config.difficulties[-1]
        return np.asarray(marginal_utility(config.easy_effort, hard, found.price, found.k, found.q))


def first_to_keep(sweep: Allocation) -> float:
    """The smallest q that keeps the hardest task (success above one half), NaN if none does."""
    keeps = sweep.success[:, -1] > 0.5
    return sweep.q[np.argmax(keeps)] if keeps.any() else np.nan


def judge(config: Config, main: Allocation, others: Allocation, switch: float) -> list[Claim]:
    """The claims; `main` has the k of the comparison, `others` the other ones."""
    exact = functools.partial(Claim, seeds=1)  # nothing here is sampled
    hard = f"D = {config.difficulties[-1]:g}"
    kept, kept_by_others = main.success[main.q >= 1, -1], others.success[others.q >= 1, -1]
    return [
        exact(
            statement="The float32 gradient of the penalty is (1 + k x)^(-q)"
            " (largest relative difference)",
            measured=marginal_error(config),
            relation="<=",
            bound=1e-5,
        ),
        exact(
            statement="No effort on a fine grid beats an optimum (largest gain)",
            measured=max(largest_gain(config, main), largest_gain(config, others)),
            relation="<=",
            bound=1e-9,
        ),
        exact(
            statement=f"The easy task gets the effort {config.easy_effort:g} with every q"
            f" at k = {config.k:g} (largest difference)",
            measured=np.abs(main.effort[:, 0] - config.easy_effort).max(),
            relation="<=",
            bound=1e-6,
        ),
        exact(
            statement=f"With q >= 1 the hard task ({hard}) is kept (smallest success)",
            measured=kept.min(),
            relation=">=",
            bound=0.9,
        ),
        exact(
            statement=f"With q < 1 the hard task ({hard}) is given up (largest success)",
            measured=main.success[main.q < 1, -1].max(),
            relation="<=",
            bound=0.05,
            note=f"Of all q, not only those compared, the first to keep it is {switch:.2f}.",
        ),
        exact(
            statement="With q >= 1 it is kept whatever k is (smallest success)",
            measured=kept_by_others.min(),
            relation=">=",
            bound=0.9,
            note=f"k of {', '.join(f'{k:g}' for k in config.other_k)}. A small k is a straight line"
            " over the efforts that matter; a large one with a large q costs all it will ever"
            " cost at once, so that no price leaves the easy task its effort.",
        ),
        exact(
            statement="With q >= 1 a policy finds the hard task's optimum in small steps from the"
            " easy task's effort (smallest marginal utility there)",
            measured=first_step(config, main)[main.q >= 1].min(),
            relation=">",
            bound=0,
            note="The optimum lies behind a valley: the first extra units cost more than they"
            " gain, with every penalty alike.",
        ),
    ]


def table(config: Config, found: Allocation) -> list[dict[str, Any]]:
    """Efforts and success for every penalty."""
    rows = []
    for k, q, price, effort, solved in zip(*found, strict=True):
        row = {"k": k, "q": q, "price": price}
        row |= {f"effort, D = {d:g}": e for d, e in zip(config.difficulties, effort, strict=True)}
        row |= {f"success, D = {d:g}": s for d, s in zip(config.difficulties, solved, strict=True)}
        rows.append(row)
    return rows


def draw_curves(config: Config, run: Run) -> Figure:
    """Fig. 6: the penalty and its marginal cost."""
    x = np.linspace(0, 12, 241, dtype=np.float32)
    figure, (total, marginal) = new_figure(cols=2, width=4.6, height=3.9)
    for i, q in enumerate(config.q):
        for k, dashes in ((config.k, "-"), (config.other_k[0], ":")):
            if dashes == ":" and q != 1:
                continue  # one example of another k
            name = f"q = {q:g}" if k == config.k else f"q = {q:g}, k = {k:g}"
            for axes, curve in ((total, length_penalty), (marginal, marginal_cost)):
                y = curve(x, k, q)
                axes.plot(x, y, color=COLORS[i % 4], linestyle=dashes)
                plotting.label(axes, x[-1], y[-1], name, color=COLORS[i % 4])
    total.set(xlabel="effort x", ylabel="penalty", xlim=(0, 12), ylim=(0, 12.2))
    total.set_title(f"The penalty C(x), k = {config.k:g}")
    marginal.set(xlabel="effort x", ylabel="cost of one more unit", xlim=(0, 12), yscale="log")
    marginal.set_title("Its slope $(1 + kx)^{-q}$: later units cost less")
    return run.save_figure(
        figure,
        "penalties",
        caption="The length penalty (left) and its marginal cost, the float32 gradient of the"
        f" code (right, log scale), for k = {config.k:g} and a smaller k (dotted).",
    )


def draw_allocation(config: Config, run: Run, main: Allocation, sweep: Allocation) -> Figure:
    """Effort and success of each task against q."""
    figure, (left, right) = new_figure(cols=2, width=4.6, height=3.9)
    middle = len(sweep.q) // 2
    for i, d in reversed(list(enumerate(config.difficulties))):
        color = COLORS[1:][i % 3]
        for axes, y, dots in (
            (left, sweep.effort, main.effort),
            (right, sweep.success, main.success),
        ):
            axes.plot(sweep.q, y[:, i], color=color)
            axes.plot(main.q, dots[:, i], "o", color=color, markersize=6)
        offset = (0, -6) if i == 0 else (-8, 6)
        at = sweep.q[middle], sweep.effort[middle, i]
        plotting.label(left, *at, f"D = {d:g}", color=color, offset=offset)
    left.set(title="The effort that pays most", xlabel="q", ylabel="effort")
    left.margins(y=0.09)
    right.set(title="What it achieves", xlabel="q", ylabel="probability of success")
    switch = first_to_keep(sweep)
    if switch > 0:
        text = f"given up\nbelow\nq = {switch:.2f}"
        plotting.label(
            right,
            switch,
            0.35,
            text,
            color=COLORS[1:][(len(config.difficulties) - 1) % 3],
            offset=(-6, 0),
        )
    return run.save_figure(
        figure,
        "allocation",
        caption=f"Effort and success against q at k = {config.k:g}, with the price set such that"
        f" the easiest task (D = {config.difficulties[0]:g}) gets an effort of"
        f" {config.easy_effort:g}. Dots: the penalties in the table. At the right end that price"
        " is more than any task is worth.",
    )


def draw_map(config: Config, run: Run, main: Allocation, plane: Allocation) -> Figure:
    """Which tasks are worth their effort, over k and q."""
    most = len(config.difficulties)
    solved = (plane.success > 0.5).sum(-1)
    shape = (config.resolution, config.resolution)
    some = LinearSegmentedColormap.from_list("some", ("#4A4A4A", "#E9E4D8"), most)
    colors = ListedColormap([*some(range(most)), plotting.GREEN])
    figure, axes = new_figure(width=7.2, height=4.8)
    k, q, count = (field.reshape(shape) for field in (plane.k, plane.q, solved))
    axes.pcolormesh(k, q, count, vmin=0, vmax=most, cmap=colors, shading="nearest")
    texts = {0: "no task is worth it", most - 1: "the hardest is given up", most: "all solved"}
    for number, text in texts.items():
        region = solved == number
        if region.mean() > 0.05:
            x, y = np.median(plane.k[region]), np.median(plane.q[region])
            color = plotting.INK if number == most - 1 else "white"
            axes.text(x, y, text, color=color, ha="center", va="center", weight="bold")
    axes.plot(main.k, main.q, "o", color="white", mec=plotting.INK, markersize=7, clip_on=False)
    axes.set(xscale="log", xlabel="k", ylabel="q")
    axes.grid(visible=False)
    axes.set_title("Only a band of penalties shortens easy tasks and keeps hard ones")
    return run.save_figure(
        figure,
        "map",
        caption="How many tasks the policy solves (success above one half) under the penalty k, q"
        f" at the price that would make the easiest one spend {config.easy_effort:g}. Dots: the"
        " penalties of the main comparison.",
    )


def run(config: Config, run: Run) -> Result:
    """Solves, judges and draws."""
    qs = np.linspace(0, Q_MAX, config.resolution)
    ks = np.geomspace(0.01, 100, config.resolution)
    main = allocate(config, np.full(len(config.q), config.k), np.array(config.q))
    others = allocate(config, *map(np.ravel, np.meshgrid(config.other_k, config.q, indexing="ij")))
    sweep = allocate(config, np.full(len(qs), config.k), qs)
    plane = allocate(config, *map(np.ravel, np.meshgrid(ks, qs)))
    switch = first_to_keep(sweep)
    with plotting.style():
        figures = [
            draw_curves(config, run),
            draw_allocation(config, run, main, sweep),
            draw_map(config, run, main, plane),
        ]
    return Result(
        summary=summary(config, main, switch),
        claims=judge(config, main, others, switch),
        figures=figures,
        tables={
            f"Where the effort goes at k = {config.k:g}": table(config, main),
            "The same for other k": table(config, others),
        },
        metrics={"first_q_that_keeps_the_hard_task": switch},
    )


def summary(config: Config, main: Allocation, switch: float) -> str:
    """The findings in words, and what they cannot say."""
    hard = f"{config.difficulties[-1]:g}"
    lines = "\n".join(
        f"- q = {q:g}: effort {effort[-1]:.3g}, success {solved[-1]:.3g}"
        for q, effort, solved in zip(main.q, main.effort, main.success, strict=True)
    )
    return f"""\
With the price set such that the easiest task gets an effort of {config.easy_effort:g}, the task of
difficulty {hard} gets, at k = {config.k:g},

{lines}

and the smallest q that keeps it is {switch:.2f}. The bend has to lie where the efforts are: with
a small k the penalty is still straight there, and with a large k and q it is so flat that the
price has to rise until no task is worth it. The map shows the band between.

**Limits.** These are optima, not what training finds: the last claim says whether small steps lead
there. The success curve is an assumption, and the report publishes neither k nor q.
"""
