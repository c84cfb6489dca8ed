"""The pictures that the benchmarks draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import BLUE, GREY, INK, PALE, VERMILION, bare_axes
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FLOOR, OPTION, OURS = "floor", "Keras option", "keras_ga"
OTHER_BARS = "#c3c9cf"


def draw_micro_steps(figures: dict[str, Any], title: str, caption: str, path: Path) -> None:
    """Draws a panel of bars for each size (downwards) and N (to the right), the floor as a line."""
    rows = figures["rows"]
    sizes = sorted({row["parameters"] for row in rows})
    steps = sorted({row["accumulation_steps"] for row in rows})
    figure = Figure(
        figsize=(2.2 + 3.9 * len(steps), 1.4 + 1.75 * len(sizes)), dpi=160, layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    panels = figure.subplots(len(sizes), len(steps), squeeze=False, sharex="row")
    for row in rows:
        across, down = steps.index(row["accumulation_steps"]), sizes.index(row["parameters"])
        axes = panels[down, across]
        _draw_bars(axes, row, names=across == 0)
        heading = f"{row['parameters'] / 1e6:.3g} M weights, N = {row['accumulation_steps']}"
        axes.set_title(heading, loc="left", size=10, color=INK, pad=16)
    figure.suptitle(
        f"{title}: milliseconds per micro-step",
        x=0.012,
        ha="left",
        size=14,
        color=INK,
        weight="bold",
    )
    figure.supxlabel(caption, x=0.012, ha="left", size=7.5, color=GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_bars(axes: Axes, row: dict[str, Any], names: bool) -> None:
    sides = {name: side for name, side in row["sides"].items() if name != FLOOR}
    values = [side["milliseconds"] for side in sides.values()]
    floor = row["sides"][FLOOR]["milliseconds"]
    colors = [BLUE if name == OURS else OTHER_BARS for name in sides]
    axes.barh(range(len(sides)), values, color=colors, height=0.72)
    for place, (name, side) in enumerate(sides.items()):
        axes.annotate(
            f"{side['milliseconds']:.3g} ms  ({side['times_floor']:.2f} x floor)",
            (side["milliseconds"], place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            size=9,
            color=BLUE if name == OURS else INK,
            weight="bold" if name == OURS else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    axes.axvline(floor, color=VERMILION, linewidth=1.4, zorder=1.5)
    axes.annotate(
        f"floor, forward and backward pass: {floor:.3g} ms",
        (floor, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 2),
        textcoords="offset points",
        size=8,
        color=VERMILION,
    )
    axes.set_yticks(range(len(sides)), list(sides) if names else [""] * len(sides))
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.5 * max(values)))
    bare_axes(axes)
    for label, name in zip(axes.get_yticklabels(), sides, strict=True):
        label.set(color=BLUE if name == OURS else INK, size=9.5)
        label.set_weight("bold" if name == OURS else "normal")
    axes.spines["left"].set(visible=True, color=PALE)


def draw_memory_plan(figures: dict[str, Any], title: str, caption: str, path: Path) -> None:
    """Draws peak memory against the micro-batch: what falls with it, above what stays."""
    rows = sorted(figures["rows"], key=lambda row: row["micro_batch"])
    places = range(len(rows))
    sides = {name: [row["sides"][name]["peak"] / 1024 for row in rows] for name in (OURS, OPTION)}
    stays = [row["sides"][OURS]["arguments"] / 1024 for row in rows]
    figure = Figure(figsize=(9.5, 5), dpi=160, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
    axes = figure.subplots()
    axes.set_yscale("log", base=2)
    axes.plot(places, sides[OPTION], color=VERMILION, linewidth=2, marker="s", markersize=4)
    axes.plot(places, sides[OURS], color=BLUE, linewidth=3, marker="o")
    axes.plot(places, stays, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)))
    for place, gib in zip(places, sides[OURS], strict=True):
        _note(axes, f"{gib:.3g}", (place, gib), (8, -15), BLUE, ha="center")
    end = len(rows) - 1
    _note(axes, "weights, slots and accumulators", (end, stays[-1]), (0, -13), GREY, ha="right")
    _note(axes, "keras_ga", (0, sides[OURS][0]), (-8, 0), BLUE, ha="right", va="center")
    apart = sides[OPTION][0] / sides[OURS][0] > 1.06
    _note(
        axes,
        "Keras option" if apart else "",
        (0, sides[OPTION][0]),
        (-8, 0),
        VERMILION,
        ha="right",
        va="center",
    )
    _note(axes, f"{sides[OPTION][0]:.3g}", (0, sides[OPTION][0]), (0, 9), VERMILION, ha="center")
    labels = [f"{row['micro_batch']}\nN = {row['accumulation_steps']}" for row in rows]
    axes.set_xticks(places, labels)
    axes.set_xlabel(f"rows in a micro-batch; {figures['batch_size']} in an update", color=GREY)
    axes.yaxis.set_major_formatter(lambda gib, _: f"{gib:g} GiB")
    axes.set_xlim(-1.1, end + 0.3)
    axes.margins(y=0.12)
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    bare_axes(axes)
    figure.suptitle(title, x=0.012, ha="left", size=13, color=INK, weight="bold")
    figure.text(0.012, 0.0, caption, ha="left", va="top", size=7.5, color=GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", pad_inches=0.15)


def draw_split_batches(figures: dict[str, Any], caption: str, path: Path) -> None:
    """Draws, for each model, what a step takes against its micro-batch's rows: memory and time."""
    models = list(dict.fromkeys(row["model"] for row in figures["rows"]))
    figure = Figure(figsize=(3.6 * len(models) + 1, 3.6), dpi=130, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        rows = [row for row in figures["rows"] if row["model"] == model]
        places = range(len(rows))
        for key, color, style in (("times_whole", GREY, "--"), ("share", BLUE, "-")):
            axes.plot(places, [row[key] for row in rows], style, color=color, linewidth=2)
        axes.set_xticks(
            places, [f"{row['rows']}" if row["split"] else f"whole\n{row['rows']}" for row in rows]
        )
        last = rows[-1]
        _note(
            axes,
            f"memory {last['share']:.2f}",
            (places[-1], last["share"]),
            (0, 7),
            BLUE,
            ha="right",
        )
        time = f"time {last['times_whole']:.2f}"
        _note(axes, time, (places[-1], last["times_whole"]), (0, 7), GREY, ha="right")
        axes.set_ylim(0, max(1.6, 1.2 * max(row["times_whole"] for row in rows)))
        axes.set_title(model, loc="left", size=11, color=INK)
        axes.grid(axis="y", color=PALE, linewidth=0.8)
        bare_axes(axes)
    figure.suptitle(
        f"A batch of {figures['batch']} on {figures['backend']}, by its micro-batch; whole = 1",
        x=0.012,
        ha="left",
        size=12,
        color=INK,
        weight="bold",
    )
    figure.text(0.012, 0.0, caption, ha="left", va="top", size=7, color=GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", pad_inches=0.15)


def _note(
    axes: Axes,
    text: str,
    xy: tuple[float, float],
    move: tuple[float, float],
    color: str,
    **how: Any,
) -> None:
    axes.annotate(
        text,
        xy,
        xytext=move,
        textcoords="offset points",
        color=color,
        size=9.5,
        weight="bold",
        **how,
    )
