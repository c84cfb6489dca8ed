"""A training loop of one's own on torch, with accumulation, token weights and checkpoints.

A micro-step is `backward`, then `optimizer.apply`. A micro-batch counts for as much as it has valid
tokens, the window that is short at an epoch's end is flushed, and the file of `model.save` has all
that it takes to go on, in mid-window too. The weights are compared with those that the bare
optimizer makes of whole batches; so are those of micro-batches that all count alike.

    python examples/custom_loop_torch.py
    python examples/custom_loop_torch.py --checkpoint latest.keras --stop-after 99
    python examples/custom_loop_torch.py --checkpoint latest.keras   # goes on from there
"""

from __future__ import annotations

import argparse
import json
import os
from functools import cache
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import torch
from rich.progress import track
from sklearn.datasets import load_digits

import keras_ga

SEQUENCES, MICRO_BATCH, STEPS = 1797, 12, 4  # in all, in a micro-batch; micro-batches in a window
PER_EPOCH = -(-SEQUENCES // MICRO_BATCH)  # micro-steps; the last one sees fewer sequences


@cache
def sequences() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns rows of pixels of the digits, the rows that follow, and 1 for those that count."""
    images = load_digits().images.astype("float32") / 16
    lengths = np.random.default_rng(0).geometric(0.4, size=len(images))  # many are short
    valid = np.arange(7) < lengths[:, None]
    return images[:, :-1], images[:, 1:], valid.astype("float32")


def batch(step: int, size: int) -> list[np.ndarray]:
    """Returns what a step sees: the order of the sequences is the epoch's own."""
    epoch, place = divmod(step, -(-SEQUENCES // size))
    rows = np.random.default_rng(epoch).permutation(SEQUENCES)[place * size : (place + 1) * size]
    return [array[rows] for array in sequences()]


def make_model() -> keras.Model:
    """Returns a small causal network, with the same initial weights each time."""
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Conv1D(32, 3, padding="causal", activation="tanh")
    return keras.Sequential([keras.Input((7, 8)), hidden, keras.layers.Dense(8)])


def make_optimizer(epochs: int) -> keras.optimizers.Optimizer:
    """Returns the recipe's optimizer, as on whole batches; its schedule counts updates."""
    updates = keras_ga.total_updates(PER_EPOCH, epochs, STEPS, "flush")
    rate = keras.optimizers.schedules.CosineDecay(0.5, decay_steps=updates)
    return keras.optimizers.SGD(rate, momentum=0.9, weight_decay=1e-3, global_clipnorm=0.5)


def train(chosen: argparse.Namespace, weighted: bool, file: Path | None) -> list[np.ndarray]:
    """Returns the weights after training on micro-batches."""
    model = make_model()
    optimizer = keras_ga.GradientAccumulationOptimizer(make_optimizer(chosen.epochs), STEPS)
    model.compile(optimizer)  # so that the optimizer is saved with the model
    optimizer.build(model.trainable_variables)
    if file and file.exists():
        model = keras.saving.load_model(file)
        optimizer = model.optimizer
        pending = int(optimizer.pending)
        print(f"Going on after {int(optimizer.micro_steps)} micro-steps, {pending} pending.")

    def micro_step(x: torch.Tensor, y: torch.Tensor, valid: torch.Tensor) -> None:
        error = (model(x, training=True) - y).square().mean(-1)
        loss = (error * valid).sum() / valid.sum()
        model.zero_grad()
        loss.backward()
        gradients = [variable.value.grad for variable in model.trainable_variables]
        with torch.no_grad():
            weight = valid.sum() if weighted else 1.0
            optimizer.apply(gradients, model.trainable_variables, weight=weight)

    # The counter of micro-steps is in the file: it is the place in the data.
    steps = range(chosen.epochs * PER_EPOCH)[int(optimizer.micro_steps) : chosen.stop_after]
    for step in track(steps, transient=True):
        micro_step(*map(torch.from_numpy, batch(step, MICRO_BATCH)))
        if (step + 1) % PER_EPOCH == 0:
            optimizer.flush()
        if file and (step % 10 == 9 or step + 1 == chosen.stop_after):
            new = file.with_suffix(".new.keras")
            model.save(new)
            new.replace(file)  # so that what has the name is always a whole file
    return model.get_weights()


def train_on_whole_batches(epochs: int) -> list[np.ndarray]:
    """Returns the weights that the bare optimizer makes of the whole batches."""
    model = make_model()
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(make_optimizer(epochs), loss)
    for update in range(keras_ga.total_updates(PER_EPOCH, epochs, STEPS, "flush")):
        x, y, valid = batch(update, MICRO_BATCH * STEPS)
        model.train_on_batch(x, y, sample_weight=valid)
    return model.get_weights()


def options() -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=2, help="epochs to train for (2)")
    parser.add_argument("--checkpoint", type=Path, help="a .keras file to save to and go on from")
    parser.add_argument("--stop-after", type=int, help="micro-steps to stop after")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    chosen = parser.parse_args()
    if chosen.stop_after and not chosen.checkpoint:
        parser.error("--stop-after must come with a --checkpoint to go on from")
    return chosen


def main() -> None:
    """Trains with weights, without, and on whole batches, and compares."""
    chosen = options()
    ours = train(chosen, True, chosen.checkpoint)
    if chosen.stop_after:
        return
    alike, whole = train(chosen, False, None), train_on_whole_batches(chosen.epochs)
    figures = {}
    for name, weights in (("weight = valid tokens", ours), ("all alike", alike)):
        away = max(float(np.abs(a - b).max()) for a, b in zip(weights, whole, strict=True))
        print(f"Largest difference of a weight from whole batches, {name}: {away:.1e}")
        figures[name] = away
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
