"""A small batch with a small learning rate is not a large batch: what accumulation changes.

N small steps at the rate r move the weights by r times the sum of N gradients, each taken at the
weights that the one before has left. One accumulated step at the rate s moves them by s times the
mean of N gradients, all taken at the same weights. So, over the same samples:

- the accumulated gradient has 1/N of the variance. The left panel measures that at fixed weights;
- with s = r there is 1/N of the noise, but also 1/N of the way: training is N times slower;
- with s = N r (the linear rule) the way is the same, as long as the gradient changes little within
  it. Where it does change, small steps follow the bend and the large one shoots straight on. There
  is a largest s, given by the curvature of the loss: with `--rate 0.2` the small batch trains on
  (loss 0.06), and the large one's 3.2 is too much (loss 34).

As long as training converges, accumulated is the large batch to rounding, at each rate. It costs
the same passes as the small batch does, so it is for recipes that want the large batch, not for
its own sake. The right panel trains one network on scikit-learn's digits in all of these ways, on
the same rows in the same order.

    python examples/learning_rate.py
    KERAS_BACKEND=torch python examples/learning_rate.py --rate 0.2

It prints two tables and draws `examples/output/learning_rate.png`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from pictures import DASHED, GREEN, GREY, PURPLE, REFERENCE, VERMILION, Line, Panel, draw
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits

import keras_ga

WINDOWS = (1, 2, 4, 8, 16)  # the N that the variance is measured for


@dataclass(frozen=True)
class Way:
    """One way to train: its name, the rows in a step, N (None: no accumulation), the rate."""

    name: str
    batch_size: int
    accumulation_steps: int | None
    rate: float


@dataclass(frozen=True)
class Result:
    """The loss on all rows each time that a large batch's rows are through, and the weights."""

    losses: list[float]
    updates: int
    weights: np.ndarray


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of 64 pixels from 0 to 1, and their labels."""
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype("float32"), y.astype("int32")


def compiled_model(rate: float, accumulation_steps: int | None) -> keras.Model:
    """Returns a small network, with the same initial weights each time."""
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(32, activation="tanh")
    model = keras.Sequential([keras.Input((64,)), hidden, keras.layers.Dense(10)])
    optimizer: Any = keras.optimizers.SGD(rate)
    if accumulation_steps is not None:
        optimizer = keras_ga.GradientAccumulationOptimizer(optimizer, accumulation_steps)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def flat(weights: Sequence[np.ndarray]) -> np.ndarray:
    """Returns weights in one vector."""
    return np.concatenate([weight.ravel() for weight in weights])


def gradient_variance(
    steps: int, windows: int, batch_size: int, on_step: Callable[[], None]
) -> float:
    """Returns the variance of a window's gradient, summed over its entries, at the first weights.

    An update of SGD at rate 1 is the gradient; after each, the weights are put back. Rows are
    drawn with replacement, since micro-batches have to be independent of each other.
    """
    x, y = digits()
    model = compiled_model(1.0, steps)
    start = model.get_weights()
    draws = np.random.default_rng(steps)
    gradients = []
    for _ in range(windows):
        for _ in range(steps):
            rows = draws.integers(len(x), size=batch_size)
            model.train_on_batch(x[rows], y[rows])
            on_step()
        gradients.append(flat(start) - flat(model.get_weights()))
        model.set_weights(start)
    return float(np.var(gradients, axis=0, ddof=1).sum())


def rows_in_order(epochs: int, large_batch: int) -> Iterator[np.ndarray]:
    """Yields the rows of each large batch; the order is each epoch's own."""
    rows = len(digits()[0])
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(rows)
        yield from order[: rows // large_batch * large_batch].reshape(-1, large_batch)


def train(way: Way, epochs: int, large_batch: int, on_step: Callable[[], None]) -> Result:
    """Trains a new network in one way."""
    x, y = digits()
    model = compiled_model(way.rate, way.accumulation_steps)
    losses = []
    for rows in rows_in_order(epochs, large_batch):
        for part in rows.reshape(-1, way.batch_size):
            model.train_on_batch(x[part], y[part])
        losses.append(float(model.test_on_batch(x, y)))
        on_step()
    return Result(losses, int(model.optimizer.iterations), flat(model.get_weights()))


def four_ways(chosen: argparse.Namespace) -> list[Way]:
    """Lists the ways; the first is the one that the others are measured against."""
    small, steps = chosen.micro_batch_size, chosen.accumulation_steps
    rate = chosen.rate
    scaled = keras_ga.scale_learning_rate(rate, steps)
    return [
        Way(f"{small * steps} rows, rate {scaled:g}", small * steps, None, scaled),
        Way(f"{steps} x {small} accumulated, rate {scaled:g}", small, steps, scaled),
        Way(f"{steps} x {small} accumulated, rate {rate:g}", small, steps, rate),
        Way(f"{small} rows, rate {rate:g}", small, None, rate),
    ]


def measure(chosen: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Measures the variances, trains in all ways, and returns the figures."""
    task = progress.add_task("variance", total=sum(WINDOWS) * chosen.windows)
    variances = [
        gradient_variance(
            steps, chosen.windows, chosen.micro_batch_size, lambda: progress.advance(task)
        )
        for steps in WINDOWS
    ]
    ways, results = four_ways(chosen), []
    large_batch = ways[0].batch_size
    large_batches = len(digits()[0]) // large_batch * chosen.epochs
    for way in ways:
        task = progress.add_task(way.name, total=large_batches)
        advance = lambda task=task: progress.advance(task)  # noqa: E731
        results.append(train(way, chosen.epochs, large_batch, advance))
    return {
        "windows": list(WINDOWS),
        "variances": variances,
        "slope": float(np.polyfit(np.log(WINDOWS), np.log(variances), 1)[0]),
        "ways": [
            {
                "name": way.name,
                "updates": result.updates,
                "losses": result.losses,
                "difference": float(np.abs(result.weights - results[0].weights).max()),
            }
            for way, result in zip(ways, results, strict=True)
        ],
    }


def verdict(figures: dict[str, Any]) -> str:
    """Says in one sentence what the figures show."""
    _, accumulated, *_, small = (way["difference"] for way in figures["ways"])
    return (
        f"The gradient's variance goes with N to the power of {figures['slope']:.2f}; accumulated "
        f"is {accumulated:.0e} from the large batch, small steps are {small:.1g}."
    )


def report(console: Console, figures: dict[str, Any]) -> None:
    """Prints the figures in two tables."""
    table = Table("N", "variance of the gradient", "times N")
    for steps, variance in zip(figures["windows"], figures["variances"], strict=True):
        table.add_row(str(steps), f"{variance:.4f}", f"{variance * steps:.4f}")
    console.print(table)
    table = Table("way", "updates", "loss", "largest difference")
    for way in figures["ways"]:
        loss = f"{way['losses'][-1]:.4f}"
        table.add_row(way["name"], str(way["updates"]), loss, f"{way['difference']:.1e}")
    console.print(table)
    console.print(verdict(figures))


def draw_picture(figures: dict[str, Any], large_batch: int, path: Path) -> None:
    """Draws the variances on the left and the losses on the right."""
    windows, variances = figures["windows"], figures["variances"]
    law = [variances[0] / steps for steps in windows]
    styles = (
        REFERENCE,
        DASHED,
        {"color": GREEN, "linewidth": 1.5},
        {"color": VERMILION, "linewidth": 1.5},
    )
    losses = []
    for way, style in zip(figures["ways"], styles, strict=True):
        seen = (np.arange(len(way["losses"])) + 1) * large_batch
        losses.append(Line(way["name"], seen, way["losses"], style))
    measured = {"color": PURPLE, "marker": "o", "linewidth": 0, "clip_on": False}
    left = Panel(
        "Variance of the accumulated gradient",
        "micro-batches in a window, N",
        [
            Line("1/N", windows, law, {"color": GREY, "linewidth": 1}),
            Line("measured", windows, variances, measured),
        ],
        ("log", "log"),
    )
    right = Panel("Loss on all rows", "rows seen", losses, ("linear", "log"))
    draw("Accumulation is not a smaller learning rate", verdict(figures), [left, right], path)


def options() -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    output = Path(__file__).parent / "output" / "learning_rate.png"
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="passes over the rows (%(default)s)")
    add("--micro-batch-size", type=int, default=16, help="the small batch (%(default)s)")
    add("--accumulation-steps", type=int, default=16, help="small batches of a large (%(default)s)")
    add("--rate", type=float, default=0.05, help="the small batch's rate (%(default)s)")
    add("--windows", type=int, default=100, help="windows to take a variance of (%(default)s)")
    add("--picture", type=Path, default=output, help="(examples/output/learning_rate.png)")
    add("--json", type=Path, help="also write all figures to this file")
    chosen = parser.parse_args()
    for name, least in (
        ("epochs", 1),
        ("micro_batch_size", 1),
        ("accumulation_steps", 1),
        ("windows", 2),
    ):
        if (value := getattr(chosen, name)) < least:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} must be at least {least}. Received: {value}")
    rows, large_batch = len(digits()[0]), chosen.micro_batch_size * chosen.accumulation_steps
    if large_batch > rows:
        parser.error(
            f"--micro-batch-size times --accumulation-steps must be at most {rows}, the rows that "
            f"there are. Received: {large_batch}"
        )
    return chosen


def main() -> None:
    """Measures and shows."""
    chosen = options()
    console = Console(highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        figures = measure(chosen, progress)
    report(console, figures)
    draw_picture(figures, chosen.micro_batch_size * chosen.accumulation_steps, chosen.picture)
    console.print(f"Picture: {chosen.picture}", soft_wrap=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
