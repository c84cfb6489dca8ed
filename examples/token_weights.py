"""Token-weighted accumulation for a language model, in a training loop of one's own.

Sequences of 16 to 1 valid tokens are padded to one length, and the loss is the mean over the
valid tokens of the batch. Micro-batches then hold different numbers of tokens, and the plain mean
of their gradients is not the large batch's gradient. Weighting each by its valid tokens is.

One model is trained three times from the same start: on the whole batch, on micro-batches with
weights, on micro-batches without. The table shows how far each ends from the whole batch.

    python examples/token_weights.py
    KERAS_BACKEND=jax python examples/token_weights.py
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import keras_ga

VOCABULARY, SEQUENCES = 64, 16
Gradients = Callable[[np.ndarray, np.ndarray, np.ndarray], list[Any]]


def padded_text() -> tuple[np.ndarray, np.ndarray]:
    """Token ids (16, 17) of this file's own text, and which targets are valid (16, 16)."""
    text = Path(__file__).read_bytes()
    ids = np.frombuffer(text[: SEQUENCES * 17], np.uint8).reshape(SEQUENCES, 17) % VOCABULARY
    lengths = np.arange(SEQUENCES, 0, -1)
    valid = np.arange(SEQUENCES)[None] < lengths[:, None]
    return ids.astype("int32"), valid.astype("float32")


def language_model(seed: int) -> keras.Model:
    """A small recurrent language model, from the same start for the same seed."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((SEQUENCES,), dtype="int32"),
            keras.layers.Embedding(VOCABULARY, 16),
            keras.layers.GRU(32, return_sequences=True),
            keras.layers.Dense(VOCABULARY),
        ]
    )


def mean_over_tokens(y: Any, logits: Any, valid: Any) -> Any:
    """The loss: cross-entropy, averaged over the valid tokens."""
    loss = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
    return keras.ops.sum(loss * valid) / keras.ops.sum(valid)


def gradients_on_tensorflow(model: keras.Model) -> Gradients:
    """Gradients by a tape, in a compiled function."""
    import tensorflow as tf

    @tf.function(reduce_retracing=True)
    def gradients(x: Any, y: Any, valid: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = mean_over_tokens(y, model(x, training=True), valid)
        # The embedding's gradient as a dense one, as the other backends have it.
        found = tape.gradient(loss, model.trainable_variables)
        return [tf.convert_to_tensor(gradient) for gradient in found]

    return gradients


def gradients_on_jax(model: keras.Model) -> Gradients:
    """Gradients by `jax.grad`, jitted."""
    import jax

    def loss(trainable: Any, state: Any, x: Any, y: Any, valid: Any) -> Any:
        logits, _ = model.stateless_call(trainable, state, x, training=True)
        return mean_over_tokens(y, logits, valid)

    compiled = jax.jit(jax.grad(loss))

    def gradients(x: Any, y: Any, valid: Any) -> list[Any]:
        trainable = [variable.value for variable in model.trainable_variables]
        state = [variable.value for variable in model.non_trainable_variables]
        return compiled(trainable, state, x, y, valid)

    return gradients


def gradients_on_torch(model: keras.Model) -> Gradients:
    """Gradients by `backward`."""

    def gradients(x: Any, y: Any, valid: Any) -> list[Any]:
        model.zero_grad()
        valid = keras.ops.convert_to_tensor(valid)
        mean_over_tokens(keras.ops.convert_to_tensor(y), model(x, training=True), valid).backward()
        return [variable.value.grad for variable in model.trainable_variables]

    return gradients


GRADIENTS = {
    "tensorflow": gradients_on_tensorflow,
    "jax": gradients_on_jax,
    "torch": gradients_on_torch,
}


def trained(
    optimizer: keras.optimizers.Optimizer, micro_batch: int, updates: int, weighted: bool, seed: int
) -> np.ndarray:
    """The weights, in one vector, after training on micro-batches of so many sequences."""
    model = language_model(seed)
    optimizer.build(model.trainable_variables)
    gradients = GRADIENTS[keras.config.backend()](model)
    ids, valid = padded_text()
    for _ in range(updates):
        for start in range(0, SEQUENCES, micro_batch):
            rows = slice(start, start + micro_batch)
            found = gradients(ids[rows, :-1], ids[rows, 1:], valid[rows])
            if weighted:
                tokens = valid[rows].sum()
                optimizer.apply(found, model.trainable_variables, weight=tokens)
            else:
                optimizer.apply(found, model.trainable_variables)
    return np.concatenate([weights.ravel() for weights in model.get_weights()])


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences in a micro-batch (4)")
    parser.add_argument("--updates", type=int, default=20, help="updates to train for (20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights (0)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    chosen = parser.parse_args()
    if chosen.micro_batch < 1 or SEQUENCES % chosen.micro_batch:
        parser.error(f"--micro-batch must divide {SEQUENCES}, the sequences of a batch")
    return chosen


def main(arguments: argparse.Namespace) -> None:
    """Trains in the three ways and prints how far they end from the whole batch."""

    def sgd() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.5, momentum=0.9)

    def accumulating() -> keras.optimizers.Optimizer:
        steps = SEQUENCES // arguments.micro_batch
        return keras_ga.GradientAccumulationOptimizer(sgd(), accumulation_steps=steps)

    ways: Sequence[tuple[str, Callable[[], Any], int, bool]] = [
        ("the whole batch", sgd, SEQUENCES, False),
        ("micro-batches, weight = valid tokens", accumulating, arguments.micro_batch, True),
        ("micro-batches, all alike", accumulating, arguments.micro_batch, False),
    ]
    start = np.concatenate([w.ravel() for w in language_model(arguments.seed).get_weights()])
    ends = [
        trained(make(), size, arguments.updates, weighted, arguments.seed)
        for _, make, size, weighted in track(ways, "training", transient=True)
    ]
    moved = np.abs(ends[0] - start).max()
    table = Table("way", "largest difference", "as a share of the way gone")
    figures = {}
    for (name, *_), end in zip(ways, ends, strict=True):
        difference = float(np.abs(end - ends[0]).max())
        figures[name] = {"difference": difference, "share": float(difference / moved)}
        table.add_row(name, f"{difference:.1e}", f"{difference / moved:.1e}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main(options())
