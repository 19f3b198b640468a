"""What the measurements of `experiments.ieee_division` say: claims and figures."""

import functools
from typing import Any

import numpy as np

from experiments import plotting
from experiments.division_gap import NATIVE, Models
from experiments.division_rules import IEEE, Codes
from experiments.nvfp4_model import Gap, gap_row
from experiments.study import Claim, Figure, Run, new_figure

# How many of 8,388,608 codes an earlier, independent script found changed.
COUNTED = {
    "x * rcp": 1615,
    "x * rcp, -1 ulp": 9136,
    "x * rcp, +1 ulp": 4877,
    "x * rcp, -2 ulp": 11055,
    "x * rcp, +2 ulp": 5076,
    "jax.nn: (x / g) / s": 2266,
    "torchao: x * ((1 / g) / s)": 2487,
    "TE: x * (1 / (s * (1 / e)))": 4903,
    "TE, early: x * (e / s)": 4523,
    "TE, fast: bf16 coefficient": 29466,
}


def judge(
    config: Any,
    random: dict[str, Codes],
    ties: dict[str, Codes],
    mxfp8_scales: dict[str, dict[str, int]],
    models: Models,
) -> list[Claim]:
    """The claims; bounds come from theory or from `COUNTED`, not from these measurements."""
    elements = config.tokens * config.features
    counted = functools.partial(Claim, seeds=1, note=f"{elements:,} codes.")
    ratios = [
        max(random[name].changed / share, share / max(random[name].changed, 1e-12))
        for name, share in (
            (name, COUNTED[name] / 2**23) for name in config.paths if name in COUNTED
        )
    ]
    one_way = [random[name].upwards for name in config.paths if name.endswith("+2 ulp")]
    one_way += [1 - random[name].upwards for name in config.paths if name.endswith("-2 ulp")]
    exhaustive = functools.partial(Claim, seeds=1, note="All 32,639 positive bf16 maxima.")
    rms = {name: models.gaps[name].rms.mean(0) for name in models.gaps}
    trainers = [rms[name] for name in config.model_paths]
    last = [curve[-1] for curve in trainers]
    model = functools.partial(Claim, seeds=config.seeds)
    return [
        counted(
            statement="Every other division changes at least one NVFP4 code of 10,000 on normal"
            " numbers (smallest share)",
            measured=min(random[name].changed for name in config.paths),
            relation=">=",
            bound=1e-4,
        ),
        counted(
            statement="The shares are those of an earlier, independent count (largest factor)",
            measured=max(ratios, default=np.nan),
            relation="<=",
            bound=1.5,
        ),
        counted(
            statement="A reciprocal 2 units off moves codes one way only (smallest share that way)",
            measured=min(one_way, default=np.nan),
            relation=">=",
            bound=1,
        ),
        counted(
            statement="Rounding error shows nothing of it (largest relative change of the RMSE)",
            measured=max(abs(random[n].rmse / random[IEEE].rmse - 1) for n in config.paths),
            relation="<=",
            bound=5e-4,
        ),
        counted(
            statement="Near ties changes are ten times as frequent or more (smallest factor)",
            measured=min(
                ties[name].changed / max(random[name].changed, 1 / elements)
                for name in config.paths
            ),
            relation=">=",
            bound=10,
        ),
        exhaustive(
            statement="MXFP8 needs no division: amax * fl(1 / 448) gives the same scales, also if"
            " the constant is 1 or 2 units too small (wrong scales)",
            measured=max(
                mxfp8_scales[f"amax * fl(1 / 448), {ulps:+d} ulp"]["bf16 amax"]
                for ulps in (-2, -1, 0)
            ),
            relation="<=",
            bound=0,
        ),
        exhaustive(
            statement="... but not if it is too large: every maximum 1.75 * 2^k, whose scale is not"
            " clamped, gets a wrong one (least number of wrong scales)",
            measured=min(
                mxfp8_scales[f"amax * fl(1 / 448), {ulps:+d} ulp"]["bf16 amax"] for ulps in (1, 2)
            ),
            relation=">=",
            bound=247,
        ),
        Claim(
            statement="ceil(ln / ln 2) in bf16 gets at least 1 % of the MXFP8 scales wrong",
            measured=mxfp8_scales["ceil(ln / ln 2) in bf16"]["N(0,1) blocks"] / config.blocks,
            relation=">=",
            bound=0.01,
            seeds=1,
            note=f"{config.blocks:,} blocks of normal numbers.",
        ),
        model(
            statement="By the same rule in other arithmetic, engine and trainer agree bit for bit"
            " (largest gap)",
            measured=models.gaps[IEEE].largest.max(),
            relation="<=",
            bound=0,
        ),
        model(
            statement="Any other division moves the log-prob of nearly every token (smallest share"
            f" with {config.depths[-1]} mixture layers)",
            measured=min(models.gaps[name].changed[:, -1].mean() for name in config.model_paths),
            relation=">=",
            bound=0.9,
        ),
        model(
            statement="The gap grows with depth (smallest factor from"
            f" {config.depths[0]} to {config.depths[-1]} mixture layers)",
            measured=min(curve[-1] / curve[0] for curve in trainers),
            relation=">=",
            bound=2,
        ),
        model(
            statement="Few changed codes are as bad as many: the worst path's gap is at most twice"
            " the mildest one's",
            measured=max(last) / min(last),
            relation="<=",
            bound=2,
            note="The worst path changes 18 times as many codes. Independent errors would give a"
            " factor of 4.",
        ),
        model(
            statement="The gap is below half of what rounding to NVFP4 itself does to log-probs"
            " (largest share)",
            measured=max(last) / rms[NATIVE][-1],
            relation="<=",
            bound=0.5,
        ),
        model(
            statement="Over contexts, the gradient's error averages out like independent noise"
            " (largest coherence)",
            measured=max(models.coherence[name].mean() for name in config.model_paths),
            relation="<=",
            bound=2,
            note=f"1: independent; {config.batch * config.context}: the same in every context.",
        ),
    ]


def model_row(name: str, models: Models) -> dict[str, Any]:
    """One row of the table of gaps, at full depth."""
    row = {"trainer": name}
    row |= gap_row(Gap(*(values[:, -1] for values in models.gaps[name])))
    row |= {"coherence": models.coherence[name].mean(), "drift / noise": models.drift[name].mean()}
    if name in models.own_routes:
        row["rms gap without replay"] = models.own_routes[name].rms.mean()
        row["routes changed"] = models.rerouted[name].mean()
    return row


def draw_codes(config: Any, run: Run, random: dict[str, Codes], ties: dict[str, Codes]) -> Figure:
    """How many codes each path changes."""
    figure, axes = new_figure(width=8.0, height=4.6)
    names = sorted(config.paths, key=lambda name: random[name].changed)
    for row, name in enumerate(names):
        few, many = random[name].changed, ties[name].changed
        axes.plot((few, many), (row, row), color=plotting.GREY, linewidth=0.8)
        axes.plot(few, row, "o", color=plotting.BLUE, markersize=7)
        axes.plot(many, row, "o", color=plotting.VERMILION, markersize=7)
    top = names[-1]
    for x, text, color in (
        (random[top].changed, "normal numbers", plotting.BLUE),
        (ties[top].changed, "numbers next to ties", plotting.VERMILION),
    ):
        plotting.label(axes, x, len(names) - 1, text, color=color, offset=(0, 9))
    axes.set_yticks(range(len(names)), names)
    axes.set(xscale="log", xlim=(5e-5, 1), ylim=(-0.6, len(names) - 0.1))
    axes.set_xlabel("share of the NVFP4 codes that are not those of IEEE division")
    axes.grid(axis="y", visible=False)
    axes.set_title("Every other way to divide changes codes, most of all next to ties")
    return run.save_figure(
        figure,
        "codes",
        caption="Codes that a way to divide changes, of bf16 numbers that are normal or the"
        " closest to a tie between two codes. The relative error of the rounded normal numbers is"
        f" {min(c.rmse for c in random.values()):.4f} to"
        f" {max(c.rmse for c in random.values()):.4f} in all of them.",
    )


def draw_gaps(config: Any, run: Run, models: Models) -> Figure:
    """The gap of every path against depth."""
    figure, axes = new_figure(width=8.0, height=4.6)
    by_gap = sorted(config.model_paths, key=lambda name: -models.gaps[name].rms[:, 0].mean())
    for name in by_gap:
        axes.plot(config.depths, models.gaps[name].rms.mean(0), "o-", label=name)
    noise = models.gaps[NATIVE].rms.mean(0)
    text = "for comparison: experts in bf16"
    axes.plot(config.depths, noise, "o--", color=plotting.GREY, label=text)
    axes.legend(loc="lower right", title="the trainer's division")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(config.depths, config.depths)
    axes.set_xticks([], minor=True)
    axes.set(xlabel="mixture layers", ylabel="rms gap of a sampled token's log-prob, nats")
    axes.set_title("After a few layers, few changed codes are as bad as many")
    return run.save_figure(
        figure,
        "gaps",
        caption="Gap between the log-probs that an engine with IEEE division and a trainer with"
        " another one give to sampled tokens, root of the mean square over tokens and seeds, both"
        " axes logarithmic. Same weights, same routes; the model's first layers only."
        " Grey: what rounding the experts to NVFP4 changes at all.",
    )
