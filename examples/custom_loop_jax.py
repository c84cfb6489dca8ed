"""A training loop of one's own on JAX, with accumulation, token weights and checkpoints.

Weights and optimizer are values, which a jitted micro-step takes and returns. A micro-batch counts
for as much as it has valid tokens, the window that is short at an epoch's end is flushed, and one
`.npz` file has all that it takes to go on, in mid-window too. The weights are compared with those
that the bare optimizer makes of whole batches; so are those of micro-batches that all count alike.

    python examples/custom_loop_jax.py
    python examples/custom_loop_jax.py --checkpoint latest.npz --stop-after 99
    python examples/custom_loop_jax.py --checkpoint latest.npz   # goes on from there
"""

from __future__ import annotations

import argparse
import json
import os
from functools import cache, partial
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import keras
import numpy as np
from jax import Array
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


def train(chosen: argparse.Namespace, weighted: bool, checkpoint: Path | None) -> list[np.ndarray]:
    """Returns the weights after training on micro-batches."""
    model = make_model()
    optimizer = keras_ga.GradientAccumulationOptimizer(make_optimizer(chosen.epochs), STEPS)
    optimizer.build(model.trainable_variables)
    variables = [model.trainable_variables, model.non_trainable_variables, optimizer.variables]

    def loss_of(trainable: list, other: list, x: Array, y: Array, valid: Array) -> tuple:
        predicted, other = model.stateless_call(trainable, other, x, training=True)
        return (((predicted - y) ** 2).mean(-1) * valid).sum() / valid.sum(), other

    @partial(jax.jit, donate_argnums=0)  # the state is updated in place
    def micro_step(state: list, x: Array, y: Array, valid: Array) -> list:
        trainable, other, own = state
        gradients, other = jax.grad(loss_of, has_aux=True)(trainable, other, x, y, valid)
        weight = valid.sum() if weighted else 1.0
        trainable, own = optimizer.stateless_apply(own, gradients, trainable, weight=weight)
        return [trainable, other, own]

    def flush(state: list) -> list:
        # It works on variables: the state goes into them, and is taken out again.
        jax.tree.map(lambda variable, value: variable.assign(value), variables, state)
        optimizer.flush()
        return jax.tree.map(lambda variable: variable.value, variables)

    state, done = jax.tree.map(lambda variable: variable.value, variables), 0
    if checkpoint and checkpoint.exists():
        done, *values = np.load(checkpoint).values()
        state = jax.tree.unflatten(jax.tree.structure(state), map(jax.numpy.asarray, values))
        print(f"Going on after {done} micro-steps.")

    for step in track(range(chosen.epochs * PER_EPOCH)[done : chosen.stop_after], transient=True):
        state = micro_step(state, *batch(step, MICRO_BATCH))
        if (step + 1) % PER_EPOCH == 0:
            state = flush(state)
        if checkpoint and (step % 10 == 9 or step + 1 == chosen.stop_after):
            new = checkpoint.with_suffix(".new.npz")
            np.savez(new, step + 1, *jax.tree.leaves(state))
            new.replace(checkpoint)  # so that what has the name is always a whole file
    return [np.asarray(value) for value in state[0]]


def train_on_whole_batches(epochs: int) -> list[np.ndarray]:
    """Returns the weights that the bare optimizer makes of the whole batches."""
    model = make_model()
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(make_optimizer(epochs), loss)
    for update in range(keras_ga.total_updates(PER_EPOCH, epochs, STEPS, "flush")):
        x, y, valid = batch(update, MICRO_BATCH * STEPS)
        model.train_on_batch(x, y, sample_weight=valid)
    return [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]


def options() -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=2, help="epochs to train for (2)")
    parser.add_argument("--checkpoint", type=Path, help="an .npz file to save to and go on from")
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
