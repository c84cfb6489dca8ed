"""Measures how far the built-in option and keras_ga end from the large batch, case by case.

Each case trains the same small model three times from the same start, on the same rows: with
the bare optimizer on the large batch, with Keras's `gradient_accumulation_steps` on micro-batches,
and with keras_ga on micro-batches. The figure is the largest difference of any weight after
training, divided by the largest distance that any weight moved.

Run it with `python benchmarks/correctness.py`; `--json PATH` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_ga

STEPS, MICRO_BATCH, EPOCHS = 4, 8, 4
LARGE_BATCH = STEPS * MICRO_BATCH
ROWS = 4 * LARGE_BATCH

Make = Callable[..., keras.optimizers.Optimizer]


def schedule(count: int = EPOCHS * ROWS // LARGE_BATCH) -> Any:
    """A cosine over the run's updates, or over another count of steps."""
    return keras.optimizers.schedules.CosineDecay(0.1, decay_steps=count)


def with_lengthened_schedule(**arguments: Any) -> keras.optimizers.Optimizer:
    """A cosine over what the optimizer asks it with: Keras's option, with micro-batches."""
    count = EPOCHS * ROWS // LARGE_BATCH * arguments.get("gradient_accumulation_steps", 1)
    return sgd(learning_rate=schedule(count), **arguments)


def sgd(**arguments: Any) -> keras.optimizers.Optimizer:
    """SGD with momentum."""
    return keras.optimizers.SGD(**{"learning_rate": 0.05, "momentum": 0.9, **arguments})


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a small regression."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 8)).astype("float32")
    return x, np.sin(x @ rng.normal(size=(8, 4))).astype("float32")


def model(**layer: Any) -> keras.Model:
    """Two dense layers, from the same start each time."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh", **layer),
            keras.layers.Dense(4, **layer),
        ]
    )


def trained(
    optimizer: keras.optimizers.Optimizer,
    batch_size: int,
    rows: int = ROWS,
    flush: bool = False,
    **layer: Any,
) -> list[np.ndarray]:
    """The weights after training on the rows in order."""
    net = model(**layer)
    net.compile(optimizer=optimizer, loss="mse")
    callbacks = []
    if flush:
        callbacks.append(
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: optimizer.flush())
        )
    net.fit(
        *data(rows),
        batch_size=batch_size,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return net.get_weights()


def distances(
    make: Make, rows: int = ROWS, flush: bool = False, **layer: Any
) -> tuple[float, float]:
    """(built-in, keras_ga): distance from the large batch relative to the distance moved."""
    start = model(**layer).get_weights()
    large = trained(make(), LARGE_BATCH, rows, **layer)
    moved = max(np.abs(a - b).max() for a, b in zip(large, start, strict=True))

    def distance(weights: list[np.ndarray]) -> float:
        return float(max(np.abs(a - b).max() for a, b in zip(weights, large, strict=True)) / moved)

    built_in = trained(make(gradient_accumulation_steps=STEPS), MICRO_BATCH, rows, **layer)
    wrapped = keras_ga.GradientAccumulationOptimizer(make(), STEPS)
    ours = trained(wrapped, MICRO_BATCH, rows, flush=flush, **layer)
    return distance(built_in), distance(ours)


def bfloat16_sum() -> tuple[float, float]:
    """1,024 gradients of one into a bfloat16 variable: relative error of the mean."""
    results = []
    for wrap in (
        lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=1024),
        lambda: keras_ga.GradientAccumulationOptimizer(keras.optimizers.SGD(1.0), 1024),
    ):
        variable = keras.Variable(np.zeros(1), dtype="bfloat16")
        optimizer = wrap()
        one = keras.ops.ones((1,), dtype="bfloat16")
        for _ in range(1024):
            optimizer.apply([one], [variable])
        moved = -float(np.array(keras.ops.convert_to_numpy(variable.value), "float32")[0])
        results.append(abs(moved - 1.0))
    return results[0], results[1]


def unequal_micro_batches() -> tuple[float, float]:
    """Micro-batches of 1, 2, 8 and 21 valid rows, in a custom loop: error of the gradient."""
    valid = [1, 2, 8, 21]
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(n, 4)).astype("float32") for n in valid]
    truth = np.concatenate(parts).mean(axis=0)
    results = []
    for optimizer, weighted in (
        (keras.optimizers.SGD(1.0, gradient_accumulation_steps=STEPS), False),
        (keras_ga.GradientAccumulationOptimizer(keras.optimizers.SGD(1.0), STEPS), True),
    ):
        variable = keras.Variable(np.zeros(4, "float32"))
        for part in parts:
            gradient = keras.ops.convert_to_tensor(part.mean(axis=0))
            if weighted:
                optimizer.apply([gradient], [variable], weight=len(part))
            else:
                optimizer.apply([gradient], [variable])
        found = -np.array(keras.ops.convert_to_numpy(variable.value))
        results.append(float(np.abs(found - truth).max() / np.abs(truth).max()))
    return results[0], results[1]


CASES: dict[str, Callable[[], tuple[float, float]]] = {
    "plain SGD with momentum": lambda: distances(sgd),
    "learning-rate schedule": lambda: distances(lambda **kw: sgd(learning_rate=schedule(), **kw)),
    "the same, with `decay_steps` multiplied by N for Keras's option": lambda: distances(
        with_lengthened_schedule
    ),
    "EMA of the weights": lambda: distances(lambda **kw: sgd(use_ema=True, ema_momentum=0.9, **kw)),
    "kernel constraint": lambda: distances(sgd, kernel_constraint=keras.constraints.MaxNorm(0.5)),
    "a last window that is short (flushed)": lambda: distances(
        sgd, rows=ROWS + 2 * MICRO_BATCH, flush=True
    ),
    "micro-batches of unequal size (weights, in a loop)": unequal_micro_batches,
    "bfloat16 weights, N = 1,024": bfloat16_sum,
}


def main() -> None:
    """Prints the table, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    print("| | Keras's built-in option | keras_ga |\n|---|---|---|")
    figures = {}
    for name, measure in CASES.items():
        built_in, ours = measure()
        figures[name] = {"built_in": built_in, "keras_ga": ours}
        print(f"| {name} | {built_in:.1e} | {ours:.1e} |")
    print(f"\nKeras {keras.__version__}, backend {keras.config.backend()}.")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
