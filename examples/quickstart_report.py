"""What `quickstart.py` shows: the verdict, the table and the picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

INK, GREY = "#222222", "#767676"
# What float32 rounding may add up to over some hundred updates.
ROUNDING = 1e-5

# Okabe and Ito's colours, told apart with any colour vision. The first way, which the others are
# measured against, is a broad pale band; the last is dashed, so that both show where they agree.
LINES = (
    {"color": "#0072B2", "linewidth": 6, "alpha": 0.35, "solid_capstyle": "round"},
    {"color": "#009E73", "linewidth": 1.5},
    {"color": "#D55E00", "linewidth": 1.5},
    {"color": INK, "linewidth": 1.6, "dashes": (4, 2)},
)


def verdict(ways: Sequence[dict[str, Any]]) -> str:
    """Says in one sentence what the figures show."""
    _, alone, built_in, ours = (way["difference"] for way in ways)
    others = f"the small batch alone ends {alone:.2g} away, Keras's built-in {built_in:.2g}."
    if ours < ROUNDING:
        return f"keras_ga ends within {ours:.0e} of the large batch, float32 rounding; {others}"
    return f"keras_ga ends {ours:.2g} away from the large batch, more than rounding; {others}"


def print_table(console: Console, ways: Sequence[dict[str, Any]]) -> None:
    """Prints the figures of each way in a row."""
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        caption="The loss on the training rows, the accuracy and the largest difference of a\n"
        "weight from the large batch's are those of the weights that fit ends on: EMA.",
        caption_justify="left",
    )
    table.add_column("way", no_wrap=True)
    columns = ("updates", "seconds\n/ epoch", "final\nloss", "validation\naccuracy")
    for heading in (*columns, "largest\ndifference"):
        table.add_column(heading, justify="right", no_wrap=True)
    for way in ways:
        table.add_row(
            way["name"],
            f"{way['updates']:,}",
            f"{way['seconds_per_epoch']:.2f}",
            f"{way['loss']:.4f}",
            f"{way['accuracy']:.1%}",
            "-" if way is ways[0] else f"{way['difference']:.1e}",
        )
    console.print(table)


def draw_picture(figures: Mapping[str, Any], title: str, path: Path) -> None:
    """Draws the ways' losses on the left and their distances from the first on the right."""
    ways = figures["ways"]
    lines = dict(zip((way["name"] for way in ways), LINES, strict=True))
    figure = Figure(figsize=(12, 5.2), dpi=160, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1, rect=(0, 0, 1, 0.87))
    figure.text(0.02, 0.95, title, size=15, color=INK, weight="bold", va="center")
    figure.text(0.02, 0.89, figures["verdict"], size=10.5, color=GREY, va="center")

    left, right = figure.subplots(1, 2)
    losses = {way["name"]: np.array(way["losses"]) for way in ways}
    _draw_panel(left, losses, lines, "Training loss of each large batch's rows")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter("{x:g}")
    distances = {way["name"]: np.array(way["differences"]) for way in ways[1:]}
    _draw_panel(right, distances, lines, f"Largest weight difference from the {ways[0]['name']}")

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_panel(
    axes: Axes, curves: Mapping[str, np.ndarray], lines: Mapping[str, dict], title: str
) -> None:
    for name, values in curves.items():
        axes.plot(np.arange(1, len(values) + 1), values, **lines[name])
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title(title, loc="left", size=11, color=INK, pad=10)
    axes.set_xlabel("large batches seen", color=GREY)
    axes.tick_params(which="both", length=0, colors=GREY)
    axes.grid(axis="y", color="#e8e8e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.margins(x=0.01, y=0.08)
    _label_lines(axes, curves, lines)


def _label_lines(axes: Axes, curves: Mapping[str, np.ndarray], lines: Mapping[str, dict]) -> None:
    """Writes each line's name at its right end, moved up or down where two would touch."""
    axes.autoscale_view()
    transform = axes.transData + axes.transAxes.inverted()
    ends = {name: transform.transform((len(y), y[-1]))[1] for name, y in curves.items()}
    for (name, end), height in zip(
        sorted(ends.items(), key=lambda item: item[1]), _spread(sorted(ends.values())), strict=True
    ):
        axes.annotate(
            name,
            xy=(1.0, end),
            xytext=(1.03, height),
            xycoords="axes fraction",
            color=lines[name]["color"],
            va="center",
            size=10,
            weight="bold",
            annotation_clip=False,
        )


def _spread(heights: Sequence[float], gap: float = 0.06) -> list[float]:
    """Moves sorted heights apart to at least `gap`, around where they were."""
    heights = list(heights)
    for _ in range(100):
        for low in range(len(heights) - 1):
            overlap = gap - (heights[low + 1] - heights[low])
            if overlap > 0:
                heights[low] -= overlap / 2
                heights[low + 1] += overlap / 2
    return heights
