"""The batch that the recipe asks for, worked through in micro-batches that fit: `split_batches`.

A small conv net is trained on scikit-learn's digits three times from one
start: in batches of 128; in batches of 128, split into micro-batches; and in batches of a
micro-batch's size, which is another training. `fit` is the same each time. The table shows how far
each ends from the first, and what a step takes of memory on JAX, where the compiler tells.

With "auto" the size is found: on JAX it is planned within `--memory-limit`, elsewhere it is tried.

    python examples/split_batches.py
    KERAS_BACKEND=jax python examples/split_batches.py --micro-batch auto --memory-limit 2
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits

import keras_ga

BATCH = 128


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images (1664, 8, 8, 1) between 0 and 1, and their digits."""
    images, labels = load_digits(return_X_y=True)
    rows = len(images) // BATCH * BATCH
    return (images[:rows].reshape(-1, 8, 8, 1) / 16).astype("float32"), labels[:rows]


def cifar10() -> tuple[np.ndarray, np.ndarray]:
    """The real thing, downloaded by `tfds.load`: images (32, 32, 3)."""
    import tensorflow_datasets as tfds

    images, labels = tfds.as_numpy(
        tfds.load("cifar10", split="train", batch_size=-1, as_supervised=True)
    )
    return images.astype("float32") / 255, labels.astype("int64")


def model(shape: tuple[int, ...], seed: int) -> keras.Model:
    """A conv net, from the same start for the same seed; GroupNormalization sees rows alone."""
    keras.utils.set_random_seed(seed)
    network = keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Conv2D(16, 3, padding="same", activation="silu"),
            keras.layers.Conv2D(16, 3, padding="same", activation="silu"),
            keras.layers.GroupNormalization(4),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(optimizer=keras.optimizers.AdamW(3e-3), loss=loss, metrics=["accuracy"])
    return network


class Bar(keras.callbacks.Callback):
    """Moves a progress bar by a batch."""

    def __init__(self, progress: Progress, task: Any):
        super().__init__()
        self._progress, self._task = progress, task

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Called by `fit`."""
        self._progress.advance(self._task)


def weights(network: keras.Model) -> np.ndarray:
    """All weights of a model in a row."""
    return np.concatenate([np.ravel(value) for value in network.get_weights()])


def main() -> None:
    """Trains three times and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batch", default="16", help="rows, or auto (16)")
    parser.add_argument("--memory-limit", type=float, help="MiB to plan for (JAX, with auto)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--cifar10", action="store_true", help="train on CIFAR-10 (a download)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    micro: int | str = arguments.micro_batch
    if micro != "auto" and not (micro.isdigit() and 0 < int(micro) <= BATCH):
        parser.error(f"--micro-batch must be 1 to {BATCH}, or auto. Received: {micro}")
    micro = micro if micro == "auto" else int(micro)
    limit = arguments.memory_limit and int(arguments.memory_limit * 2**20)
    x, y = cifar10() if arguments.cifar10 else digits()
    start = weights(model(x.shape[1:], arguments.seed))

    found = None
    if micro == "auto":
        network = model(x.shape[1:], arguments.seed)
        found = keras_ga.find_micro_batch_size(
            network, x, y, batch_size=BATCH, memory_limit=limit
        ).micro_batch_size
    small = found or (micro if isinstance(micro, int) else BATCH)
    sides = {
        "whole batches": (BATCH, None),
        f"split, {micro if found is None else f'auto: {found}'}": (BATCH, micro),
        f"batches of {small}": (small, None),
    }
    figures: dict[str, dict[str, float]] = {}
    reached = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name, (batch_size, split) in sides.items():
            network = model(x.shape[1:], arguments.seed)
            if split:
                keras_ga.split_batches(network, split, memory_limit=limit)
            task = progress.add_task(name, total=arguments.epochs * -(-len(x) // batch_size))
            history = network.fit(
                x,
                y,
                batch_size=batch_size,
                epochs=arguments.epochs,
                shuffle=False,
                verbose=0,
                callbacks=[Bar(progress, task)],
            ).history
            reached[name] = weights(network)
            figures[name] = {
                "rows": batch_size,
                "updates": int(network.optimizer.iterations),
                "loss": history["loss"][-1],
                "accuracy": history["accuracy"][-1],
            }
    whole = reached["whole batches"]
    table = Table("", "updates", "loss", "accuracy", "away from whole batches")
    for name, figure in figures.items():
        moved = float(np.abs(whole - start).max())
        figure["difference"] = float(np.abs(reached[name] - whole).max()) / moved
        loss, accuracy = f"{figure['loss']:.4f}", f"{figure['accuracy']:.3f}"
        table.add_row(
            name, f"{figure['updates']}", loss, accuracy, f"{figure['difference']:.1e} of the way"
        )
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(list(figures.values()), indent=2) + "\n")


if __name__ == "__main__":
    main()
