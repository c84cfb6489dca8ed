"""Accumulation on several workers: `MultiWorkerMirroredStrategy` in a loop of one's own.

Keras's `fit` does not run on more than one worker (3.15), with or without accumulation, so the loop
is spelt out here. It does what a real job needs:

- each worker reads its own shard of the rows; shards may differ in size. A worker that has run out
  goes on with weight 0, so that all make the same number of micro-steps;
- micro-batches are weighted by their rows, so that an update is the mean over all rows of all
  workers' micro-batches, exactly;
- all workers save together (an accumulator is the sum of the workers' parts, and reading it is a
  collective), the chief to the checkpoint's folder, the others to a folder that is thrown away;
- a job that was stopped goes on from its last checkpoint: bit for bit if that was made at the end
  of a window (`--save-every` a multiple of the accumulation steps), else to float rounding, since
  the sum of the workers' parts is saved.

Without TF_CONFIG it starts two workers on this machine and compares what they end on with one
process that trains on the whole batch. With TF_CONFIG it is one worker of your cluster.

    python examples/multi_worker.py
    TF_CONFIG='{"cluster": {...}, "task": {...}}' python examples/multi_worker.py --checkpoints DIR
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from sklearn.datasets import load_digits

import keras_ga

CONSOLE = Console(highlight=False)


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns scikit-learn's digits: 1,797 rows of 64 pixels from 0 to 1, and their labels."""
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype("float32"), y.astype("int32")


def make_model() -> keras.Model:
    """Returns a small network, with the same initial weights in every process."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )


def make_optimizer() -> keras.optimizers.Optimizer:
    """Returns the optimizer of the recipe, as it would be without accumulation."""
    return keras.optimizers.AdamW(1e-3, weight_decay=1e-2, global_clipnorm=1.0)


def micro_batches(
    worker: int, workers: int, chosen: argparse.Namespace
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Returns an epoch of one worker: (x, y, valid) of equal shapes, as many on each worker.

    The rows of a large batch are dealt out to workers and micro-batches; `valid` is 1 for a row and
    0 for padding. The last large batch is short, and leaves some of them with few rows or none.
    """
    x, y = digits()
    batches = []
    size = chosen.batch_size // (workers * chosen.accumulation_steps)
    for start in range(0, len(x), chosen.batch_size):
        for step in range(chosen.accumulation_steps):
            first = start + (step * workers + worker) * size
            rows = np.arange(first, min(first + size, start + chosen.batch_size, len(x)))
            valid = np.zeros(size, "float32")
            valid[: len(rows)] = 1
            rows = np.resize(rows, size) if len(rows) else np.zeros(size, int)
            batches.append((x[rows], y[rows], valid))
    return batches


def train_as_a_worker(chosen: argparse.Namespace) -> None:
    """Trains as one worker of the cluster that TF_CONFIG describes, and writes the weights."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    worker, workers = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
    with strategy.scope():
        model = make_model()
        optimizer = keras_ga.GradientAccumulationOptimizer(
            make_optimizer(), chosen.accumulation_steps
        )
        optimizer.build(model.trainable_variables)
        done = tf.Variable(0, dtype=tf.int64, trainable=False)
    per_epoch = micro_batches(worker, workers, chosen)
    total = chosen.epochs * len(per_epoch)

    # All workers save, each to a place of its own; the chief's is the one that counts.
    folder = chosen.checkpoints
    scratch = tempfile.TemporaryDirectory()
    state = tf.train.Checkpoint(model=model, optimizer=optimizer, done=done)
    manager = tf.train.CheckpointManager(
        state, str(folder) if worker == 0 else scratch.name, max_to_keep=2
    )
    latest = tf.train.latest_checkpoint(str(folder))
    if latest:
        state.restore(latest).assert_consumed()
        if worker == 0:
            print(f"resumed after {int(done.numpy())} micro-steps", flush=True)

    @tf.function
    def micro_step(iterator: Any) -> None:
        def on_replica(x: Any, y: Any, valid: Any) -> None:
            rows = tf.reduce_sum(valid)
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(
                    y, model(x, training=True), from_logits=True
                )
                # Divided by the replicas, as for any Keras optimizer: their gradients are summed.
                loss = tf.math.divide_no_nan(tf.reduce_sum(losses * valid), rows) / workers
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables, weight=rows)

        strategy.run(on_replica, args=next(iterator))

    def own_rows(_: Any) -> tf.data.Dataset:
        columns = tuple(map(np.stack, zip(*per_epoch, strict=True)))
        data = tf.data.Dataset.from_tensor_slices(columns).repeat(chosen.epochs)
        return data.skip(int(done.numpy()))

    iterator = iter(strategy.distribute_datasets_from_function(own_rows))
    for step in range(int(done.numpy()), total):
        micro_step(iterator)
        done.assign_add(1)
        if (step + 1) % chosen.save_every == 0:
            manager.save()
            if worker == 0:
                print(f"saved after {step + 1} micro-steps", flush=True)
    if worker == 0:
        print(f"{int(optimizer.iterations.numpy())} updates", flush=True)
    np.savez(folder / f"weights_of_worker_{worker}.npz", *model.get_weights())


def train_in_one_process(chosen: argparse.Namespace) -> list[np.ndarray]:
    """Trains on the whole batches in this process, and returns the weights."""
    x, y = digits()
    model = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make_optimizer(), loss=loss)
    model.fit(x, y, batch_size=chosen.batch_size, epochs=chosen.epochs, shuffle=False, verbose=0)
    return model.get_weights()


def start_workers(chosen: argparse.Namespace, arguments: list[str]) -> int:
    """Runs the workers as processes on this machine; returns the first exit code that is not 0."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(chosen.workers)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    workers = []
    for index in range(chosen.workers):
        config = {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }
        environment = {**os.environ, "TF_CONFIG": json.dumps(config), "CUDA_VISIBLE_DEVICES": "-1"}
        workers.append(subprocess.Popen([sys.executable, __file__, *arguments], env=environment))
    codes = [worker.wait() for worker in workers]
    return next((code for code in codes if code), 0)


def options() -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=2, help="epochs to train for (2)")
    parser.add_argument("--batch-size", type=int, default=256, help="rows of an update (256)")
    parser.add_argument("--accumulation-steps", type=int, default=4, help="micro-batches (4)")
    parser.add_argument("--workers", type=int, default=2, help="processes to start (2)")
    parser.add_argument("--save-every", type=int, default=8, help="micro-steps (8)")
    parser.add_argument("--checkpoints", type=Path, help="folder; the same for all workers")
    chosen = parser.parse_args()
    if chosen.batch_size % (chosen.workers * chosen.accumulation_steps):
        parser.error("--batch-size must be divisible by --workers times --accumulation-steps")
    return chosen


def main() -> int:
    """Is a worker, or starts the workers and compares."""
    chosen = options()
    if "TF_CONFIG" in os.environ:
        if chosen.checkpoints is None:
            sys.exit("error: --checkpoints must name a folder that all workers share")
        train_as_a_worker(chosen)
        return 0
    arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        if chosen.checkpoints is None:
            chosen.checkpoints = Path(scratch)
            arguments += ["--checkpoints", scratch]
        chosen.checkpoints.mkdir(parents=True, exist_ok=True)
        code = start_workers(chosen, arguments)
        if code:
            return 1
        results = []
        for index in range(chosen.workers):
            with np.load(chosen.checkpoints / f"weights_of_worker_{index}.npz") as file:
                results.append([file[name] for name in file.files])
    whole = train_in_one_process(chosen)

    def furthest(some: list[np.ndarray], others: list[np.ndarray]) -> float:
        return max(float(np.abs(a - b).max()) for a, b in zip(some, others, strict=True))

    apart = max(furthest(results[0], result) for result in results)
    away = furthest(results[0], whole)
    CONSOLE.print(f"Largest difference of a weight between the workers: {apart:.1e}")
    CONSOLE.print(f"... and from one process on the whole batch: {away:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
