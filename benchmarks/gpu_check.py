"""Checks keras_ga on a CUDA GPU in under four minutes: right weights, micro-step, peak memory.

Every backend that is installed gets processes of its own:

1. equivalence: N micro-batches against the bare optimizer on the large batch, in float32 with TF32
   off and with bfloat16 variables, and the sum of 1,024 bfloat16 ones, which only float32
   accumulators get right;
2. `micro_step.py` for Adam on 16.8 M weights, N = 8;
3. the peak memory of a decoder of BLOOM-560M's size in micro-batches of 64, 16, 4 and 1 rows that
   make the same effective batch of 64 (JAX and torch); running out of memory is a finding.

What the time does not suffice for is reported as not run. Exit code: 0 when all that ran is right,
1 when a check failed, 2 without a GPU.

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --device cpu --small     # a dry run of all of it, on tiny sizes
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import (
    OUTPUT,
    accelerator,
    circumstances,
    counts,
    one_line,
    screen,
    use_backend,
    write_json,
)
from rich.table import Table

BACKENDS = ("jax", "torch", "tensorflow")
# Distance from the large batch's weights after ten updates, as a share of the way that they went.
# With bfloat16 variables each update is rounded to 8 bits.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
BLOOM = {"number_of_layers": 24, "width": 1024, "heads": 16, "vocabulary": 250_880, "sequence": 512}
SMALL = {"number_of_layers": 2, "width": 32, "heads": 2, "vocabulary": 100, "sequence": 16}
NO_GPU = (
    "gpu_check needs an NVIDIA GPU that JAX, torch or TensorFlow can use, and found none. Install "
    "a CUDA build of one of them, or do a dry run with --device cpu --small."
)


# The workers: each is this script in a process of its own, and returns what it found.


def check_equivalence(options: argparse.Namespace) -> dict[str, Any]:
    """Trains in both ways and compares the weights."""
    backend = options.worker_backend
    device = accelerator(backend)
    if options.device == "gpu" and device is None:
        return {"device": None}
    import keras

    _exact_matmuls(backend)
    found = {
        f"{dtype} {name}": _difference(dtype, make)
        for dtype in ("float32", "bfloat16")
        for name, make in {
            "SGD, momentum, clipping": lambda: keras.optimizers.SGD(
                1e-2, momentum=0.9, global_clipnorm=1.0
            ),
            # In bfloat16 the default beta_2 of 0.999 is 1, and Adam makes no update at all.
            "AdamW": lambda: keras.optimizers.AdamW(1e-2, beta_1=0.75, beta_2=0.875),
        }.items()
    }
    checks = [
        {"check": name, "value": value, "limit": TOLERANCE[name.split()[0]]}
        for name, value in found.items()
    ]
    checks.append({"check": "bfloat16 sum of 1,024 ones", "value": _ones(), "limit": 0.0})
    return {"device": device, "checks": checks}


def _exact_matmuls(backend: str) -> None:
    if backend == "jax":
        import jax

        jax.config.update("jax_default_matmul_precision", "highest")
    elif backend == "torch":
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        import tensorflow as tf

        tf.config.experimental.enable_tensor_float_32_execution(False)


def _difference(dtype: str, make: Callable[[], Any]) -> float:
    """Returns how far 8 micro-batches end from the large batch in ten updates, as a share."""
    import keras
    import numpy as np

    import keras_ga

    random = np.random.default_rng(0)
    x, y = random.standard_normal((640, 32), "float32"), random.integers(0, 10, 640)

    def train(optimizer: Any, batch_size: int, rows: int = 640) -> np.ndarray:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(128, "tanh", dtype=dtype) for _ in range(2)]
        head = keras.layers.Dense(10, dtype=dtype)
        model = keras.Sequential([keras.Input((32,)), *layers, head])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss)
        if rows:
            model.fit(x[:rows], y[:rows], batch_size=batch_size, shuffle=False, verbose=0)
        weights = [
            keras.ops.convert_to_numpy(keras.ops.cast(w, "float32"))
            for w in model.trainable_variables
        ]
        return np.concatenate([weight.ravel() for weight in weights])

    start, large_batch = train(make(), 64, rows=0), train(make(), 64)
    ours = train(keras_ga.GradientAccumulationOptimizer(make(), 8), 8)
    distance = np.linalg.norm(ours - large_batch) / np.linalg.norm(large_batch - start)
    return float(distance)


def _ones() -> float:
    """Returns how far the sum of 1,024 ones is off that reaches a bfloat16 variable."""
    import keras

    import keras_ga

    variable = keras.Variable(0.0, dtype="bfloat16")
    sgd = keras.optimizers.SGD(1.0)
    optimizer = keras_ga.GradientAccumulationOptimizer(sgd, 1024, reduction="sum")
    for _ in range(1024):
        optimizer.apply([keras.ops.ones((), "bfloat16")], [variable])
    total = keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32"))
    return abs(float(total) + 1024.0)


def measure_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Trains the decoder for one window and returns the peak memory of the device."""
    import keras
    import numpy as np
    from models import decoder
    from train_steps import train_step

    import keras_ga

    keras.config.set_dtype_policy("mixed_bfloat16")
    sizes = SMALL if options.small else BLOOM
    micro_batch = options.worker_micro_batch
    steps = options.batch_size // micro_batch
    optimizer = keras.optimizers.Adam(1e-5)
    if steps > 1:
        optimizer = keras_ga.GradientAccumulationOptimizer(optimizer, steps)
    random = np.random.default_rng(0)
    x = random.integers(0, sizes["vocabulary"], (micro_batch, sizes["sequence"])).astype("int32")
    y = random.integers(0, 2, micro_batch).astype("int32")
    try:
        model = decoder(**sizes)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        jit = options.worker_backend == "jax"
        model.compile(optimizer=optimizer, loss=loss, jit_compile=jit)
        train_step(model, (x, y))(steps + 1)
    except Exception as error:  # each framework has its own class for it
        text = str(error)
        if "out of memory" not in text.lower() and "RESOURCE_EXHAUSTED" not in text:
            raise
        return {"out_of_memory": True, "message": text.splitlines()[0][:200]}
    return {**_peak(options.worker_backend), "parameters": model.count_params()}


def _peak(backend: str) -> dict[str, Any]:
    if backend == "jax":
        import jax

        statistics = jax.devices()[0].memory_stats()
        if statistics:
            return {"peak_gib": statistics["peak_bytes_in_use"] / 2**30, "of": "device"}
    else:
        import torch

        if torch.cuda.is_available():
            return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "of": "device"}
    import resource

    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_gib": kib / 2**20, "of": "process, resident"}


WORKERS = {"equivalence": check_equivalence, "memory": measure_memory}


# The main process: starts the workers within the time, and reports.


class Clock:
    """How much of the time is left."""

    def __init__(self, minutes: float):
        self._start, self._end = time.monotonic(), time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds until the time is over."""
        return self._end - time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start


def run(command: Sequence[str], clock: Clock, device: str) -> dict[str, Any]:
    """Runs one of the scripts here, and returns its JSON file or why there is none."""
    if clock.left < 5:
        return {"failed": "not run, the time is over"}
    environment = {
        **os.environ,
        # Several processes share the card, and what a pool has reserved is not what is used.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            process = subprocess.run(
                [sys.executable, *command, "--output", folder],
                cwd=Path(__file__).parent,
                env=environment,
                capture_output=True,
                text=True,
                timeout=clock.left,
            )
        except subprocess.TimeoutExpired:
            return {"failed": "stopped, the time is over"}
        found = list(Path(folder).glob("*.json"))
        if process.returncode or not found:
            last_lines = process.stderr.strip().splitlines()[-3:]
            return {"failed": f"exit code {process.returncode}: {' '.join(last_lines)}"}
        return json.loads(found[0].read_text())


def worker(name: str, backend: str, options: argparse.Namespace, *more: str) -> list[str]:
    """Returns the command that starts a worker."""
    command = [Path(__file__).name, "--worker", name, "--worker-backend", backend]
    small = ["--small"] if options.small else []
    return [*command, "--device", options.device, *small, *more]


def micro_step_command(backend: str, small: bool) -> list[str]:
    """Returns the command that measures the micro-step; TensorFlow under XLA, as on any GPU."""
    size = ["--parameters", "10k" if small else "16.8M", "--rounds", "1" if small else "5"]
    jit = ["--jit"] if backend == "tensorflow" else []
    steps = ["--accumulation-steps", "8", "--steps-per-round", "8" if small else "32"]
    return ["micro_step.py", "--backend", backend, *size, *jit, *steps]


def memory(backends: Sequence[str], options: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Measures the decoder's peak memory, two backends at a time, large beside small.

    Compiling takes most of the time and no card. What runs out of memory in company is measured
    once more alone.
    """

    def peak(backend: str, micro_batch: int) -> dict[str, Any]:
        rows = ["--worker-micro-batch", str(micro_batch), "--batch-size", str(options.batch_size)]
        return run(worker("memory", backend, options, *rows), clock, options.device)

    def all_of(backend: str) -> dict[int, Any]:
        down = sorted(options.micro_batches, reverse=backend == "jax")
        return {micro_batch: peak(backend, micro_batch) for micro_batch in down}

    with ThreadPoolExecutor() as pool:
        found = dict(zip(backends, pool.map(all_of, backends), strict=True))
    for backend in backends if len(backends) > 1 else ():
        for micro_batch, figures in found[backend].items():
            if figures.get("out_of_memory") and clock.left > 5:
                found[backend][micro_batch] = peak(backend, micro_batch)
    return found


def report(figures: dict[str, Any]) -> bool:
    """Prints everything that was found; returns whether all that ran is right."""
    console, right = screen(), True
    devices = {
        name: found["device"] for name, found in figures["equivalence"].items() if "device" in found
    }
    console.print(f"Devices: {devices}\n{one_line(figures, ('keras-ga', 'keras', *BACKENDS))}")
    table = Table(
        "backend", "check", "off by", "limit", "", title="Weights, against the large batch"
    )
    for backend, found in figures["equivalence"].items():
        if "failed" in found:
            table.add_row(backend, found["failed"], "", "", "[red]failed[/]")
            right = False
        for check in found.get("checks", ()):
            holds = check["value"] <= check["limit"]
            right &= holds
            verdict = "right" if holds else "[bold red]WRONG[/]"
            value, limit = f"{check['value']:.1e}", f"{check['limit']:.1e}"
            table.add_row(backend, check["check"], value, limit, verdict)
    console.print(table)
    table = Table("backend", "side", "ms", "x floor", title="Micro-step, Adam, N = 8")
    for backend, found in figures["micro_step"].items():
        for row in found.get("rows", ()):
            for name, side in row["sides"].items():
                cells = f"{side['milliseconds']:.2f}", f"{side['times_floor']:.2f}"
                table.add_row(backend, name, *cells)
        if "failed" in found:
            table.add_row(backend, found["failed"], "", "")
    console.print(table)
    table = Table("backend", "micro-batch", "peak, GiB", "of", title="Peak memory of the decoder")
    for backend, found in figures["memory"].items():
        for micro_batch, peak in found.items():
            gib = f"{peak['peak_gib']:.2f}" if "peak_gib" in peak else ""
            of = "out of memory" if peak.get("out_of_memory") else peak.get("of", "")
            table.add_row(backend, str(micro_batch), gib, peak.get("failed", of))
    console.print(table)
    return right


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Checks keras_ga on a CUDA GPU: weights against the large batch, the "
        "micro-step, peak memory of a decoder of BLOOM-560M's size.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=("gpu", "cpu"), default="gpu", help="cpu is for a dry run")
    add("--small", action="store_true", help="tiny sizes, for a dry run")
    add("--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="those to check")
    add("--minutes", type=float, default=4.0, help="time for all of it")
    add("--batch-size", type=int, default=64, help="effective batch of the decoder, rows")
    add("--micro-batches", type=counts, default="64,16,4,1", help="rows in its micro-batch")
    add("--output", type=Path, default=OUTPUT, help="folder for the JSON file")
    add("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    add("--worker-backend", choices=BACKENDS, help=argparse.SUPPRESS)
    add("--worker-micro-batch", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Runs the checks, or one of them as a worker; returns the exit code."""
    options = parse_options()
    if options.worker:
        use_backend(options.worker_backend)
        write_json(WORKERS[options.worker](options), options.output / "worker.json")
        return 0
    clock = Clock(options.minutes)
    backends = [name for name in options.backends if find_spec(name)]

    def equivalence(backend: str) -> dict[str, Any]:
        return run(worker("equivalence", backend, options), clock, options.device)

    with ThreadPoolExecutor() as pool:
        found = dict(zip(backends, pool.map(equivalence, backends), strict=True))
    on_cpu = [name for name in backends if found[name].get("device", "unknown") is None]
    if options.device == "gpu" and on_cpu == backends:
        print(NO_GPU, file=sys.stderr)
        return 2
    ready = [name for name in backends if options.device == "cpu" or name not in on_cpu]
    figures = {"benchmark": "gpu_check", "small": options.small, **circumstances()}
    figures["equivalence"] = found
    # JAX and torch first: their memory is measured too, and TensorFlow's micro-step comes last.
    with_memory = [name for name in ready if name != "tensorflow"]
    figures["micro_step"] = {
        name: run(micro_step_command(name, options.small), clock, options.device)
        for name in with_memory
    }
    figures["memory"] = memory(with_memory, options, clock)
    if "tensorflow" in ready:
        command = micro_step_command("tensorflow", options.small)
        figures["micro_step"]["tensorflow"] = run(command, clock, options.device)
    figures["seconds"] = clock.spent
    right = report(figures)
    write_json(figures, options.output / "gpu_check.json")
    print(f"{clock.spent:.0f} s. Figures: {options.output / 'gpu_check.json'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
