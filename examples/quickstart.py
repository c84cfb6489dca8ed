"""Gradient accumulation, shown: the large batch's weights from small batches.

One small network is trained four times from the same initial weights on the same rows in the
same order:

1. on the batch that you want (128 rows);
2. on the batch that fits (16 rows), alone;
3. on the batch that fits, with Keras's option `gradient_accumulation_steps=8`;
4. on the batch that fits, with `keras_ga.GradientAccumulationOptimizer`.

The recipe is the same in all four, the one that was made for the large batch: AdamW with weight
decay, a cosine decay over the large batch's updates, an exponential moving average (EMA) of the
weights. In way 2 every small batch is an update; in way 3 the schedule and the EMA go by small
batches too. So in both the learning rate is down to zero after an eighth of the training. (With
eight times the `decay_steps`, way 3 ends about 1e-3 from the large batch, and way 2 is as good a
training as any, but another one.) Way 4 takes the recipe as it is, and stays on the large
batch's path to float32 rounding.

Run it (no network is needed; about a minute on two cores):

    pip install -e ".[tensorflow,examples]"
    python examples/quickstart.py

It prints one table and draws `examples/output/quickstart.png`. `--help` lists the options;
`KERAS_BACKEND=jax` or `torch` runs the training there (torch takes minutes on a CPU).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from quickstart_data import SOURCES, DataError, Rows, load, silence
from quickstart_report import draw_picture, print_table, verdict
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
with silence():
    import keras

    import keras_ga


@dataclass(frozen=True)
class Way:
    """One way to train: its name, the rows in a step and what makes its optimizer."""

    name: str
    batch_size: int
    make_optimizer: Callable[[], keras.optimizers.Optimizer]


@dataclass(frozen=True)
class Result:
    """What training in one way came to; `losses` and `path` have an entry per large batch."""

    way: Way
    updates: int
    seconds_per_epoch: float
    loss: float
    accuracy: float
    losses: np.ndarray
    path: np.ndarray
    final_weights: np.ndarray


class Recorder(keras.callbacks.Callback):
    """Notes the mean loss and the weights each time a large batch's rows have been seen."""

    def __init__(self, steps_per_large_batch: int, on_record: Callable[[], None]) -> None:
        """Takes the steps that make a large batch, and what to call after each of these."""
        super().__init__()
        self.steps_per_large_batch = steps_per_large_batch
        self.on_record = on_record
        self.losses: list[float] = []
        self.path: list[np.ndarray] = []
        self.epoch_seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Starts the epoch's clock and its sum of losses."""
        self._start = time.perf_counter()
        self._loss_sum = 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Takes the large batch's loss out of the running mean of the epoch, which Keras logs."""
        large_batches, rest = divmod(batch + 1, self.steps_per_large_batch)
        if rest:
            return
        loss_sum = logs["loss"] * large_batches
        self.losses.append(loss_sum - self._loss_sum)
        self._loss_sum = loss_sum
        self.path.append(flat_weights(self.model))
        self.on_record()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Stops the epoch's clock."""
        self.epoch_seconds.append(time.perf_counter() - self._start)


def flat_weights(model: keras.Model) -> np.ndarray:
    """Returns a model's trainable weights in one vector."""
    weights = model.trainable_variables
    return np.concatenate([keras.ops.convert_to_numpy(weight).ravel() for weight in weights])


def build_model(image_shape: Sequence[int], seed: int) -> keras.Model:
    """Builds the network, with the same initial weights for the same seed.

    GroupNormalization looks at one row at a time: with BatchNormalization, a row's output would
    depend on the other rows of its batch. The activation is smooth: with ReLU, rounding now and
    then puts a unit on the other side of the kink, and Adam makes up to 1e-2 of that here.
    """
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input(image_shape), keras.layers.Rescaling(1 / 255)])
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        model.add(keras.layers.Conv2D(filters, 3, strides, padding="same", use_bias=False))
        model.add(keras.layers.GroupNormalization(filters // 4))
        model.add(keras.layers.Activation("silu"))
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(10))
    return model


def recipe(updates: int, **options: Any) -> keras.optimizers.Optimizer:
    """Makes the optimizer that all four ways share, for so many updates of the large batch."""
    return keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(5e-3, decay_steps=updates),
        weight_decay=1e-2,
        use_ema=True,
        ema_momentum=0.9,
        **options,
    )


def four_ways(batch_size: int, micro_batch_size: int, updates: int) -> list[Way]:
    """Lists the ways; the first is the one that the others are measured against."""
    steps = batch_size // micro_batch_size
    return [
        Way(f"batch of {batch_size}", batch_size, lambda: recipe(updates)),
        Way(f"batch of {micro_batch_size} alone", micro_batch_size, lambda: recipe(updates)),
        Way(
            f"{steps} x {micro_batch_size}, Keras built-in",
            micro_batch_size,
            lambda: recipe(updates, gradient_accumulation_steps=steps),
        ),
        Way(
            f"{steps} x {micro_batch_size}, keras_ga",
            micro_batch_size,
            lambda: keras_ga.GradientAccumulationOptimizer(
                recipe(updates), accumulation_steps=steps
            ),
        ),
    ]


def train(
    way: Way, rows: Rows, options: argparse.Namespace, on_record: Callable[[], None]
) -> Result:
    """Trains a new network in one way and measures it with the weights that `fit` ends on.

    These are the EMA's, which Keras puts in place of the last update's when `fit` ends.
    """
    model = build_model(rows.train.element_spec[0].shape, options.seed)
    optimizer = way.make_optimizer()
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=objective, metrics=["accuracy"])
    recorder = Recorder(options.batch_size // way.batch_size, on_record)

    # The seed gives every way the same order, a new one in each epoch; only full large batches
    # are taken, so that a window never spans two epochs.
    kept_rows = rows.train_rows // options.batch_size * options.batch_size
    shuffled = rows.train.cache().shuffle(rows.train_rows, seed=options.seed).take(kept_rows)
    batches = shuffled.batch(way.batch_size).prefetch(2)
    model.fit(batches, epochs=options.epochs, shuffle=False, callbacks=[recorder], verbose=0)

    loss, _ = model.evaluate(rows.train.batch(500), verbose=0)
    _, accuracy = model.evaluate(rows.validation.batch(500), verbose=0)
    return Result(
        way=way,
        updates=int(optimizer.iterations),
        # The first epoch also traces the training step.
        seconds_per_epoch=float(np.median(recorder.epoch_seconds[1:] or recorder.epoch_seconds)),
        loss=loss,
        accuracy=accuracy,
        losses=np.array(recorder.losses),
        path=np.array(recorder.path),
        final_weights=flat_weights(model),
    )


def compare(results: Sequence[Result]) -> dict[str, Any]:
    """Measures every way against the first, and puts all the figures in one dictionary."""
    reference = results[0]
    ways = [
        {
            "name": result.way.name,
            "updates": result.updates,
            "seconds_per_epoch": result.seconds_per_epoch,
            "loss": result.loss,
            "accuracy": result.accuracy,
            "difference": float(np.abs(result.final_weights - reference.final_weights).max()),
            "losses": result.losses.tolist(),
            "differences": np.abs(result.path - reference.path).max(axis=1).tolist(),
        }
        for result in results
    ]
    return {"ways": ways, "verdict": verdict(ways)}


def parse_options() -> argparse.Namespace:
    """Reads the command line and refuses sizes that can't be compared."""
    parser = argparse.ArgumentParser(
        description="Train one network in four ways (the large batch, the small batch alone, with "
        "Keras's built-in gradient accumulation, and with keras_ga) and see which of them end on "
        "the large batch's weights."
    )
    cache = Path(os.environ.get("KERAS_GA_CACHE", "~/.cache/keras_ga")).expanduser()
    output = Path(__file__).parent / "output" / "quickstart.png"
    add = parser.add_argument
    add("--dataset", choices=SOURCES, default="digits", help="%(default)s; others are downloaded")
    add("--data-dir", type=Path, default=cache, help="where datasets are kept (%(default)s)")
    add("--epochs", type=int, help="passes over the training rows (15 for digits, else 2)")
    add("--batch-size", type=int, default=128, help="the batch that you want (%(default)s)")
    add("--micro-batch-size", type=int, default=16, help="the batch that fits (%(default)s)")
    add("--seed", type=int, default=0, help="of initial weights and order of rows (%(default)s)")
    add("--output", type=Path, default=output, help="the picture (examples/output/quickstart.png)")
    add("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    if options.epochs is None:
        options.epochs = 15 if options.dataset == "digits" else 2
    if options.epochs < 1:
        parser.error(f"--epochs must be at least 1. Received: {options.epochs}")
    sizes = [size for size in range(1, options.batch_size) if options.batch_size % size == 0]
    if options.micro_batch_size not in sizes:
        parser.error(
            f"--micro-batch-size must divide --batch-size {options.batch_size} into two or more "
            f"equal parts, because these make its window. Take one of "
            f"{', '.join(map(str, sizes))}. Received: {options.micro_batch_size}"
        )
    return options


def main() -> None:
    """Trains in the four ways and shows how they compare."""
    options = parse_options()
    console = Console(highlight=False)
    console.print(f"Reading {options.dataset} from {options.data_dir} ...", soft_wrap=True)
    try:
        rows = load(options.dataset, options.data_dir, at_least=options.batch_size)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    updates = rows.train_rows // options.batch_size * options.epochs
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    results = []
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        for way in four_ways(options.batch_size, options.micro_batch_size, updates):
            task = progress.add_task(way.name, total=updates)
            results.append(train(way, rows, options, partial(progress.advance, task)))

    figures = compare(results)
    print_table(console, figures["ways"])
    console.print(figures["verdict"])
    draw_picture(figures, f"{options.dataset}: four ways to train one network", options.output)
    console.print(f"Picture: {options.output}", soft_wrap=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
