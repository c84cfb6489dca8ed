"""What the benchmarks share: the machine they ran on, figures in and out, the look of pictures."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

OUTPUT = Path(__file__).parent / "output"
PACKAGES = ("keras-ga", "keras", "jax", "tensorflow", "torch", "optax", "numpy")
# Okabe and Ito's colours, told apart with any colour vision.
INK, GREY, PALE = "#222222", "#767676", "#e8e8e8"
BLUE, VERMILION = "#0072B2", "#D55E00"


def circumstances() -> dict[str, Any]:
    """Returns what a figure depends on besides the code: machine, versions and date."""
    return {
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def one_line(figures: dict[str, Any], packages: Sequence[str]) -> str:
    """Returns machine, versions and date as a caption; `packages` are those that matter."""
    machine, versions = figures["machine"], figures["versions"]
    used = ", ".join(f"{name} {versions[name]}" for name in packages if name in versions)
    device = figures.get("device")
    hardware = f"{machine['processor']}, {machine['cores']} cores"
    return f"{device + ' on ' if device else ''}{hardware}; {used}; {figures['date']}"


def write_json(figures: dict[str, Any], path: Path) -> None:
    """Writes all figures to a file, and its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2) + "\n")


def accelerator(backend: str) -> str | None:
    """Returns the name of the GPU that the backend uses, None where it computes on the CPU."""
    if backend == "jax":
        import jax

        device = jax.devices()[0]
        return None if device.platform == "cpu" else device.device_kind
    if backend == "torch":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else None
    import tensorflow as tf

    devices = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details
    return details(devices[0]).get("device_name", "GPU") if devices else None


def use_backend(backend: str) -> None:
    """Selects the Keras backend; for before the first import of keras, which reads it once."""
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with quiet():
        import keras

        keras.utils.set_random_seed(0)  # imports TensorFlow, where there is one


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops what C++ libraries write to standard error while they are loaded."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def count(text: str) -> int:
    """Reads a count such as 512, 250k or 16M, at least 1 (an argparse type)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kM]?)", text.strip())
    number = match and int(float(match[1]) * {"": 1, "k": 1e3, "M": 1e6}[match[2]])
    if not number:
        raise argparse.ArgumentTypeError(f"must be a count such as 8 or 16M. Received: {text!r}")
    return number


def counts(text: str) -> list[int]:
    """Reads counts with commas between them (an argparse type)."""
    return [count(part) for part in text.split(",")]


def screen() -> Console:
    """Returns where tables are printed; wide enough for them where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 120)


def bare_axes(axes: Any) -> None:
    """Takes frame and ticks away from a plot."""
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", length=0, colors=GREY)
    axes.set_axisbelow(True)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
