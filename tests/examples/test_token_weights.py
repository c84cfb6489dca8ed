"""The token-weighted loop equals the whole batch; the plain mean of micro-batches does not."""

import json

import keras
import pytest
from support_examples import needs, run

needs("rich")

if keras.config.backend() != "tensorflow":
    # Of the whole example; weights are tested in `test_custom_loops.py` there too.
    pytestmark = pytest.mark.slow


def test_weights_make_it_exact(tmp_path):
    figures = tmp_path / "figures.json"
    done = run("token_weights", "--updates", "3", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    whole, weighted, plain = json.loads(figures.read_text()).values()
    assert whole["difference"] == 0
    assert weighted["difference"] < 1e-6
    assert plain["share"] > 0.05


def test_a_micro_batch_that_does_not_divide_is_refused():
    done = run("token_weights", "--micro-batch", "5")
    assert done.returncode == 2
    assert "--micro-batch must divide 16" in done.stderr
