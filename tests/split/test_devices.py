"""Runs the cases that need several devices, each file in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import BACKEND

HERE = Path(__file__).parent


def run(cases, **environment):
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--tb=short", HERE / cases]
    done = subprocess.run(
        [*command, "-o", "python_files=*_cases.py"],
        cwd=HERE.parents[1],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="needs the tensorflow backend")
def test_mirrored_on_two_devices():
    run("mirrored_cases.py")


@pytest.mark.skipif(BACKEND != "jax", reason="needs the jax backend")
def test_sharded_on_four_devices():
    run("sharded_cases.py", XLA_FLAGS="--xla_force_host_platform_device_count=4")
