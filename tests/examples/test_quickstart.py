"""The main demonstration runs, and shows what it says that it shows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import keras_ga

for needed in ("tensorflow_datasets", "sklearn", "matplotlib", "rich"):
    pytest.importorskip(needed)
if keras.config.backend() != "tensorflow":
    pytest.skip("the README runs it on TensorFlow", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart.py"


def run_quickstart(*arguments, timeout=600, **environment):
    package_root = str(Path(keras_ga.__file__).parents[1])
    python_path = os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env=os.environ
        # On a GPU, convolutions in TF32 round far more coarsely than what is measured here.
        | {"PYTHONPATH": python_path, "CUDA_VISIBLE_DEVICES": "-1", "COLUMNS": "80"}
        | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def short_run(folder):
    process = run_quickstart(
        "--epochs", 2,
        "--data-dir", folder / "data",
        "--output", folder / "pictures" / "quickstart.png",
        "--json", folder / "figures.json",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return folder, process, json.loads((folder / "figures.json").read_text())


def only_keras_ga_stays_on_the_large_batch(short_run):
    _, _, figures = short_run
    large, alone, built_in, ours = figures["ways"]
    updates = 1437 // 128 * 2
    assert [way["updates"] for way in figures["ways"]] == [updates, 8 * updates, updates, updates]
    assert large["difference"] == 0
    assert alone["difference"] > 1e-3
    assert built_in["difference"] > 1e-3
    assert ours["difference"] < 1e-5
    assert max(ours["differences"]) < 1e-5
    assert ours["losses"] == pytest.approx(large["losses"], rel=1e-4)
    assert all(len(way["losses"]) == updates for way in figures["ways"])
    assert large["losses"][-1] < large["losses"][0]


def prints_one_table_and_a_verdict_and_nothing_else(short_run):
    folder, process, figures = short_run
    assert process.stderr == ""
    lines = process.stdout.splitlines()
    assert lines[0].startswith("Reading digits from")
    assert lines[-1] == f"Picture: {folder / 'pictures' / 'quickstart.png'}"
    words = " ".join(process.stdout.split())
    assert "8 x 16, keras_ga" in words
    assert "…" not in words  # nothing is cut off at 80 columns
    assert figures["verdict"] in words
    assert "float32 rounding" in figures["verdict"]


def draws_a_picture(short_run):
    from matplotlib.image import imread

    folder, _, _ = short_run
    picture = imread(folder / "pictures" / "quickstart.png")
    height, width, _ = picture.shape
    assert width > 1000
    assert height > 500
    assert picture.std() > 0.05


def rows_went_through_tfrecord_files(short_run):
    folder, _, _ = short_run
    assert list((folder / "data" / "digits").rglob("digits-train.tfrecord*"))


def refuses_a_batch_larger_than_the_data(short_run):
    folder, _, _ = short_run
    process = run_quickstart("--batch-size", 2048, "--data-dir", folder / "data", timeout=120)
    assert process.returncode == 2
    assert "`digits` has only 1437 training rows for a batch of 2048." in process.stderr


def test_a_short_run(tmp_path):
    """One run for all that is to be seen of it: workers do not share a fixture."""
    run = short_run(tmp_path)
    only_keras_ga_stays_on_the_large_batch(run)
    prints_one_table_and_a_verdict_and_nothing_else(run)
    draws_a_picture(run)
    rows_went_through_tfrecord_files(run)
    refuses_a_batch_larger_than_the_data(run)


def test_without_a_network_says_what_to_do(tmp_path):
    nowhere = "http://127.0.0.1:9"  # the discard port: refused at once
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), nowhere)
    process = run_quickstart(
        "--dataset", "cifar10", "--data-dir", tmp_path, timeout=120, no_proxy="", NO_PROXY="",
        **proxies,
    )  # fmt: skip
    assert process.returncode == 2
    assert process.stderr.startswith(f"error: `cifar10` could not be prepared in {tmp_path}: ")
    assert "Connect to the network, or use `--dataset digits`" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--micro-batch-size", 24, "must divide --batch-size 128 into two or more equal parts"),
        ("--micro-batch-size", 128, "Take one of 1, 2, 4, 8, 16, 32, 64. Received: 128"),
        ("--epochs", 0, "must be at least 1. Received: 0"),
    ],
)
def test_refuses_sizes_that_cannot_be_compared(option, value, message):
    process = run_quickstart(option, value, timeout=120)
    assert process.returncode == 2
    errors = " ".join(process.stderr.split())
    assert f"error: {option} must" in errors
    assert message in errors
    assert "Traceback" not in errors
