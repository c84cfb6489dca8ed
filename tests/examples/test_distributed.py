"""The examples on several devices end on the whole batch's weights."""

import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

pytest.importorskip("sklearn", reason="the examples need the extra `examples`")
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script, *options, backend):
    if keras.config.backend() != backend:
        pytest.skip(f"needs the {backend} backend")
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *options],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(map(float, re.findall(r": (\d\.\S+)$", done.stdout, re.MULTILINE)))


def test_multi_gpu():
    ours, bare = run("multi_gpu.py", "--epochs", "1", backend="tensorflow")
    assert ours < 1e-6
    assert bare > 1e-3


def test_jax_data_parallel():
    (away,) = run("jax_data_parallel.py", "--epochs", "1", backend="jax")
    assert away < 2e-6


def test_jax_data_parallel_in_two_processes():
    apart, away = run("jax_data_parallel.py", "--processes", "2", backend="jax")
    assert apart == 0
    assert away < 2e-6
