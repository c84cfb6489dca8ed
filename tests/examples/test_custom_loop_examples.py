"""Each backend's loop equals the whole batch, also when it is stopped in mid-window."""

import json

import keras
import pytest
from support_examples import needs, run

needs("sklearn", "rich")

BACKEND = keras.config.backend()
SAVED = {
    "tensorflow": ("--checkpoints", "saved"),
    "jax": ("--checkpoint", "saved.npz"),
    "torch": ("--checkpoint", "saved.keras"),
}


def test_stopped_in_mid_window_it_equals_whole_batches(tmp_path):
    option, name = SAVED[BACKEND]
    saved, figures = (option, tmp_path / name), tmp_path / "figures.json"
    stopped = run(f"custom_loop_{BACKEND}", "--epochs", 1, *saved, "--stop-after", 99)
    assert stopped.returncode == 0, stopped.stderr
    done = run(f"custom_loop_{BACKEND}", "--epochs", 1, *saved, "--json", figures)
    assert done.returncode == 0, done.stderr
    assert "Going on after 99 micro-steps" in done.stdout
    weighted, alike = json.loads(figures.read_text()).values()
    assert weighted < 1e-6
    assert alike > 1e-2


@pytest.mark.slow
def test_a_stop_without_a_checkpoint_is_refused():
    done = run(f"custom_loop_{BACKEND}", "--stop-after", 9)
    assert done.returncode == 2
    assert "--stop-after must come with" in done.stderr
