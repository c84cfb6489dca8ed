"""The BatchNormalization example runs, and shows what it says that it shows."""

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
    pytest.skip("once is enough, on the examples' default backend", allow_module_level=True)

SCRIPT = Path(__file__).parents[2] / "examples" / "batch_norm.py"
NAMES = [
    "large batch",
    "alone",
    "alone, recalibrated",
    "momentum adjusted",
    "pooled statistics",
    "GroupNormalization",
]


def run_example(*arguments):
    package_root = str(Path(keras_ga.__file__).parents[1])
    python_path = os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": python_path, "CUDA_VISIBLE_DEVICES": "-1", "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def short_run(folder):
    process = run_example(
        "--epochs", 1,
        "--micro-batch-size", 32,
        "--data-dir", folder / "data",
        "--output", folder / "pictures" / "batch_norm.png",
        "--json", folder / "figures.json",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return folder, process, json.loads((folder / "figures.json").read_text())


def all_ways_make_the_large_batchs_updates(short_run):
    _, _, figures = short_run
    assert [way["name"] for way in figures["ways"]] == NAMES
    assert {way["updates"] for way in figures["ways"]} == {1437 // 128}
    assert all(0 <= way["accuracy"] <= 1 for way in figures["ways"])
    assert figures["initial_statistics_left"] == pytest.approx(0.99**11)


def running_statistics_never_enter_training(short_run):
    _, _, figures = short_run
    assert figures["largest_weight_difference"] == 0


def only_the_first_layer_can_have_the_large_batchs_statistics(short_run):
    _, _, figures = short_run
    ways = {way["name"]: way for way in figures["ways"]}
    first = {name: way["first_layer_error"] for name, way in ways.items()}
    deeper = {name: way["deeper_layers_error"] for name, way in ways.items()}
    # On the pixels, which training does not change.
    assert first["large batch"] == 0
    assert first["pooled statistics"] < 1e-6
    assert first["pooled statistics"] < first["momentum adjusted"] < 1e-2
    assert first["alone"] > 0.1
    # The forward pass normalises by micro-batches, and the weights have been trained so.
    assert 1e-5 < deeper["pooled statistics"] < deeper["alone"]
    assert first["GroupNormalization"] is None
    assert deeper["GroupNormalization"] is None


def recalibration_changes_the_statistics_alone(short_run):
    _, _, figures = short_run
    _, alone, recalibrated, *_ = figures["ways"]
    assert recalibrated["first_layer_error"] != alone["first_layer_error"]
    assert recalibrated["updates"] == alone["updates"]


def prints_one_table_and_a_verdict_and_nothing_else(short_run):
    folder, process, figures = short_run
    assert process.stderr == ""
    lines = process.stdout.splitlines()
    assert lines[0].startswith("Reading digits from")
    assert lines[-1] == f"Picture: {folder / 'pictures' / 'batch_norm.png'}"
    words = " ".join(process.stdout.split())
    assert all(name in words for name in NAMES)
    assert "…" not in words  # nothing is cut off at 80 columns
    assert "pooled statistics: bit-equal." in words
    assert figures["verdict"] in words
    assert "float32 rounding" in figures["verdict"]


def draws_a_picture(short_run):
    from matplotlib.image import imread

    folder, _, _ = short_run
    picture = imread(folder / "pictures" / "batch_norm.png")
    height, width, _ = picture.shape
    assert width > 1000
    assert height > 500
    assert picture.std() > 0.05


def test_a_short_run(tmp_path):
    """One run for all that is to be seen of it: workers do not share a fixture."""
    run = short_run(tmp_path)
    all_ways_make_the_large_batchs_updates(run)
    running_statistics_never_enter_training(run)
    only_the_first_layer_can_have_the_large_batchs_statistics(run)
    recalibration_changes_the_statistics_alone(run)
    prints_one_table_and_a_verdict_and_nothing_else(run)
    draws_a_picture(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--micro-batch-size", 1, "because a row alone has no variance. Take one of 2, 4, 8, 16"),
        ("--momentum", 1, "must be between 0 and 1. Received: 1.0"),
    ],
)
def test_refuses_what_cannot_be_compared(option, value, message):
    process = run_example(option, value)
    assert process.returncode == 2
    errors = " ".join(process.stderr.split())
    assert f"error: {option} must" in errors
    assert message in errors
    assert "Traceback" not in errors
