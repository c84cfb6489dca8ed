"""Measures `split_batches`: time and peak memory of one batch of 64, by the micro-batch's rows.

Three models whose activations outweigh their weights: Dense layers on sequences, convolutions, a
decoder. Times are of `train_on_batch`, whole and split in turns, medians of the rounds' ratios.
Memory is what a step takes beside weights, optimizer and data: on JAX the compiler's plan, on
TensorFlow and torch by how much a fresh process grew at its peak (what the framework keeps for
itself is in it).

    python benchmarks/split_batches.py --backend jax
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import OUTPUT, circumstances, counts, one_line, screen, use_backend, write_json
from rich.progress import track
from rich.table import Table

WHOLE = 0
MODELS = ("dense", "convolutions", "decoder")


def model_and_batch(name: str, batch: int) -> tuple[Any, Any, Any]:
    """Builds a compiled model, and a batch for it."""
    import keras
    import numpy as np
    from keras import layers
    from models import decoder

    rng = np.random.default_rng(0)
    if name == "dense":
        hidden = [layers.Dense(256, activation="tanh") for _ in range(5)]
        model = keras.Sequential([keras.Input((128, 64)), *hidden, layers.Dense(8)])
        x, y = rng.normal(size=(batch, 128, 64)), rng.normal(size=(batch, 128, 8))
    elif name == "convolutions":
        hidden = [layers.Conv2D(32, 3, padding="same", activation="relu") for _ in range(5)]
        pooled = layers.GlobalAveragePooling2D()
        model = keras.Sequential([keras.Input((32, 32, 3)), *hidden, pooled, layers.Dense(8)])
        x, y = rng.normal(size=(batch, 32, 32, 3)), rng.normal(size=(batch, 8))
    else:
        model = decoder(number_of_layers=2, width=64, heads=2, vocabulary=1000, sequence=64)
        x, y = rng.integers(0, 1000, (batch, 64)), rng.normal(size=(batch, 2))
    model.compile(optimizer=keras.optimizers.Adam(1e-4), loss="mse")
    return model, x.astype("int32" if name == "decoder" else "float32"), y.astype("float32")


def step(name: str, batch: int, rows: int) -> tuple[Callable[[], Any], Any, Any]:
    """A step on one batch: whole, or split into micro-batches of so many rows."""
    import keras_ga

    model, x, y = model_and_batch(name, batch)
    if rows != WHOLE:
        keras_ga.split_batches(model, rows)
    return lambda: model.train_on_batch(x, y), model, (x, y)


def planned_bytes(name: str, batch: int, rows: int) -> int:
    """What XLA plans beside weights, optimizer and data (JAX)."""
    import keras_ga

    _, model, (x, y) = step(name, batch, WHOLE)
    if rows != WHOLE:
        found = keras_ga.find_micro_batch_size(model, x[:rows], y[:rows])
        weights = sum(int(v.value.nbytes) for v in model.trainable_variables)
        return found.plan[0].bytes + weights  # the plan takes the sums of gradients as given
    from train_steps import memory_plan, train_step

    plan = memory_plan(train_step(model, (x, y)).compiled)
    return int((plan["peak"] - plan["arguments"]) * 2**20)


def grown_bytes(name: str, batch: int, rows: int) -> int:
    """By how much this process grows at its peak (TensorFlow, torch; Linux)."""
    run, *_ = step(name, batch, rows)
    step(name, 2, WHOLE)[0]()  # the framework's own
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is in use now
    before = status("VmRSS")
    for _ in range(3):
        run()
    return status("VmHWM") - before


def status(field: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def memory(arguments: argparse.Namespace, name: str, rows: int) -> int:
    """The memory of a step, measured in a process of its own."""
    command = [sys.executable, __file__, "--backend", arguments.backend, "--only", name, str(rows)]
    done = subprocess.run(
        [*command, "--batch", str(arguments.batch), "--rows", "1"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[-1])


def times(arguments: argparse.Namespace, name: str) -> dict[int, tuple[float, float]]:
    """Milliseconds, and times the whole batch's, by rows in a micro-batch."""
    sides = [WHOLE, *arguments.rows]
    runs = {rows: step(name, arguments.batch, rows)[0] for rows in sides}
    for run in runs.values():
        run()
    rounds = []
    for _ in track(range(arguments.rounds), description=name, transient=True):
        taken = {}
        for rows, run in runs.items():
            start = time.perf_counter()
            run()
            taken[rows] = time.perf_counter() - start
        rounds.append(taken)
    return {
        rows: (
            1000 * statistics.median(taken[rows] for taken in rounds),
            statistics.median(taken[rows] / taken[WHOLE] for taken in rounds),
        )
        for rows in sides
    }


def main() -> None:
    """Measures, prints a table, and writes figures and a picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("jax", "tensorflow", "torch"), required=True)
    parser.add_argument("--batch", type=int, default=64, help="rows of the batch")
    parser.add_argument("--rows", type=counts, default=[32, 16, 4], help="of a micro-batch")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for the figures")
    parser.add_argument("--only", nargs=2, metavar=("MODEL", "ROWS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if any(rows > arguments.batch for rows in arguments.rows):
        parser.error(f"--rows must be at most the batch. Received: {arguments.rows}")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    use_backend(arguments.backend)
    if arguments.only:
        name, rows = arguments.only[0], int(arguments.only[1])
        measure = planned_bytes if arguments.backend == "jax" else grown_bytes
        print(measure(name, arguments.batch, rows))
        return
    table = Table("model", "micro-batch", "MiB", "of whole", "ms", "x whole")
    results = []
    for name in arguments.models:
        taken = times(arguments, name)
        whole = memory(arguments, name, WHOLE)
        for rows, (milliseconds, ratio) in taken.items():
            used = whole if rows == WHOLE else memory(arguments, name, rows)
            results.append(
                {
                    "model": name,
                    "rows": rows or arguments.batch,
                    "split": rows != WHOLE,
                    "bytes": used,
                    "share": used / whole,
                    "milliseconds": milliseconds,
                    "times_whole": ratio,
                }
            )
            label = f"{rows} rows" if rows else f"none: {arguments.batch} rows"
            cells = [f"{used / 2**20:.1f}", f"{used / whole:.2f}"]
            table.add_row(name, label, *cells, f"{milliseconds:.1f}", f"{ratio:.2f}")
    figures = {
        "benchmark": "split_batches",
        "backend": arguments.backend,
        "batch": arguments.batch,
        "rounds": arguments.rounds,
        "rows": results,
        **circumstances(),
    }
    screen().print(table)
    print(caption := one_line(figures, ("keras", arguments.backend)))
    write_json(figures, arguments.output / f"split_batches_{arguments.backend}.json")
    from pictures import draw_split_batches

    picture = arguments.output / f"split_batches_{arguments.backend}.png"
    draw_split_batches(figures, caption, picture)
    print(json.dumps({"picture": str(picture)}))


if __name__ == "__main__":
    main()
