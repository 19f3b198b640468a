"""What a pretraining run found: figures, tables and claims, from its `metrics.jsonl`."""

import gzip
from typing import Any, NamedTuple

import numpy as np

from c2.data.prepare import Prepared
from c2.training.metrics import read_columns
from experiments import mtp_report, plotting
from experiments.study import Claim, Figure, Result, Run, new_figure

HELD_OUT = "held_out_{window}/"  # prefix of the metrics of one evaluation window

Columns = dict[str, tuple[np.ndarray, np.ndarray]]  # see c2.training.metrics.read_columns


class Line(NamedTuple):
    """A least-squares fit ``loss = intercept + slope * ln(tokens)``."""

    slope: float
    intercept: float
    r2: float

    @classmethod
    def fit(cls, tokens: np.ndarray, loss: np.ndarray) -> "Line":
        """Fits both [points]; NaN with fewer than three points, which always lie near a line."""
        if len(tokens) < 3:
            return cls(np.nan, np.nan, np.nan)
        x = np.log(tokens)
        slope, intercept = np.polyfit(x, loss, 1)
        residual = loss - (intercept + slope * x)
        return cls(slope, intercept, 1 - np.sum(residual**2) / np.sum((loss - loss.mean()) ** 2))

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """The fitted loss."""
        return self.intercept + self.slope * np.log(tokens)


def summarise(config: Any, data: Prepared, run: Run) -> Result:
    """Draws and judges a finished run of `experiments/recipe.py`."""
    columns = read_columns(run.workdir / "metrics.jsonl")
    tokens, loss = held_out_curve(config, columns)
    line = Line.fit(tokens, loss)
    stages = held_out_by_stage(config, columns)
    compressed = gzip_bits_per_byte(data)
    with plotting.style():
        figures = [
            draw_loss(config, run, columns, line),
            draw_held_out(config, run, stages, compressed),
            draw_expert_load(run, columns),
        ]
    claims = judge(config, columns, stages, line, len(tokens), compressed)
    tables = {
        f"Held-out package `{config.data.held_out}`, bits per byte": stages,
        "Phases": phase_table(config, columns),
        "Corpus": data.corpus.table(),
    }
    metrics = {
        "log_linear/slope": line.slope,
        "log_linear/r2": line.r2,
        "held_out/bits_per_byte": stages[-1][_window(config.evaluation.windows[0])],
        "held_out/gzip_bits_per_byte": compressed,
    }
    if mtp_report.first_step(config) is not None:
        drafts = mtp_report.by_stage(config, columns)
        claims += mtp_report.judge(config, drafts, stages)
        tables["Drafts of the prediction module, held-out package"] = drafts
        metrics[mtp_report.ACCEPTANCE] = drafts[-1]["acceptance"]
        with plotting.style():
            figures.append(mtp_report.draw(config, run, columns))
    return Result(
        summary=_summary(config, stages, line, compressed),
        claims=claims,
        figures=figures,
        tables=tables,
        metrics=metrics,
    )


def gzip_bits_per_byte(data: Prepared) -> float:
    """What `gzip -9` needs for the held-out files: a bound that no one tuned."""
    text = "".join(document.text for document in data.corpus.held_out).encode()
    return 8 * len(gzip.compress(text, compresslevel=9)) / len(text)


def held_out_curve(config: Any, columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Tokens seen and held-out nats per token, for evaluations in the main phase after warm-up."""
    main = config.phases[0]
    steps, loss = columns[HELD_OUT.format(window=config.evaluation.windows[0]) + "nats_per_token"]
    kept = (steps > main.learning_rate.warmup_steps) & (steps > 0) & (steps <= main.steps)
    return _tokens_at(columns, steps[kept]), loss[kept]


def held_out_by_stage(config: Any, columns: Columns) -> list[dict[str, Any]]:
    """One row per stage, "start" and then every phase: bits per byte for every window."""
    ends = np.cumsum([0] + [phase.steps for phase in config.phases])
    rows = []
    for name, end in zip(["start", *(phase.name for phase in config.phases)], ends, strict=True):
        row: dict[str, Any] = {"after": name}
        for window in config.evaluation.windows:
            steps, bits = columns[HELD_OUT.format(window=window) + "bits_per_byte"]
            row[_window(window)] = float(bits[steps == end][0])
        rows.append(row)
    return rows


def phase_table(config: Any, columns: Columns) -> list[dict[str, Any]]:
    """One row per phase: shape, tokens, training loss at its first and last report, speed."""
    rows, start = [], 0
    for phase in config.phases:
        end = start + phase.steps
        steps, loss = columns["loss"]
        inside = (steps > start) & (steps <= end)
        speed_steps, speed = columns["tokens_per_second"]
        seen = _tokens_at(columns, np.array([start, end]))
        rows.append(
            {
                "phase": phase.name,
                "trains": _trains(phase),
                "steps": phase.steps,
                "context": phase.context,
                "tokens": int(seen[1] - seen[0]),
                "first loss": round(float(loss[inside][0]), 3),
                "last loss": round(float(loss[inside][-1]), 3),
                "tokens/s (median)": round(
                    float(np.median(speed[(speed_steps > start) & (speed_steps <= end)]))
                ),
            }
        )
        start = end
    return rows


def judge(
    config: Any,
    columns: Columns,
    stages: list[dict[str, Any]],
    line: Line,
    points: int,
    compressed: float,
) -> list[Claim]:
    """The claims of the recipe so far."""
    short, long = (_window(config.evaluation.windows[i]) for i in (0, -1))
    load = columns["expert_load"][1][-10:]  # [report, moe_layer, expert]
    claims = [
        Claim(
            statement="After training, the held-out package takes fewer bits per byte than gzip -9",
            measured=stages[-1][short],
            bound=compressed,
            relation="<",
            seeds=1,
            note=f"before training {stages[0][short]:.2f}",
        ),
        Claim(
            statement="Held-out loss falls linearly in the logarithm of tokens: R2 of the line",
            measured=line.r2,
            bound=0.95,
            relation=">=",
            seeds=1,
            note=f"{line.slope:.2f} nats per token for each factor e, {points} points",
        ),
        Claim(
            statement="Selection biases alone keep the busiest expert near the mean load: ratio",
            measured=float((load.max(-1) / load.mean(-1)).max(-1).mean()),
            bound=1.5,
            relation="<=",
            seeds=1,
            note="worst layer, mean of the last 10 reports; there is no auxiliary loss",
        ),
    ]
    main = config.phases[0].context
    longer = [number for number, phase in enumerate(config.phases) if phase.context > main]
    if short != long and longer:
        before, after = stages[longer[0]][long], stages[longer[0] + 1][long]
        claims.append(
            Claim(
                statement=f"The phase at longer context lowers bits per byte at {long}: change",
                measured=after - before,
                bound=0.0,
                relation="<",
                seeds=1,
                note=f"{before:.3f} to {after:.3f}",
            )
        )
    return claims


def draw_loss(config: Any, run: Run, columns: Columns, line: Line) -> Figure:
    """Loss against tokens on a log axis, with the fitted line."""
    figure, axes = new_figure(width=7.6, height=4.2)
    steps, loss = columns["loss"]
    loss = np.where(_main_frozen(config, steps), np.nan, loss)  # there it is the module's
    axes.plot(_tokens_at(columns, steps), loss, color=plotting.SKY, linewidth=1, alpha=0.9)
    window = config.evaluation.windows[0]
    steps, held_out = columns[HELD_OUT.format(window=window) + "nats_per_token"]
    seen = _tokens_at(columns, steps)
    later = seen > 0
    axes.plot(seen[later], held_out[later], "o", color=plotting.BLUE, markersize=5)
    fitted, _ = held_out_curve(config, columns)
    if len(fitted):
        span = np.geomspace(fitted.min(), fitted.max(), 50)
        axes.plot(span, line(span), color=plotting.VERMILION, linewidth=1.5)
    axes.set_xscale("log")
    axes.set_xlabel("training tokens")
    axes.set_ylabel("nats per token")
    axes.set_title("Held-out loss against tokens")
    top = axes.get_ylim()[1]
    ends = _tokens_at(columns, np.cumsum([phase.steps for phase in config.phases]))
    for phase, end in zip(config.phases, ends, strict=True):
        axes.axvline(end, color=plotting.GREY, linewidth=0.8, linestyle=":")
        text = plotting.label(
            axes, end, top, phase.name, color=plotting.GREY, offset=(-1, -4), rotation=90
        )
        text.set_fontsize(8)
    plotting.corner(
        axes,
        f"line: {line.slope:.2f} nats per factor e, $R^2$ = {line.r2:.3f}\n"
        f"dots: held-out `{config.data.held_out}`\nthin: training batches",
        "lower left",
    )
    return run.save_figure(
        figure,
        "loss",
        caption="Loss against training tokens, log axis. The line is fitted to the held-out "
        "evaluations of the main phase after warm-up. Training loss of the last phase counts "
        "solutions only, so it is another quantity; it is not drawn where the model is frozen.",
    )


def draw_held_out(config: Any, run: Run, stages: list[dict[str, Any]], compressed: float) -> Figure:
    """Held-out bits per byte before training and after each phase."""
    figure, axes = new_figure(width=7.6, height=3.6)
    windows = [_window(window) for window in config.evaluation.windows]
    width = 0.8 / len(windows)
    for number, window in enumerate(windows):
        x = np.arange(len(stages)) + (number - (len(windows) - 1) / 2) * width
        bits = [stage[window] for stage in stages]
        color = (plotting.BLUE, plotting.SKY)[number % 2]
        bars = axes.bar(x, bits, width * 0.92, color=color, label=window)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8.5)
    axes.axhline(compressed, color=plotting.VERMILION, linewidth=1.2, linestyle="--")
    axes.annotate(
        f"gzip -9\n{compressed:.2f}",
        (1.01, compressed),
        xycoords=("axes fraction", "data"),
        va="center",
        color=plotting.VERMILION,
    )
    axes.set_xticks(
        range(len(stages)), ["before training", *(f"after {s['after']}" for s in stages[1:])]
    )
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("bits per byte")
    axes.set_title(f"Code base NLL of the held-out package `{config.data.held_out}`")
    axes.legend(loc="upper right")
    return run.save_figure(
        figure,
        "held_out",
        caption="Bits per byte of the held-out package, files concatenated in alphabetical order "
        "and scored by a rolling window, before training and after each phase.",
    )


def draw_expert_load(run: Run, columns: Columns) -> Figure:
    """Load of every expert at the end, and the imbalance over time."""
    figure, (left, right) = new_figure(1, 2, width=4.6, height=3.2)
    steps, load = columns["expert_load"]
    layers = {f"layer {n}": (steps, load[:, n]) for n in range(load.shape[1])}
    if "mtp_expert_load" in columns:
        steps, load = columns["mtp_expert_load"]
        layers["mtp"] = steps, load[:, 0]
    share = np.array([load[-10:].mean(0) for _, load in layers.values()])
    share = share / share.mean(-1, keepdims=True)  # [layer, expert]
    image = left.imshow(share, aspect="auto", vmin=0, vmax=2, cmap="RdBu_r")
    for layer, expert in np.ndindex(share.shape):
        value = share[layer, expert]
        color = plotting.INK if abs(value - 1) < 0.7 else "white"
        text = f"{value:.2f}"
        left.text(expert, layer, text, ha="center", va="center", fontsize=8, color=color)
    left.set_xticks(range(share.shape[1]))
    left.set_yticks(range(share.shape[0]), list(layers))
    left.set_xlabel("expert")
    left.grid(visible=False)
    left.set_title("Load over mean, last 10 reports")
    figure.colorbar(image, ax=left, shrink=0.8)
    for name, (steps, load) in layers.items():
        right.plot(steps, load.max(-1) / load.mean(-1), linewidth=1.2, label=name)
    right.axhline(1, color=plotting.GREY, linewidth=0.8, linestyle=":")
    right.set_xlabel("step")
    right.set_ylabel("busiest expert over mean")
    right.set_title("Imbalance")
    right.legend(loc="upper right")
    return run.save_figure(
        figure,
        "expert_load",
        caption="Assignments per expert relative to the layer's mean (1 is perfect balance), and "
        "the busiest expert of each layer over time. Balance comes from selection biases alone.",
    )


def _trains(phase: Any) -> str:
    if phase.mtp is None:
        return "model"
    return "both" if phase.trains_main else "module"


def _main_frozen(config: Any, steps: np.ndarray) -> np.ndarray:
    """Whether each of ``steps`` trained the prediction module alone, bool [step]."""
    ends = np.cumsum([phase.steps for phase in config.phases])
    frozen = np.array([not phase.trains_main for phase in config.phases])
    return frozen[np.minimum(np.searchsorted(ends, steps), len(ends) - 1)]


def _window(tokens: int) -> str:
    return f"window {tokens}"


def _tokens_at(columns: Columns, steps: np.ndarray) -> np.ndarray:
    """Training tokens (padding excluded) seen after each of ``steps``."""
    known, total = columns["total_tokens"]
    return np.interp(steps, np.append(0, known), np.append(0, total))


def _summary(config: Any, stages: list[dict[str, Any]], line: Line, compressed: float) -> str:
    short = _window(config.evaluation.windows[0])
    before, after = stages[0][short], stages[-1][short]
    return f"""\
The held-out package `{config.data.held_out}` went from {before:.2f} to {after:.2f} bits per byte
({short}; gzip -9 needs {compressed:.2f}). Over the main phase its loss falls by {-line.slope:.2f}
nats per token for every factor e in training tokens (R2 = {line.r2:.3f}).

**Limits.** One seed, one small package, minutes of training: the direction of the report's
log-linear curve, not its range. Fine-tuning is judged by the same code-base NLL only.
"""
