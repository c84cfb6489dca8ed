"""Runs an example as a reader would, in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def needs(*packages):
    """Skips a module of tests whose example needs what is not installed, or the checkout."""
    if not EXAMPLES.exists():
        pytest.skip("needs the checkout", allow_module_level=True)
    for package in packages:  # looked for, not imported, which may take seconds
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"this example needs {package}", allow_module_level=True)


def run(name, *arguments):
    """The finished process of an example."""
    return subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"},
        check=False,
    )
