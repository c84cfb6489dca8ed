"""Two real workers: exact, equal bit for bit, and none the worse for a kill."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

for needed in ("tensorflow", "sklearn", "rich"):
    pytest.importorskip(needed)
if keras.config.backend() != "tensorflow":
    pytest.skip("the strategy is TensorFlow's", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "examples" / "multi_worker.py"
OPTIONS = ["--batch-size", "512", "--accumulation-steps", "4", "--save-every", "4", "--epochs"]
SECONDS = 300


def weights(folder, worker):
    with np.load(folder / f"weights_of_worker_{worker}.npz") as file:
        return [file[name] for name in file.files]


def start(folder, epochs):
    """Starts two workers; returns their processes, whose output goes to files."""
    folder.mkdir(exist_ok=True)
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in listening]
    for each in listening:
        each.close()
    processes = []
    for index in range(2):
        task = {"type": "worker", "index": index}
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task}),
            "CUDA_VISIBLE_DEVICES": "-1",
        }
        output = folder / f"output_{index}_{time.time_ns()}"
        command = [sys.executable, SCRIPT, *OPTIONS, str(epochs), "--checkpoints", folder]
        with output.open("w") as file:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
            )
        processes[-1].output = output
    return processes


def finish(processes):
    """Waits for both, kills what is left after the time, and returns exit codes."""
    end = time.monotonic() + SECONDS
    try:
        return [process.wait(max(end - time.monotonic(), 0.1)) for process in processes]
    finally:
        for process in processes:
            process.kill()  # a worker that waits for a collective does not heed SIGTERM
            process.wait()


def saved_steps(process):
    return [int(n) for n in re.findall(r"saved after (\d+)", process.output.read_text())]


def unbroken_run(folder):
    processes = start(folder, epochs=2)
    codes = finish(processes)
    assert codes == [0, 0], processes[0].output.read_text()[-3000:]
    return folder


def workers_are_equal_and_so_is_one_process(unbroken):
    first, second = weights(unbroken, 0), weights(unbroken, 1)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import multi_worker
    finally:
        sys.path.remove(str(SCRIPT.parent))
    chosen = multi_worker.argparse.Namespace(batch_size=512, epochs=2)
    whole = multi_worker.train_in_one_process(chosen)
    for one, other in zip(first, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def a_killed_worker_ends_the_job_which_resumes_bit_for_bit(unbroken, folder):
    processes = start(folder, epochs=2)
    end = time.monotonic() + SECONDS
    # Two windows, each saved at its end. In mid-window a checkpoint holds the sum of the workers'
    # parts, and going on from it is exact to rounding only (`mirrored_cases.py`).
    while len(saved_steps(processes[0])) < 2 and time.monotonic() < end:
        assert processes[0].poll() is None, processes[0].output.read_text()[-3000:]
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGKILL)
    codes = finish(processes)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, -signal.SIGKILL), "the other worker must end with an error"
    resumed = start(folder, epochs=2)
    assert finish(resumed) == [0, 0], resumed[0].output.read_text()[-3000:]
    (after,) = re.findall(r"resumed after (\d+) micro-steps", resumed[0].output.read_text())
    assert int(after) >= 4
    for worker in range(2):
        for one, other in zip(weights(folder, worker), weights(unbroken, worker), strict=True):
            np.testing.assert_array_equal(one, other)


def test_two_workers(tmp_path):
    """One unbroken run for both: pytest's workers do not share a fixture."""
    unbroken = unbroken_run(tmp_path / "unbroken")
    workers_are_equal_and_so_is_one_process(unbroken)
    a_killed_worker_ends_the_job_which_resumes_bit_for_bit(unbroken, tmp_path / "checkpoints")


@pytest.mark.slow
def test_without_a_cluster_it_starts_one(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, *OPTIONS, "1"], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    apart, away = map(float, re.findall(r": (\d\S+)$", done.stdout, re.MULTILINE))
    assert apart == 0
    assert away < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "cluster", "message"),
    [
        (["--batch-size", "100"], None, "--batch-size must be divisible by --workers times"),
        ([], "{}", "--checkpoints must name a folder that all workers share"),
    ],
)
def test_bad_options_are_refused(options, cluster, message):
    environment = {**os.environ, **({} if cluster is None else {"TF_CONFIG": cluster})}
    done = subprocess.run(
        [sys.executable, SCRIPT, *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode != 0
    assert message in done.stderr
