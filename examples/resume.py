"""Training that is killed in mid-window and goes on, bit for bit, as if nothing had happened.

A process trains on scikit-learn's digits and saves the model every few micro-steps, with
`model.save`. It is killed (SIGKILL) right after a checkpoint that has an open window in it; a fresh
process loads that file and goes on. So it goes a few times. What comes out is compared with a
training that was never stopped: all weights, and all variables of the optimizer.

One `.keras` file is enough, since all that there is to know is in it: the accumulators of the open
window and how many micro-batches it has, the inner optimizer's state, and in
`optimizer.micro_steps` the place in the data. The last line shows what the window's part in that
is: the same training, but for the open window being lost at each stop. (There is no dropout in the
model: Keras 3.15 does not save its random state, so a model that has it goes on with other masks.)

    python examples/resume.py
    KERAS_BACKEND=jax python examples/resume.py --kills 5
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from functools import cache
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

MICRO_BATCH = 16


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of 64 pixels from 0 to 1, and their labels."""
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype("float32"), y.astype("int32")


def micro_batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a micro-step sees; the order of the rows is the epoch's own."""
    x, y = digits()
    epoch, place = divmod(step, len(x) // MICRO_BATCH)
    order = np.random.default_rng(epoch).permutation(len(x))
    rows = order[place * MICRO_BATCH : (place + 1) * MICRO_BATCH]
    return x[rows], y[rows]


def total_micro_steps(chosen: argparse.Namespace) -> int:
    """Returns how many micro-steps the whole training has."""
    return chosen.epochs * (len(digits()[0]) // MICRO_BATCH)


def new_model(chosen: argparse.Namespace) -> keras.Model:
    """Returns a small compiled network, with the same initial weights each time."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras_ga.GradientAccumulationOptimizer(
        keras.optimizers.AdamW(1e-2, weight_decay=1e-2, use_ema=True), chosen.accumulation_steps
    )
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def train(
    model: keras.Model, chosen: argparse.Namespace, after_step: Callable[[int], None]
) -> None:
    """Trains from where the model is to the end; calls back with the micro-steps made so far."""
    for step in range(int(model.optimizer.micro_steps), total_micro_steps(chosen)):
        model.train_on_batch(*micro_batch(step))
        after_step(step + 1)


def state(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns all that training has made: the model's variables and the optimizer's."""
    parts = {"model": model.variables, "optimizer": model.optimizer.variables}
    return {
        f"{part} {index}": keras.ops.convert_to_numpy(variable)
        for part, variables in parts.items()
        for index, variable in enumerate(variables)
    }


def work(chosen: argparse.Namespace) -> None:
    """Is the process that gets killed: goes on from the last checkpoint, and tells of each."""
    latest, new = (chosen.worker / name for name in ("latest.keras", "new.keras"))
    model = keras.saving.load_model(latest) if latest.exists() else new_model(chosen)
    optimizer = model.optimizer

    def save(step: int) -> None:
        if step % chosen.save_every == 0:
            model.save(new)
            new.replace(latest)  # so that what has the name is always a whole file
            print("saved", step, int(optimizer.pending), flush=True)

    print("start", int(optimizer.micro_steps), int(optimizer.pending), flush=True)
    train(model, chosen, save)
    np.savez(chosen.worker / "end.npz", **state(model))


def run_and_kill(
    folder: Path, kill_after: int | None, on_line: Callable[[str, int, int], None]
) -> bool:
    """Starts the worker; kills it when it has saved so many micro-steps and a window is open.

    Returns whether it was killed; without `kill_after` it goes on to the end.
    """
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(folder)]
    with (folder / "errors").open("w") as errors:
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        with worker:
            for line in worker.stdout:
                word, step, pending = line.split()
                on_line(word, int(step), int(pending))
                due = kill_after is not None and int(step) >= kill_after
                if word == "saved" and due and int(pending) > 0:
                    worker.kill()
                    return True
    if worker.returncode:
        sys.exit(f"The worker failed:\n{(folder / 'errors').read_text()}")
    return False


def broken_training(
    chosen: argparse.Namespace, folder: Path, on_step: Callable[[int], None]
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Returns where each process started and how it ended, and the state after the last."""
    starts: list[dict[str, Any]] = []

    def on_line(word: str, step: int, pending: int) -> None:
        if word == "start":
            starts.append({"micro_steps": step, "pending": pending})
        on_step(step)

    for kill in range(chosen.kills + 1):
        due = total_micro_steps(chosen) * (kill + 1) // (chosen.kills + 1)
        killed = run_and_kill(folder, None if kill == chosen.kills else due, on_line)
        starts[-1]["end"] = "killed" if killed else "done"
    with np.load(folder / "end.npz") as file:
        return starts, dict(file)


def unbroken_training(
    chosen: argparse.Namespace, on_step: Callable[[int], None], lost_after: Collection[int] = ()
) -> dict[str, np.ndarray]:
    """Returns the state after training in one go; after some micro-steps the window is lost."""
    model = new_model(chosen)

    def after_step(step: int) -> None:
        on_step(step)
        if step in lost_after:
            model.optimizer.reset_window()

    train(model, chosen, after_step)
    return state(model)


def furthest(some: dict[str, np.ndarray], others: dict[str, np.ndarray], part: str = "") -> float:
    """Returns the largest difference of a value in the whole state, or in a part of it."""
    names = [name for name in others if name.startswith(part)]
    return float(np.max([np.abs(some[n].astype(float) - others[n]).max() for n in names]))


def options() -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--epochs", type=int, default=3, help="epochs to train for (3)")
    add("--accumulation-steps", type=int, default=8, help="micro-batches of an update (8)")
    add("--save-every", type=int, default=5, help="micro-steps between checkpoints (5)")
    add("--kills", type=int, default=3, help="times that the process is killed (3)")
    add("--json", type=Path, help="also write the figures to this file")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    for name in ("epochs", "save_every", "kills"):
        if (value := getattr(chosen, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1. Received: {value}")
    if chosen.save_every % chosen.accumulation_steps == 0:
        parser.error(
            "--save-every must not be a multiple of --accumulation-steps, because no window is "
            f"open then. Received: {chosen.save_every} and {chosen.accumulation_steps}"
        )
    return chosen


def report(console: Console, starts: list[dict[str, Any]], figures: dict[str, Any]) -> None:
    """Prints where the training was stopped, and what difference that made."""
    table = Table("process", "starts at micro-step", "pending there", "ends")
    for number, start in enumerate(starts, start=1):
        end = "killed (SIGKILL)" if start["end"] == "killed" else "at the end of the data"
        table.add_row(str(number), str(start["micro_steps"]), str(start["pending"]), end)
    console.print(table)
    resumed, lost = figures["resumed"], figures["window_lost"]
    equal = "0: equal bit for bit" if resumed == 0 else f"{resumed:.1e}"
    console.print("Largest difference from the training that was never stopped, of any")
    console.print(f"variable of model and optimizer: {equal};")
    console.print(f"of a weight, where the open window is lost at each stop: {lost:.1e}.")


def main() -> None:
    """Trains with kills, without, and with lost windows, and compares."""
    chosen = options()
    if chosen.worker is not None:
        work(chosen)
        return
    console = Console(highlight=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):

        def bar(name: str) -> Callable[[int], None]:
            task = progress.add_task(name, total=total_micro_steps(chosen))
            return lambda step: progress.update(task, completed=step)

        starts, resumed = broken_training(chosen, Path(folder), bar("killed, going on"))
        whole = unbroken_training(chosen, bar("never stopped"))
        stops = {start["micro_steps"] for start in starts[1:]}
        lost = unbroken_training(chosen, bar("windows lost"), lost_after=stops)
    figures = {
        "starts": starts,
        "resumed": furthest(resumed, whole),
        "window_lost": furthest(lost, whole, "model"),
    }
    report(console, starts, figures)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
