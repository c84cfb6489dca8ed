"""The training that is killed in mid-window ends on the bits of the one that never stops."""

import json

import keras
import pytest
from support_examples import needs, run

needs("sklearn", "rich")

if keras.config.backend() != "tensorflow":
    # Whose start is the slowest, so that its part of `test_crashes.py` is left out by default.
    pytestmark = pytest.mark.slow


def test_killed_in_mid_window_it_ends_on_the_same_bits(tmp_path):
    file = tmp_path / "figures.json"
    done = run("resume", "--epochs", 1, "--kills", 1, "--save-every", 20, "--json", file)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    first, second = figures["starts"]
    assert (first["micro_steps"], first["end"], second["end"]) == (0, "killed", "done")
    assert second["micro_steps"] >= 56
    assert second["pending"] > 0
    assert figures["resumed"] == 0
    assert figures["window_lost"] > 1e-3
    assert "0: equal bit for bit" in done.stdout


@pytest.mark.slow
def test_checkpoints_that_never_see_an_open_window_are_refused():
    done = run("resume", "--save-every", 16)
    assert done.returncode == 2
    assert "--save-every must not be a multiple of --accumulation-steps" in done.stderr
