"""What `batch_norm.py` shows: the verdict, the table and the picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

INK, GREY, PALE = "#222222", "#767676", "#e8e8e8"
# Of Okabe and Ito's colours, told apart with any colour vision.
BLUE, VERMILION = "#0072B2", "#D55E00"
# What float32 rounding may add up to over some hundred updates.
ROUNDING = 1e-5
# Errors below are drawn here: there is no zero on a logarithmic axis.
SMALLEST = 1e-8


def verdict(ways: Mapping[str, dict[str, Any]]) -> str:
    """Says in one sentence what the figures show."""
    large, pooled = ways["large batch"], ways["pooled statistics"]
    off = {name: way["first_layer_error"] for name, way in ways.items()}
    first = (
        "equals the large batch's to float32 rounding"
        if pooled["first_layer_error"] < ROUNDING
        else f"is {percent(pooled['first_layer_error'])} off the large batch's"
    )
    ranked = sorted(ways.values(), key=lambda way: way["accuracy"])
    worst, best = ranked[0], ranked[-1]
    return (
        f"With pooled statistics the first layer's running variance {first} (alone it is "
        f"{percent(off['alone'])} off, with the momentum adjusted "
        f"{percent(off['momentum adjusted'])}), the deeper layers' is "
        f"{percent(pooled['deeper_layers_error'])} off; validation accuracy is between "
        f"{worst['accuracy']:.1%} ({worst['name']}) and {best['accuracy']:.1%} ({best['name']}), "
        f"the large batch's {large['accuracy']:.1%}."
    )


def percent(share: float) -> str:
    """Writes a share in percent, to two digits."""
    return f"{100 * share:.2g} %"


def weights_line(difference: float) -> str:
    """Says whether the running statistics have entered training."""
    same = "bit-equal" if difference == 0 else f"different by {difference:.1e} at most"
    return f"Trained weights of alone, momentum adjusted and pooled statistics: {same}."


def print_table(console: Console, figures: Mapping[str, Any]) -> None:
    """Prints the figures of each way in a row."""
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("way", no_wrap=True)
    for heading in ("updates", "first\nlayer", "deeper\nlayers", "validation\naccuracy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for way in figures["ways"]:
        errors = (way["first_layer_error"], way["deeper_layers_error"])
        first = way is figures["ways"][0]
        table.add_row(
            way["name"],
            f"{way['updates']:,}",
            *("-" if first or error is None else f"{error:.1e}" for error in errors),
            f"{way['accuracy']:.1%}",
        )
    console.print(table)
    console.print(
        "first, deeper layers: mean absolute difference of the running variance from the\n"
        "large batch's over the channels, as a share of the large batch's mean. Of that,\n"
        f"{percent(figures['initial_statistics_left'])} is still the initial value: "
        f"{figures['momentum']:g} ^ {figures['ways'][0]['updates']}."
    )
    console.print(weights_line(figures["largest_weight_difference"]), soft_wrap=True)


def draw_picture(figures: Mapping[str, Any], title: str, path: Path) -> None:
    """Draws the errors of the running variance on the left and the accuracies on the right."""
    ways = figures["ways"]
    figure = Figure(figsize=(12, 5), dpi=160, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1, rect=(0, 0, 1, 0.85))
    figure.text(0.02, 0.95, title, size=15, color=INK, weight="bold", va="center")
    subtitle = (
        f"Momentum {figures['momentum']:g}, {ways[0]['updates']:,} updates: "
        f"{percent(figures['initial_statistics_left'])} of the large batch's running statistics "
        f"are still their initial values.\n{weights_line(figures['largest_weight_difference'])}"
    )
    figure.text(0.02, 0.875, subtitle, size=10.5, color=GREY, va="center", linespacing=1.4)
    left, right = figure.subplots(1, 2)
    _draw_errors(left, ways)
    _draw_accuracies(right, ways)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_errors(axes: Axes, ways: Sequence[dict[str, Any]]) -> None:
    """Draws two points per way, on a logarithmic axis; none for the large batch and for groups."""
    layers = {
        "first layer": ("first_layer_error", BLUE),
        "deeper layers": ("deeper_layers_error", VERMILION),
    }
    for place, way in enumerate(ways):
        if place == 0 or way["first_layer_error"] is None:
            note = "what the others are measured against" if place == 0 else "has none"
            axes.text(SMALLEST, place, note, size=9, color=GREY, va="center")
            continue
        errors = [max(way[key], SMALLEST) for key, _ in layers.values()]
        axes.plot(errors, [place, place], color=PALE, linewidth=3, zorder=1)
        for error, (key, color) in zip(errors, layers.values(), strict=True):
            axes.scatter(error, place, color=color, s=45, zorder=2)
            height = 8 if key == "first_layer_error" else -16
            axes.annotate(
                f"{way[key]:.1g}",
                (error, place),
                xytext=(0, height),
                textcoords="offset points",
                ha="center",
                size=9,
                color=color,
            )
    for name, (_, color) in layers.items():
        axes.scatter([], [], color=color, label=name, s=45)
    axes.legend(frameon=False, loc="upper right", fontsize=9.5, labelcolor="linecolor")
    axes.set_xscale("log")
    axes.set_xlim(SMALLEST / 2, 5)
    axes.grid(axis="x", color=PALE, linewidth=0.8)
    _finish(axes, ways, "Relative error of the running variance")


def _draw_accuracies(axes: Axes, ways: Sequence[dict[str, Any]]) -> None:
    """Draws a bar per way; the large batch's, which is no goal in itself, is grey."""
    values = [way["accuracy"] for way in ways]
    colors = [GREY, *[BLUE] * (len(ways) - 1)]
    axes.barh(range(len(ways)), values, color=colors, height=0.62)
    for place, value in enumerate(values):
        axes.text(value + 0.01, place, f"{value:.1%}", va="center", size=9.5, color=colors[place])
    axes.set_xlim(0, 1.12)
    axes.set_xticks([])
    _finish(axes, ways, "Validation accuracy")


def _finish(axes: Axes, ways: Sequence[dict[str, Any]], title: str) -> None:
    axes.set_yticks(range(len(ways)), [way["name"] for way in ways], color=INK, size=10)
    axes.set_ylim(len(ways) - 0.4, -0.6)
    axes.set_title(title, loc="left", size=11, color=INK, pad=10)
    axes.tick_params(which="both", length=0)
    axes.tick_params(axis="x", colors=GREY)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
