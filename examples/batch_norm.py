"""BatchNormalization under gradient accumulation: what each way of handling it comes to.

In training, BatchNormalization normalises by the batch that it sees, and in evaluation by running
statistics that move a little with every batch seen. Accumulation shows it small batches, many of
them. One small residual network is trained from the same initial weights, on the same rows in the
same order, in these ways:

1. on the batch that you want (128 rows);
2. on 16 batches of 8 per update, with Keras's layers as they are: "alone";
3. the same network once more, its statistics taken anew by `keras_ga.batch_norm.recalibrate`;
4. with the momentum of each layer adjusted, by `keras_ga.batch_norm.adjust_momentum`;
5. with statistics that are pooled over a window, by `keras_ga.batch_norm.convert`;
6. with GroupNormalization, by `keras_ga.batch_norm.replace_with_group_norm`.

The first BatchNormalization layer is on the pixels, which are the same in all ways: there pooled
statistics equal those of the large batch. Deeper layers see what the layers before them made of
each small batch, and weights that have been trained so. No rule for running statistics undoes
that, and ways 2, 4 and 5 end on the same weights.

The default momentum is Keras's own, 0.99, made for thousands of updates. This training has 88, and
0.99^88 = 41 % of the large batch's statistics are still what they were before it. The ways that
follow the large batch follow it there too, and that costs them most of their accuracy in
evaluation; 1,408 small batches, or a recalibration, forget the start. With `--momentum 0.9` the
large batch does not lag, and all ways with BatchNormalization are about as accurate.

Run it (no network is needed; about a minute and a half on two cores):

    pip install -e ".[tensorflow,examples]"
    python examples/batch_norm.py

It prints one table and draws `examples/output/batch_norm.png`. `--help` lists the options;
`KERAS_BACKEND=jax` or `torch` runs the training there (torch takes minutes on a CPU).
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from batch_norm_report import draw_picture, print_table, verdict
from quickstart_data import SOURCES, DataError, Rows, load, silence
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
with silence():
    import keras

    import keras_ga

# The advice to use the tools that are shown here.
warnings.filterwarnings("ignore", message="The model has BatchNormalization")

LARGE, ALONE, RECALIBRATED = "large batch", "alone", "alone, recalibrated"
ADJUSTED, POOLED, GROUPS = "momentum adjusted", "pooled statistics", "GroupNormalization"


@dataclass(frozen=True)
class Way:
    """One way to train; `prepare` gets the built model and N, and returns the model to train."""

    name: str
    accumulates: bool
    prepare: Callable[[keras.Model, int], keras.Model]


@dataclass(frozen=True)
class Result:
    """What training in one way came to; `variances` has the running one of each layer."""

    name: str
    updates: int
    accuracy: float
    variances: list[np.ndarray]
    weights: np.ndarray


class Advance(keras.callbacks.Callback):
    """Moves the progress bar on by a batch."""

    def __init__(self, on_batch: Callable[[], None]) -> None:
        """Takes what to call after each batch."""
        super().__init__()
        self.on_batch = on_batch

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Says that a batch is done."""
        self.on_batch()


def convolution(x: Any, filters: int, size: int, strides: int, momentum: float) -> Any:
    """Adds a convolution and its BatchNormalization."""
    x = keras.layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
    return keras.layers.BatchNormalization(momentum=momentum)(x)


def block(x: Any, filters: int, strides: int, momentum: float) -> Any:
    """Adds a residual block, with a convolution in the shortcut where the shape changes."""
    y = keras.layers.ReLU()(convolution(x, filters, 3, strides, momentum))
    y = convolution(y, filters, 3, 1, momentum)
    if strides > 1:
        x = convolution(x, filters, 1, strides, momentum)
    return keras.layers.ReLU()(keras.layers.Add()([x, y]))


def build_model(image_shape: Sequence[int], momentum: float, seed: int) -> keras.Model:
    """Builds the network, with the same initial weights for the same seed."""
    keras.utils.set_random_seed(seed)
    image = keras.Input(image_shape)
    x = keras.layers.Rescaling(1 / 255)(image)
    x = keras.layers.BatchNormalization(momentum=momentum)(x)
    x = keras.layers.ReLU()(convolution(x, 16, 3, 1, momentum))
    x = block(x, 16, 1, momentum)
    x = block(x, 32, 2, momentum)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, keras.layers.Dense(10)(x))


def as_it_is(model: keras.Model, accumulation_steps: int) -> keras.Model:
    """Leaves Keras's layers alone."""
    return model


def adjusted(model: keras.Model, accumulation_steps: int) -> keras.Model:
    """Gives each layer the momentum that forgets per window as it did per step."""
    keras_ga.batch_norm.adjust_momentum(model, accumulation_steps)
    return model


def pooled(model: keras.Model, accumulation_steps: int) -> keras.Model:
    """Turns each layer into one that moves its running statistics once per window."""
    keras_ga.batch_norm.convert(model, accumulation_steps)
    return model


def group_norm(model: keras.Model, accumulation_steps: int) -> keras.Model:
    """Makes it another network; one group, because the layer on grey pixels has one channel."""
    return keras_ga.batch_norm.replace_with_group_norm(model, groups=1)


WAYS = (
    Way(LARGE, False, as_it_is),
    Way(ALONE, True, as_it_is),
    Way(ADJUSTED, True, adjusted),
    Way(POOLED, True, pooled),
    Way(GROUPS, True, group_norm),
)


def train(
    way: Way, rows: Rows, options: argparse.Namespace, on_batch: Callable[[], None]
) -> keras.Model:
    """Trains a new network in one way."""
    steps = options.batch_size // options.micro_batch_size
    model = build_model(rows.train.element_spec[0].shape, options.momentum, options.seed)
    model = way.prepare(model, steps)
    optimizer = keras.optimizers.Adam(2e-3)
    if way.accumulates:
        optimizer = keras_ga.GradientAccumulationOptimizer(optimizer, accumulation_steps=steps)
    objective = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=objective, metrics=["accuracy"])

    # The seed gives every way the same order, a new one in each epoch; only full large batches
    # are taken, so that a window never spans two epochs.
    kept_rows = rows.train_rows // options.batch_size * options.batch_size
    shuffled = rows.train.cache().shuffle(rows.train_rows, seed=options.seed).take(kept_rows)
    size = options.micro_batch_size if way.accumulates else options.batch_size
    batches = shuffled.batch(size).prefetch(2)
    advance = Advance(on_batch)
    model.fit(batches, epochs=options.epochs, shuffle=False, callbacks=[advance], verbose=0)
    return model


def measure(name: str, model: keras.Model, rows: Rows) -> Result:
    """Evaluates a trained network and takes out what the ways are compared by."""
    _, accuracy = model.evaluate(rows.validation.batch(500), verbose=0)
    layers = [x for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]
    weights = [keras.ops.convert_to_numpy(weight).ravel() for weight in model.trainable_variables]
    return Result(
        name=name,
        updates=int(model.optimizer.iterations),
        accuracy=accuracy,
        variances=[keras.ops.convert_to_numpy(layer.moving_variance) for layer in layers],
        weights=np.concatenate(weights),
    )


def relative_error(values: Sequence[np.ndarray], references: Sequence[np.ndarray]) -> float | None:
    """The mean absolute difference over all channels, as a share of the mean; None without any."""
    if not values:
        return None
    ours, reference = np.concatenate(values), np.concatenate(references)
    return float(np.abs(ours - reference).mean() / reference.mean())


def compare(results: Sequence[Result], momentum: float) -> dict[str, Any]:
    """Measures every way against the first, and puts all the figures in one dictionary."""
    large = results[0]
    ways = [
        {
            "name": result.name,
            "updates": result.updates,
            "first_layer_error": relative_error(result.variances[:1], large.variances[:1]),
            "deeper_layers_error": relative_error(result.variances[1:], large.variances[1:]),
            "accuracy": result.accuracy,
        }
        for result in results
    ]
    weights = {result.name: result.weights for result in results}
    differences = [np.abs(weights[name] - weights[ALONE]).max() for name in (ADJUSTED, POOLED)]
    return {
        "momentum": momentum,
        "initial_statistics_left": momentum**large.updates,
        "ways": ways,
        "largest_weight_difference": float(max(differences)),
        "verdict": verdict({way["name"]: way for way in ways}),
    }


def parse_options() -> argparse.Namespace:
    """Reads the command line and refuses sizes that can't be compared."""
    parser = argparse.ArgumentParser(
        description="Train one network with BatchNormalization on the large batch and, by gradient "
        "accumulation, on small ones: with its layers as they are, recalibrated, with the momentum "
        "adjusted, with pooled statistics, with GroupNormalization. See how far the running "
        "variance ends from the large batch's, and the validation accuracy."
    )
    cache = Path(os.environ.get("KERAS_GA_CACHE", "~/.cache/keras_ga")).expanduser()
    output = Path(__file__).parent / "output" / "batch_norm.png"
    add = parser.add_argument
    add("--dataset", choices=SOURCES, default="digits", help="%(default)s; others are downloaded")
    add("--data-dir", type=Path, default=cache, help="where datasets are kept (%(default)s)")
    add("--momentum", type=float, default=0.99, help="of BatchNormalization (%(default)s)")
    add("--epochs", type=int, help="passes over the training rows (8 for digits, else 1)")
    add("--batch-size", type=int, default=128, help="the batch that you want (%(default)s)")
    add("--micro-batch-size", type=int, default=8, help="the batch that fits (%(default)s)")
    add("--seed", type=int, default=0, help="of initial weights and order of rows (%(default)s)")
    add("--output", type=Path, default=output, help="the picture (examples/output/batch_norm.png)")
    add("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    if options.epochs is None:
        options.epochs = 8 if options.dataset == "digits" else 1
    if options.epochs < 1:
        parser.error(f"--epochs must be at least 1. Received: {options.epochs}")
    if not 0 < options.momentum < 1:
        parser.error(f"--momentum must be between 0 and 1. Received: {options.momentum}")
    sizes = [size for size in range(2, options.batch_size) if options.batch_size % size == 0]
    if options.micro_batch_size not in sizes:
        parser.error(
            f"--micro-batch-size must divide --batch-size {options.batch_size} into two or more "
            f"equal parts of two or more rows, because a row alone has no variance. Take one of "
            f"{', '.join(map(str, sizes))}. Received: {options.micro_batch_size}"
        )
    return options


def main() -> None:
    """Trains in all ways and shows how they compare."""
    options = parse_options()
    console = Console(highlight=False)
    console.print(f"Reading {options.dataset} from {options.data_dir} ...", soft_wrap=True)
    try:
        rows = load(options.dataset, options.data_dir, at_least=options.batch_size)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    updates = rows.train_rows // options.batch_size * options.epochs
    steps = options.batch_size // options.micro_batch_size
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    results = []
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        for way in WAYS:
            total = updates * steps if way.accumulates else updates
            task = progress.add_task(way.name, total=total)
            model = train(way, rows, options, partial(progress.advance, task))
            results.append(measure(way.name, model, rows))
            if way.name == ALONE:
                # Forward alone takes little memory, so the large batch fits here.
                batches = rows.train.batch(options.batch_size)
                keras_ga.batch_norm.recalibrate(model, batches, verbose=0)
                results.append(measure(RECALIBRATED, model, rows))

    figures = compare(results, options.momentum)
    print_table(console, figures)
    console.print(figures["verdict"])
    window = f"{steps} x {options.micro_batch_size} rows"
    title = f"{options.dataset}: BatchNormalization when {window} make an update"
    draw_picture(figures, title, options.output)
    console.print(f"Picture: {options.output}", soft_wrap=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
