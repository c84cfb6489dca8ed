"""Each backend's loop equals the whole batch, also when it is stopped in mid-window."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

for needed in ("sklearn", "rich"):
    pytest.importorskip(needed, reason="the examples need the extra `examples`")
BACKEND = keras.config.backend()
SCRIPT = Path(__file__).parents[2] / "examples" / f"custom_loop_{BACKEND}.py"
SAVED = {
    "tensorflow": ("--checkpoints", "saved"),
    "jax": ("--checkpoint", "saved.npz"),
    "torch": ("--checkpoint", "saved.keras"),
}


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"},
        check=False,
    )


def test_stopped_in_mid_window_it_equals_whole_batches(tmp_path):
    option, name = SAVED[BACKEND]
    saved, figures = (option, tmp_path / name), tmp_path / "figures.json"
    stopped = run("--epochs", 1, *saved, "--stop-after", 99)
    assert stopped.returncode == 0, stopped.stderr
    done = run("--epochs", 1, *saved, "--json", figures)
    assert done.returncode == 0, done.stderr
    assert "Going on after 99 micro-steps" in done.stdout
    weighted, alike = json.loads(figures.read_text()).values()
    assert weighted < 1e-6
    assert alike > 1e-2


@pytest.mark.slow
def test_a_stop_without_a_checkpoint_is_refused():
    done = run("--stop-after", 9)
    assert done.returncode == 2
    assert "--stop-after must come with" in done.stderr
