"""Accumulation on several devices, JAX: `keras.distribution.DataParallel` and `fit`.

Model, optimizer and `fit` are those of one device; only the distribution is set. Accumulators take
the sharding of their variables. The run is compared with the whole batch on one device.

It uses the devices that JAX finds; where there is only one (a CPU, a single GPU) it makes eight of
the CPU, so that it runs anywhere. `--processes 2` starts processes that together are one cluster,
each with half of the devices and half of each batch's rows.

    python examples/jax_data_parallel.py
    python examples/jax_data_parallel.py --processes 2
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


import jax
import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_ga


def options() -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=2, help="epochs to train for (2)")
    parser.add_argument("--batch-size", type=int, default=256, help="rows of an update (256)")
    parser.add_argument("--accumulation-steps", type=int, default=4, help="micro-batches (4)")
    parser.add_argument("--devices", type=int, default=8, help="to make of the CPU (8)")
    parser.add_argument("--processes", type=int, default=1, help="processes of the cluster (1)")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.batch_size % (chosen.accumulation_steps * chosen.devices):
        parser.error("--batch-size must be divisible by --accumulation-steps times --devices")
    if chosen.devices % chosen.processes:
        parser.error("--devices must be divisible by --processes")
    return chosen


def digits(chosen: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Returns scikit-learn's digits: rows of 64 pixels from 0 to 1, and their labels."""
    x, y = load_digits(return_X_y=True)
    rows = len(x) // chosen.batch_size * chosen.batch_size  # a batch must divide by the devices
    return (x[:rows] / 16).astype("float32"), y[:rows].astype("int32")


def trained(
    optimizer: keras.optimizers.Optimizer,
    batch_size: int,
    epochs: int,
    x: np.ndarray,
    y: np.ndarray,
) -> list[np.ndarray]:
    """Returns the weights of a small network, after training on the rows in their order."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss)
    model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()


def make_optimizer() -> keras.optimizers.Optimizer:
    """Returns the optimizer of the recipe, as it would be without accumulation."""
    return keras.optimizers.AdamW(1e-3, weight_decay=1e-2, global_clipnorm=1.0)


def own_rows(array: np.ndarray, micro_batch: int, chosen: argparse.Namespace) -> np.ndarray:
    """Returns this process's part of each micro-batch's rows."""
    parts = array.reshape(-1, chosen.processes, micro_batch // chosen.processes, *array.shape[1:])
    return parts[:, chosen.process].reshape(-1, *array.shape[1:])


def train_distributed(chosen: argparse.Namespace) -> list[np.ndarray]:
    """Returns the weights after accumulation on all devices of all processes."""
    if chosen.processes > 1:
        keras.distribution.initialize(chosen.address, chosen.processes, chosen.process)
    # Each process feeds its own rows; NumPy arrays are not sharded for you.
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    micro_batch = chosen.batch_size // chosen.accumulation_steps
    x, y = (own_rows(array, micro_batch, chosen) for array in digits(chosen))
    optimizer = keras_ga.GradientAccumulationOptimizer(make_optimizer(), chosen.accumulation_steps)
    weights = trained(optimizer, micro_batch // chosen.processes, chosen.epochs, x, y)
    keras.distribution.set_distribution(None)
    return weights


def start_processes(chosen: argparse.Namespace) -> list[list[np.ndarray]]:
    """Returns the weights that each process of the cluster ends on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.npz" for i in range(chosen.processes)]
        started = []
        for index, file in enumerate(files):
            own = ["--address", address, "--process", str(index), "--weights", str(file)]
            started.append(subprocess.Popen([sys.executable, __file__, *sys.argv[1:], *own]))
        codes = [process.wait() for process in started]
        if any(codes):
            sys.exit(1)
        results = []
        for file in files:
            with np.load(file) as weights:
                results.append([weights[name] for name in weights.files])
    return results


def furthest(some: list[np.ndarray], others: list[np.ndarray]) -> float:
    """Returns the largest difference of a weight."""
    return max(float(np.abs(a - b).max()) for a, b in zip(some, others, strict=True))


def main() -> None:
    """Is a process of a cluster, or trains and compares."""
    chosen = options()
    # For before JAX is first used. With accelerators the CPU's devices are not used.
    jax.config.update("jax_num_cpu_devices", chosen.devices // chosen.processes)
    if chosen.weights is not None:
        np.savez(chosen.weights, *train_distributed(chosen))
        return
    if chosen.processes > 1:
        first, *others = start_processes(chosen)
        apart = max(furthest(first, other) for other in others)
        print(f"Largest difference of a weight between the processes: {apart:.1e}")
    else:
        first = train_distributed(chosen)
        print(f"Trained on {jax.device_count()} devices ({jax.devices()[0].device_kind}).")
    whole = trained(make_optimizer(), chosen.batch_size, chosen.epochs, *digits(chosen))
    away = furthest(first, whole)
    print(f"Largest difference of a weight from the whole batch on one device: {away:.1e}")


if __name__ == "__main__":
    main()
