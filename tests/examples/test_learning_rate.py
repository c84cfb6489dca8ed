"""Accumulation cuts the gradient's variance by N and is the large batch; small steps are not."""

import json

import keras
import pytest
from support_examples import needs, run

needs("sklearn", "matplotlib", "rich")

if keras.config.backend() != "tensorflow":
    # Of the whole example; that windows are the large batch is tested on each backend.
    pytestmark = pytest.mark.slow


def test_shows_what_accumulation_changes(tmp_path):
    file, picture = tmp_path / "figures.json", tmp_path / "learning_rate.png"
    done = run(
        "learning_rate", "--epochs", 3, "--windows", 24, "--json", file, "--picture", picture
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    # 24 windows tell a variance to some 10 %.
    assert figures["slope"] == pytest.approx(-1, abs=0.2)
    large, accumulated, small_rate, small = figures["ways"]
    assert [way["updates"] for way in figures["ways"]] == [21, 21, 21, 336]
    assert accumulated["difference"] < 1e-6
    assert small["difference"] > 1e-2
    assert small_rate["difference"] > 1e-1
    assert small_rate["losses"][-1] > 2 * large["losses"][-1]
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_a_large_batch_that_is_larger_than_the_data_is_refused():
    done = run("learning_rate", "--accumulation-steps", 200)
    assert done.returncode == 2
    assert "must be at most 1797, the rows that there are. Received: 3200" in done.stderr
