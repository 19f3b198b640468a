"""One look for all figures: a colour-blind-safe palette, light axes, labels on the lines.

with plotting.style():
    figure, axes = new_figure()
    axes.plot(x, y, color=plotting.BLUE)
    plotting.label(axes, x[-1], y[-1], "loss", color=plotting.BLUE)
    saved = run.save_figure(figure, "loss", caption="...")
"""

from contextlib import AbstractContextManager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.text import Annotation

# Okabe and Ito's colours, the default cycle in this order.
BLUE = "#0072B2"
VERMILION = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
ORANGE = "#E69F00"
SKY = "#56B4E9"
INK = "#262626"  # text
GREY = "#7A7A7A"  # whatever only supports the message: references, fits, notes
SHADE = "#F2EFEA"  # background of a marked region

_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 10,
    "axes.linewidth": 0.8,
    "axes.prop_cycle": matplotlib.cycler(color=[BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY]),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.size": 9.5,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "image.cmap": "cividis",
    "legend.frameon": False,
    "lines.linewidth": 2,
    "lines.markersize": 4,
    "lines.solid_capstyle": "round",
    "text.color": INK,
    "xtick.color": INK,
    "xtick.labelsize": 9,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.color": INK,
    "ytick.labelsize": 9,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}


def style() -> AbstractContextManager[None]:
    """The look; figures must be both made and saved inside."""
    return matplotlib.rc_context(_STYLE)


def label(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    *,
    color: str = INK,
    offset: tuple[float, float] = (6, 0),
    **text_options: Any,
) -> Annotation:
    """Text next to a point, instead of a legend.

    Args:
      axes: where to write.
      x: the point, in data coordinates.
      y: the point, in data coordinates.
      text: one or more lines; $...$ is mathematics.
      color: that of the labelled line.
      offset: from the point to the text, in points; the text goes on that side of the point.
      text_options: overrides, as for `Axes.annotate`.
    """
    across, up = offset
    options = {
        "ha": "left" if across > 0 else "right" if across < 0 else "center",
        "va": "bottom" if up > 0 else "top" if up < 0 else "center",
        "linespacing": 1.25,
        **text_options,
    }
    return axes.annotate(
        text, (x, y), xytext=offset, textcoords="offset points", color=color, **options
    )


def corner(axes: Axes, text: str, where: str, *, color: str = GREY) -> Annotation:
    """A note in a corner of the axes.

    Args:
      axes: where to write.
      text: one or more lines.
      where: "upper left", "upper right", "lower left" or "lower right".
      color: of the text.
    """
    vertical, horizontal = where.split()
    return axes.annotate(
        text,
        (float(horizontal == "right"), float(vertical == "upper")),
        xycoords="axes fraction",
        xytext=(-8 if horizontal == "right" else 8, -8 if vertical == "upper" else 8),
        textcoords="offset points",
        ha=horizontal,
        va="top" if vertical == "upper" else "bottom",
        color=color,
        linespacing=1.25,
    )
