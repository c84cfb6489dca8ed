"""The split run ends at the whole batches' weights; the small batches end elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the examples need the extra `examples`")
pytest.importorskip("sklearn", reason="the examples need the extra `examples`")
SCRIPT = Path(__file__).parents[2] / "examples" / "split_batches.py"


@pytest.mark.skipif(not SCRIPT.exists(), reason="needs the checkout")
def test_split_is_whole(tmp_path):
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--epochs", "1", "--micro-batch", "32", "--json", figures],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    whole, split, small = json.loads(figures.read_text())
    assert split["difference"] < 1e-4
    assert split["updates"] == whole["updates"] == 14
    assert small["difference"] > 1e-2
    assert split["loss"] == pytest.approx(whole["loss"], rel=1e-5)
