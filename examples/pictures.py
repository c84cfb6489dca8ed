"""Pictures for the examples: panels of lines, each with its name written at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

INK, GREY, PALE = "#222222", "#767676", "#e8e8e8"
# Okabe and Ito's colours, told apart with any colour vision.
BLUE, GREEN, VERMILION, PURPLE = "#0072B2", "#009E73", "#D55E00", "#CC79A7"
# The reference is a broad pale band and what should equal it is dashed: both show where they agree.
REFERENCE = {"color": BLUE, "linewidth": 6, "alpha": 0.35, "solid_capstyle": "round"}
DASHED = {"color": INK, "linewidth": 1.6, "dashes": (4, 2)}


@dataclass(frozen=True)
class Line:
    """A line: its name, its points, and how matplotlib draws it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """Lines over one pair of axes; `scales` are those of x and y, "linear" or "log"."""

    title: str
    x_label: str
    lines: Sequence[Line]
    scales: tuple[str, str] = ("linear", "linear")


def draw(title: str, subtitle: str, panels: Sequence[Panel], path: Path) -> None:
    """Draws panels side by side under a title, and saves the picture."""
    figure = Figure(figsize=(6 * len(panels), 5.2), dpi=160, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1, rect=(0, 0, 1, 0.87))
    figure.text(0.02, 0.95, title, size=15, color=INK, weight="bold", va="center")
    figure.text(0.02, 0.89, subtitle, size=10.5, color=GREY, va="center")
    for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        _draw_panel(axes, panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for line in panel.lines:
        axes.plot(line.x, line.y, **line.style)
    axes.set(xscale=panel.scales[0], yscale=panel.scales[1])
    for axis, scale in ((axes.xaxis, panel.scales[0]), (axes.yaxis, panel.scales[1])):
        highest = max(axis.get_data_interval())
        # Over a few powers of ten these alone say enough.
        steps = LogLocator(subs=(1,) if highest > 1000 * axis.get_minpos() else (1, 2, 5))
        axis.set_major_locator(steps if scale == "log" else MaxNLocator(5))
        axis.set_major_formatter("{x:,.6g}")
        axis.set_minor_locator(NullLocator())
    axes.set_title(panel.title, loc="left", size=11, color=INK, pad=10)
    axes.set_xlabel(panel.x_label, color=GREY)
    axes.tick_params(which="both", length=0, colors=GREY)
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.margins(x=0.01, y=0.08)
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [to_axes.transform((line.x[-1], line.y[-1]))[1] for line in panel.lines]
    for line, end, height in zip(panel.lines, ends, _apart(ends), strict=True):
        axes.annotate(
            line.name,
            xy=(1.0, end),
            xytext=(1.03, height),
            xycoords="axes fraction",
            color=line.style["color"],
            va="center",
            size=10,
            weight="bold",
            annotation_clip=False,
        )


def _apart(heights: Sequence[float], gap: float = 0.06) -> np.ndarray:
    """Moves heights apart to at least `gap`, around where they were."""
    order = np.argsort(heights)
    moved = np.array(heights)[order]
    for _ in range(100):
        for low in range(len(moved) - 1):
            overlap = max(gap - (moved[low + 1] - moved[low]), 0)
            moved[low] -= overlap / 2
            moved[low + 1] += overlap / 2
    back = np.empty_like(moved)
    back[order] = moved
    return back
