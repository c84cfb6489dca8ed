"""Measures what each way of handling BatchNormalization under accumulation comes to, over seeds.

Two networks on scikit-learn's digits: `convolutions` (three of them) and `dense` (three layers),
each with BatchNormalization on the pixels and after each layer. With N micro-batches of b rows,
each is trained for the same updates on the same rows:

- large batch: N x b rows at once;
- alone: accumulation, with Keras's layers as they are;
- recalibrated: the same network, its statistics taken anew from the training rows;
- adjusted: with `batch_norm.adjust_momentum`;
- pooled: with `batch_norm.convert`;
- GroupNorm: with `batch_norm.replace_with_group_norm`, one group.

Figures are the error of the first layer's running variance against the large batch's (mean
absolute difference over the channels, as a share of the mean) and the accuracy on 360 rows that
are not trained on, means and standard deviations over the seeds. Momentum does not enter training,
so the ways without it, recalibrated and GroupNorm, are trained once for all momenta.

    python benchmarks/batch_norm.py --settings 4x32,16x8,64x2 --momenta 0.9,0.99 --updates 60
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    BLUE,
    GREY,
    INK,
    OUTPUT,
    PALE,
    VERMILION,
    accelerator,
    bare_axes,
    circumstances,
    count,
    one_line,
    screen,
    use_backend,
    write_json,
)
from rich.console import Console
from rich.table import Table

LARGE, ALONE, RECALIBRATED = "large batch", "alone", "recalibrated"
ADJUSTED, POOLED, GROUPS = "adjusted", "pooled", "GroupNorm"
# Okabe and Ito's colours, told apart with any colour vision.
COLORS = {
    LARGE: INK,
    ALONE: VERMILION,
    RECALIBRATED: "#E69F00",
    ADJUSTED: "#009E73",
    POOLED: BLUE,
    GROUPS: "#CC79A7",
}
TRAIN_ROWS = 1437
# Errors below are drawn here: there is no zero on a logarithmic axis.
SMALLEST = 1e-8


@dataclass(frozen=True)
class Outcome:
    """What one training came to; `variance` is the running one of the first layer, if any."""

    accuracy: float
    variance: Any = None


class Training:
    """One way to train one network; compiled once, and run from a new start for each seed."""

    def __init__(self, network: str, way: str, momentum: float, steps: int, micro_batch: int):
        """Takes the network's and the way's names, the momentum, N and the rows of a step."""
        import keras

        import keras_ga

        self.network, self.way, self.momentum = network, way, momentum
        self.steps, self.micro_batch = steps, micro_batch
        self.model = self._new(seed=0)
        optimizer = keras.optimizers.Adam(2e-3)
        if way != LARGE:
            optimizer = keras_ga.GradientAccumulationOptimizer(optimizer, accumulation_steps=steps)
        optimizer.build(self.model.trainable_variables)
        self.optimizer_start = [keras.ops.convert_to_numpy(v) for v in optimizer.variables]
        objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(optimizer=optimizer, loss=objective, metrics=["accuracy"])

    def _new(self, seed: int) -> Any:
        from keras_ga import batch_norm

        model = NETWORKS[self.network](self.momentum, seed)
        if self.way == ADJUSTED:
            batch_norm.adjust_momentum(model, self.steps)
        elif self.way == POOLED:
            batch_norm.convert(model, self.steps)
        elif self.way == GROUPS:
            model = batch_norm.replace_with_group_norm(model, groups=1)
        return model

    def run(self, seed: int, updates: int) -> Outcome:
        """Trains from the start that belongs to a seed, on the rows that belong to it."""
        self.model.set_weights(self._new(seed).get_weights())
        for variable, value in zip(
            self.model.optimizer.variables, self.optimizer_start, strict=True
        ):
            variable.assign(value)
        rows = self.steps * self.micro_batch if self.way == LARGE else self.micro_batch
        x, y = training_rows(seed, updates, self.steps * self.micro_batch)
        self.model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
        made = int(self.model.optimizer.iterations)
        if made != updates:
            raise RuntimeError(f"{self.way} made {made} updates instead of {updates}")
        return self.outcome()

    def recalibrate(self) -> Outcome:
        """Takes the statistics anew from the training rows."""
        from keras_ga import batch_norm

        x, _ = digits()
        rows = self.steps * self.micro_batch
        kept = TRAIN_ROWS // rows * rows  # a smaller last batch would be compiled as well
        batch_norm.recalibrate(self.model, x[:kept], batch_size=rows, verbose=0)
        return self.outcome()

    def outcome(self) -> Outcome:
        """Evaluates on the validation rows."""
        import keras

        x, y = digits()
        results = self.model.evaluate(
            x[TRAIN_ROWS:], y[TRAIN_ROWS:], batch_size=360, verbose=0, return_dict=True
        )
        stock = keras.layers.BatchNormalization
        found = [layer for layer in self.model.layers if isinstance(layer, stock)]
        variance = keras.ops.convert_to_numpy(found[0].moving_variance) if found else None
        return Outcome(results["accuracy"], variance)


def convolutions(momentum: float, seed: int) -> Any:
    """Builds three convolutions with BatchNormalization, the first of the layers on the pixels."""
    import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.Input((8, 8, 1)), keras.layers.BatchNormalization(momentum=momentum)]
    for filters, strides in ((16, 1), (32, 2), (32, 1)):
        layers += [
            keras.layers.Conv2D(filters, 3, strides, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=momentum),
            keras.layers.ReLU(),
        ]
    return keras.Sequential(
        [*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    )


def dense(momentum: float, seed: int) -> Any:
    """Builds a multilayer perceptron with BatchNormalization, also on its 64 inputs."""
    import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.Input((8, 8, 1)), keras.layers.Flatten()]
    layers.append(keras.layers.BatchNormalization(momentum=momentum))
    for _ in range(2):
        layers += [
            keras.layers.Dense(64, use_bias=False),
            keras.layers.BatchNormalization(momentum=momentum),
            keras.layers.ReLU(),
        ]
    return keras.Sequential([*layers, keras.layers.Dense(10)])


NETWORKS: dict[str, Callable[[float, int], Any]] = {"convolutions": convolutions, "dense": dense}


def digits() -> tuple[Any, Any]:
    """Returns scikit-learn's digits: 1,797 images with pixels from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images.reshape(-1, 8, 8, 1) / 16).astype("float32"), labels


def training_rows(seed: int, updates: int, large_batch: int) -> tuple[Any, Any]:
    """Returns the rows of a training one after the other: the seed's order, new in each epoch."""
    import numpy as np

    x, y = digits()
    random = np.random.default_rng(seed)
    kept = TRAIN_ROWS // large_batch * large_batch
    epochs = -(-updates * large_batch // kept)
    order = np.concatenate([random.permutation(TRAIN_ROWS)[:kept] for _ in range(epochs)])
    order = order[: updates * large_batch]
    return x[order], y[order]


def train_all(
    network: str, setting: tuple[int, int], options: argparse.Namespace, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Trains a network with N x b rows in all ways, and returns a row of figures per momentum."""
    # Without a momentum, from the first: these do not depend on it.
    shared: dict[str, list[Outcome]] = {RECALIBRATED: [], GROUPS: []}
    rows = []
    for momentum in options.momenta:
        outcomes: dict[str, list[Outcome]] = {}
        first = momentum == options.momenta[0]
        for way in (LARGE, ALONE, ADJUSTED, POOLED, *[GROUPS] * first):
            training = Training(network, way, momentum, *setting)
            into = shared if way == GROUPS else outcomes
            into[way] = []
            for seed in range(options.seeds):
                say(f"{network}, {setting[0]} x {setting[1]}, {momentum:g}, {way}, seed {seed}")
                into[way].append(training.run(seed, options.updates))
                if way == ALONE and first:
                    shared[RECALIBRATED].append(training.recalibrate())
        outcomes |= shared
        rows.append(
            {
                "network": network,
                "accumulation_steps": setting[0],
                "micro_batch": setting[1],
                "momentum": momentum,
                "ways": {way: summary(outcomes[way], outcomes[LARGE]) for way in COLORS},
            }
        )
    return rows


def summary(outcomes: Sequence[Outcome], large: Sequence[Outcome]) -> dict[str, Any]:
    """Returns mean, standard deviation and the figure of each seed, of error and accuracy."""
    errors = [
        float(abs(ours.variance - reference.variance).mean() / reference.variance.mean())
        for ours, reference in zip(outcomes, large, strict=True)
        if ours.variance is not None
    ]
    accuracies = [outcome.accuracy for outcome in outcomes]
    return {"first_layer_error": spread(errors), "accuracy": spread(accuracies)}


def spread(figures: Sequence[float]) -> dict[str, Any] | None:
    """Returns mean, standard deviation (0 for one figure) and the figures; None without any."""
    if not figures:
        return None
    deviation = statistics.stdev(figures) if len(figures) > 1 else 0.0
    return {"mean": statistics.mean(figures), "deviation": deviation, "by_seed": list(figures)}


def print_table(console: Console, figures: dict[str, Any]) -> None:
    """Prints a section of six ways for each network, momentum and setting."""
    table = Table(title=title(figures), title_justify="left", caption_justify="left")
    table.caption = one_line(figures, ("keras", figures["backend"]))
    for heading in ("network", "momentum", "N x b", "way", "variance error", "accuracy, %"):
        right = heading in ("variance error", "accuracy, %")
        table.add_column(heading, justify="right" if right else "left")
    for row in figures["rows"]:
        for way, measured in row["ways"].items():
            first = way == LARGE
            error, accuracy = measured["first_layer_error"], measured["accuracy"]
            table.add_row(
                row["network"] if first else "",
                f"{row['momentum']:g}" if first else "",
                f"{row['accumulation_steps']} x {row['micro_batch']}" if first else "",
                way,
                "" if first or error is None else f"{error['mean']:.1e} ± {error['deviation']:.0e}",
                f"{100 * accuracy['mean']:.1f} ± {100 * accuracy['deviation']:.1f}",
            )
        table.add_section()
    console.print(table)


def title(figures: dict[str, Any]) -> str:
    """Returns what was measured in a few words."""
    seeds = "1 seed" if figures["seeds"] == 1 else f"{figures['seeds']} seeds"
    return f"BatchNormalization under accumulation: digits, {figures['updates']} updates, {seeds}"


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draws a column of two panels per network and momentum: variance error above accuracy."""
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys((row["network"], row["momentum"]) for row in figures["rows"]))
    figure = Figure(figsize=(max(11, 1.5 + 3.4 * len(columns)), 7), dpi=160, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.12, rect=(0, 0.04, 1, 0.85))
    panels = figure.subplots(2, len(columns), squeeze=False, sharey="row")
    for place, column in enumerate(columns):
        rows = [row for row in figures["rows"] if (row["network"], row["momentum"]) == column]
        above, below = panels[:, place]
        _draw_points(above, rows, "first_layer_error", [way for way in COLORS if way != LARGE])
        _draw_points(below, rows, "accuracy", list(COLORS))
        heading = f"{column[0]}, momentum {column[1]:g}"
        above.set_title(heading, loc="left", size=10.5, color=INK, pad=8, weight="bold")
    panels[0, 0].set_yscale("log")
    panels[0, 0].set_ylim(SMALLEST / 2, 4)
    panels[0, 0].set_ylabel("relative error of the first\nlayer's running variance", color=INK)
    panels[1, 0].set_ylim(0, 1.03)
    panels[1, 0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    panels[1, 0].set_ylabel("validation accuracy", color=INK)
    figure.text(0.012, 0.965, title(figures), size=13, color=INK, weight="bold", va="center")
    handles = [
        panels[0, 0].scatter([], [], color=color, label=way, s=30) for way, color in COLORS.items()
    ]
    figure.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(0.004, 0.915),
        ncols=len(COLORS),
        frameon=False,
        labelcolor="linecolor",
        handletextpad=0.1,
    )
    caption = one_line(figures, ("keras", figures["backend"]))
    note = "Points are means, bars standard deviations over the seeds."
    figure.text(0.012, 0.02, f"{note} {caption}", size=7.5, color=GREY, va="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_points(axes: Any, rows: list[dict[str, Any]], key: str, ways: list[str]) -> None:
    """Draws the ways of each setting side by side."""
    for index, way in enumerate(ways):
        shift = (index - (len(ways) - 1) / 2) * 0.12
        points = [(place, row["ways"][way][key]) for place, row in enumerate(rows)]
        for place, point in points:
            if point is not None:
                axes.errorbar(
                    place + shift,
                    max(point["mean"], SMALLEST),
                    # Downwards not beyond zero, which a logarithmic axis does not have.
                    yerr=[[min(point["deviation"], 0.9 * point["mean"])], [point["deviation"]]],
                    color=COLORS[way],
                    marker="o",
                    markersize=5,
                    linewidth=1.4,
                )
    labels = [f"{row['accumulation_steps']} x {row['micro_batch']}" for row in rows]
    axes.set_xticks(range(len(rows)), labels)
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    bare_axes(axes)


def setting(text: str) -> tuple[int, int]:
    """Reads a setting such as 16x8: N and the rows of a micro-batch (two or more)."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"must be N x rows, such as 16x8. Received: {text!r}")
    steps, rows = map(int, parts)
    if steps < 2 or rows < 2 or steps * rows > TRAIN_ROWS:
        raise argparse.ArgumentTypeError(
            f"must be two or more micro-batches of two or more rows, {TRAIN_ROWS} in all at most. "
            f"Received: {text!r}"
        )
    return steps, rows


def settings(text: str) -> list[tuple[int, int]]:
    """Reads settings with commas between them (an argparse type)."""
    return [setting(part) for part in text.split(",")]


def momenta(text: str) -> list[float]:
    """Reads momenta with commas between them (an argparse type)."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"must be numbers between 0 and 1. Received: {text!r}")
    return values


def networks(text: str) -> list[str]:
    """Reads names of networks with commas between them (an argparse type)."""
    names = text.split(",")
    if not set(names) <= set(NETWORKS):
        known = ", ".join(NETWORKS)
        raise argparse.ArgumentTypeError(f"must be some of {known}. Received: {text!r}")
    return names


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Running variance and validation accuracy of networks with BatchNormalization "
        "on the large batch, and under gradient accumulation in five ways.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", choices=("jax", "tensorflow", "torch"), default="jax", help="Keras backend")
    add("--networks", type=networks, default="convolutions,dense", help="what to train")
    add("--settings", type=settings, default="4x32,16x8,64x2", help="N x rows of a micro-batch")
    add("--momenta", type=momenta, default="0.9,0.99", help="of BatchNormalization")
    add("--updates", type=count, default=60, help="of each training")
    add("--seeds", type=count, default=5, help="of initial weights and order of rows")
    add("--output", type=Path, default=OUTPUT, help="folder for the JSON file and the picture")
    return parser.parse_args(arguments)


def main() -> None:
    """Measures, prints, writes."""
    options = parse_options()
    use_backend(options.backend)
    import warnings

    # The advice to use the tools that are measured here.
    warnings.filterwarnings("ignore", message="The model has BatchNormalization")
    console = screen()
    rows = []
    with console.status("training") as status:
        for network in options.networks:
            for setting in options.settings:
                rows += train_all(network, setting, options, status.update)
    rows.sort(key=lambda row: (options.networks.index(row["network"]), row["momentum"]))
    figures = {
        "benchmark": "batch_norm",
        "backend": options.backend,
        "updates": options.updates,
        "seeds": options.seeds,
        "device": accelerator(options.backend),
        **circumstances(),
        "rows": rows,
    }
    print_table(console, figures)
    path = options.output / "batch_norm.json"
    write_json(figures, path)
    draw(figures, path.with_suffix(".png"))
    console.print(f"Figures: {path}\nPicture: {path.with_suffix('.png')}", soft_wrap=True)


if __name__ == "__main__":
    main()
