"""Runs the cases that need several devices or workers, each file in processes of its own.

TensorFlow's logical devices and XLA's host devices must be set before a backend is first used, and
two strategies of different size can't live in one process.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import keras
import pytest

HERE = Path(__file__).parent
SECONDS = 540  # a hung worker must not hang the suite


def run(cases, *options, replicas, backend):
    """Runs a file of cases with pytest; fails with its report."""
    if keras.config.backend() != backend:
        pytest.skip(f"needs the {backend} backend")
    environment = {"KERAS_GA_TEST_REPLICAS": str(replicas)}
    if backend == "jax":
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={replicas}"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--tb=short", HERE / cases]
    done = subprocess.run(
        [*command, *options],
        cwd=HERE.parents[1],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


# Two halves, for two processors.
HALF = "clips or optimizers or travels or embeddings"


@pytest.mark.parametrize("part", [HALF, f"not ({HALF})"])
def test_mirrored_on_two_devices(part):
    run("mirrored_cases.py", "-k", part, replicas=2, backend="tensorflow")


@pytest.mark.slow
def test_mirrored_on_four_devices():
    part = "(clips and momentum and global) or unknown or overflow"
    run("mirrored_cases.py", "-k", part, replicas=4, backend="tensorflow")


def test_sharded_on_eight_devices():
    run("sharded_cases.py", replicas=8, backend="jax")


def test_two_workers_agree_on_an_overflow_of_one():
    """Keras's own loss scale hangs here."""
    if keras.config.backend() != "tensorflow":
        pytest.skip("needs the tensorflow backend")
    free = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in free]
    for each in free:
        each.close()
    workers = []
    for index in range(2):
        task = {"type": "worker", "index": index}
        cluster = json.dumps({"cluster": {"worker": addresses}, "task": task})
        workers.append(
            subprocess.Popen(
                [sys.executable, HERE / "overflow_worker.py"],
                env={**os.environ, "TF_CONFIG": cluster, "CUDA_VISIBLE_DEVICES": "-1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()  # a hung one does not heed SIGTERM
    for output, errors in outputs:
        assert "RESULT [4.0, 2.0, 4.0] [-5.5, -5.5, -5.5]" in output, output + errors[-3000:]
