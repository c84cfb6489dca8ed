"""The benchmarks run, on tiny sizes, and write what they promise; no test looks at a time."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import keras
import pytest

for package in ("matplotlib", "optax", "rich"):
    if find_spec(package) is None:
        pytest.skip(f"the benchmarks need {package}", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CIRCUMSTANCES = {"benchmark", "machine", "versions", "date"}


def needs(backend):
    # Each benchmark starts its own process; once is enough, in the suite of its backend.
    if backend != keras.config.backend():
        pytest.skip("run in the suite of another backend")


def run(script, *arguments, output, returncode=0):
    """Runs a benchmark without a GPU, and returns the finished process."""
    process = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments, "--output", output],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == returncode, process.stdout + process.stderr
    return process


# Importing a backend is what such a process takes its time for: one for all of a script's errors.
REFUSED = """
import json, pathlib, runpy, sys
script, lines = sys.argv[1:]
sys.path.insert(0, str(pathlib.Path(script).parent))
for line in json.loads(lines):
    sys.argv = [script, *line]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        print(stop.code, file=sys.stderr)
    print("END", file=sys.stderr)
"""


def assert_refused(script, cases, output):
    """Each case, some options and a value with a text, ends with code 2 and the text."""
    lines = json.dumps([[*case[:-1], "--output", str(output)] for case in cases])
    process = subprocess.run(
        [sys.executable, "-c", REFUSED, BENCHMARKS / script, lines],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    *errors, rest = process.stderr.split("END\n")
    assert not rest
    for (*_, message), error in zip(cases, errors, strict=True):
        assert message in error
        assert error.endswith("\n2\n")


def read(path):
    figures = json.loads(path.read_text())
    assert set(figures) >= CIRCUMSTANCES
    assert figures["versions"]["keras"]
    assert figures["machine"]["processor"]
    return figures


def assert_picture(path):
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("backend", "options", "steps", "name"),
    [
        # As many parameters as show a copy of them in the plan of the memory.
        ("jax", ["--parameters", "1M"], [2, 3], "micro_step_jax_adam"),
        ("tensorflow", ["--parameters", "1k"], [2, 3], "micro_step_tensorflow_adam"),
        ("torch", ["--parameters", "1k"], [2, 3], "micro_step_torch_adam"),
        pytest.param(
            "jax",
            ["--parameters", "1k", "--optimizer", "muon"],
            [2],
            "micro_step_jax_muon",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "tensorflow",
            ["--parameters", "1k", "--jit"],
            [2],
            "micro_step_tensorflow_jit_adam",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_micro_step(backend, options, steps, name, tmp_path):
    needs(backend)
    sizes = ["--accumulation-steps", ",".join(map(str, steps)), "--batch-size", "2"]
    turns = ["--rounds", "2", "--steps-per-round", "4"]
    process = run("micro_step.py", "--backend", backend, *options, *sizes, *turns, output=tmp_path)
    figures = read(tmp_path / f"{name}.json")
    assert_picture(tmp_path / f"{name}.png")
    sides = {"floor", "bare", "Keras option", "keras_ga"}
    if backend == "jax":
        sides.add("optax.MultiSteps")
    assert [row["accumulation_steps"] for row in figures["rows"]] == steps
    for row in figures["rows"]:
        assert set(row["sides"]) == sides
        assert set(row["times_keras_ga"]) == sides - {"floor", "keras_ga"}
        for side in row["sides"].values():
            assert len(side["milliseconds_by_round"]) == 2
            assert side["milliseconds"] > 0
            assert (side["memory_mib"] is not None) == (backend == "jax")
    # No second copy of weights or of the inner optimizer's state; nothing that grows with N.
    checks = [check["holds"] for check in figures["memory_checks"]]
    assert checks == ([True, True] if backend == "jax" else [])
    assert all(side in process.stdout for side in sides)


def test_memory_plan(tmp_path):
    needs("jax")
    model = ["--layers", "1", "--width", "16", "--heads", "2", "--vocabulary", "50"]
    rows = ["--sequence", "32", "--batch-size", "4", "--micro-batches", "4,1"]
    run("memory_plan.py", *model, *rows, output=tmp_path)
    figures = read(tmp_path / "memory_plan.json")
    assert_picture(tmp_path / "memory_plan.png")
    assert [row["accumulation_steps"] for row in figures["rows"]] == [1, 4]
    whole, split = (row["sides"]["keras_ga"] for row in figures["rows"])
    assert split["temporaries"] < whole["temporaries"]
    # Weights, two slots, an accumulator: four float32 numbers each, and counters.
    assert split["arguments"] == pytest.approx(16 * split["parameters"] / 2**20, rel=0.01)


def test_memory_plan_refuses_micro_batches_that_do_not_divide(tmp_path):
    needs("jax")
    options = ["--batch-size", "64", "--micro-batches", "48"]
    process = run("memory_plan.py", *options, output=tmp_path, returncode=2)
    assert "must divide --batch-size 64" in process.stderr


def test_import_time(tmp_path):
    needs("jax")
    run("import_time.py", "--rounds", "1", output=tmp_path)
    figures = read(tmp_path / "import_time_jax.json")
    assert set(figures["milliseconds"]) == {"keras", "keras and keras_ga", "added by keras_ga"}


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_communication(backend, tmp_path):
    needs(backend)
    sizes = ["--parameters", "1k", "--accumulation-steps", "3", "--batch-size", "8"]
    process = run("communication.py", "--backend", backend, *sizes, output=tmp_path)
    figures = read(tmp_path / f"communication_{backend}.json")
    sides, variables = figures["sides"], figures["variables"]
    weights = 4 * figures["parameters"]
    assert all(side in process.stdout for side in sides)
    bare, large, option, ours = list(sides.values())[:4]
    assert [side["steps"] for side in (bare, large, option, ours)] == [3, 1, 3, 3]
    if backend == "tensorflow":
        assert [step["tensors"] for step in bare["by_step"]] == [variables] * 3
        assert [step["tensors"] for step in large["by_step"]] == [variables]
        # With the sum of weights, one float32, in one pack.
        assert [step["tensors"] for step in ours["by_step"]] == [0, 0, variables + 1]
        assert (ours["reductions"], ours["bytes"]) == (1, weights + 4)
        assert [side["bytes"] for side in (bare, large)] == [3 * weights, weights]
        assert [side["fit"] for side in (bare, large, ours)] == ["runs"] * 3
        # Run eagerly, Keras's option reduces as seldom; compiled, as in `fit`, it does not run.
        assert option["bytes"] == weights
        assert option["fit"].startswith("raises RuntimeError: `merge_call` called")
        return
    # Every micro-step reduces the gradients, whoever accumulates, and the loss in the same pack.
    packed = {"each step": {"all-reduce": {"operations": 1, "bytes": weights + 4}}}
    alone = {**packed, "only in the update": {}}
    assert [side["collectives"] for side in (bare, large, option, ours)] == [alone] * 4
    assert [side["bytes"] // (weights + 4) for side in (bare, large, option, ours)] == [3, 1, 3, 3]
    parts = sides["keras_ga, in parts"]
    gathered = {"all-gather": {"operations": variables, "bytes": weights}}
    assert parts["collectives"] == {**packed, "only in the update": gathered}
    assert parts["bytes"] == ours["bytes"] + weights
    saved = ours["arguments_mib_per_device"] - parts["arguments_mib_per_device"]
    assert saved == pytest.approx(weights * 7 / 8 / 2**20)


def test_communication_refuses_what_it_cannot_count(tmp_path):
    needs("jax")
    cases = [
        ("--batch-size", "12", "must divide by 8, because each device takes as many rows"),
        ("--accumulation-steps", "1", "must be at least 2"),
    ]
    assert_refused("communication.py", cases, tmp_path)


@pytest.mark.slow
def test_batch_norm(tmp_path):
    needs("jax")
    pytest.importorskip("sklearn", reason="the rows are scikit-learn's digits")
    sizes = ["--networks", "dense", "--settings", "2x8", "--momenta", "0.9,0.99"]
    process = run("batch_norm.py", *sizes, "--updates", "3", "--seeds", "2", output=tmp_path)
    figures = read(tmp_path / "batch_norm.json")
    assert_picture(tmp_path / "batch_norm.png")
    ways = {"large batch", "alone", "recalibrated", "adjusted", "pooled", "GroupNorm"}
    assert [row["momentum"] for row in figures["rows"]] == [0.9, 0.99]
    for row in figures["rows"]:
        assert set(row["ways"]) == ways
        error = {way: measured["first_layer_error"] for way, measured in row["ways"].items()}
        assert error.pop("GroupNorm") is None
        assert error["large batch"]["mean"] == 0
        # The first layer is on the pixels, which are the same in all ways.
        assert error["pooled"]["mean"] < 1e-5 < error["adjusted"]["mean"] < error["alone"]["mean"]
        for measured in row["ways"].values():
            assert len(measured["accuracy"]["by_seed"]) == 2
    # Without a momentum, so trained once for both.
    first, second = (row["ways"] for row in figures["rows"])
    for way in ("recalibrated", "GroupNorm"):
        assert first[way]["accuracy"] == second[way]["accuracy"]
    assert all(way in process.stdout for way in ways)


def test_batch_norm_refuses_what_it_cannot_train(tmp_path):
    needs("jax")
    cases = [
        ("--settings", "16x1", "two or more micro-batches of two or more rows"),
        ("--settings", "128", "must be N x rows, such as 16x8"),
        ("--momenta", "0.9,1", "must be numbers between 0 and 1"),
        ("--networks", "transformer", "must be some of convolutions, dense"),
    ]
    assert_refused("batch_norm.py", cases, tmp_path)


def test_gpu_check_without_a_gpu(tmp_path):
    needs("jax")
    process = run("gpu_check.py", "--backends", "jax", output=tmp_path, returncode=2)
    assert "needs an NVIDIA GPU" in process.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_gpu_check_dry_run(tmp_path):
    needs("jax")
    dry = ["--device", "cpu", "--small", "--backends", "jax", "--minutes", "9"]
    run("gpu_check.py", *dry, "--batch-size", "2", "--micro-batches", "1", output=tmp_path)
    figures = read(tmp_path / "gpu_check.json")
    checks = figures["equivalence"]["jax"]["checks"]
    assert all(check["value"] <= check["limit"] for check in checks)
    assert len(checks) == 5
    assert figures["micro_step"]["jax"]["rows"]
    assert {peak["of"] for peak in figures["memory"]["jax"].values()} == {"process, resident"}


def test_gpu_check_reports_what_the_time_does_not_suffice_for(tmp_path):
    needs("jax")
    dry = ["--device", "cpu", "--small", "--backends", "jax", "--minutes", "0.01"]
    process = run("gpu_check.py", *dry, output=tmp_path, returncode=1)
    assert "not run, the time is over" in process.stdout


def test_correctness_is_the_table_in_the_readme(tmp_path):
    needs("tensorflow")
    script, readme = BENCHMARKS / "correctness.py", BENCHMARKS.parent / "README.md"
    figures = tmp_path / "figures.json"
    subprocess.run([sys.executable, script, "--json", figures], check=True, timeout=600)
    lines = [line.split("|") for line in readme.read_text().splitlines() if line.count("|") == 4]
    printed = {cells[1].strip(): cells[2:4] for cells in lines}
    for case, measured in json.loads(figures.read_text()).items():
        built_in, ours = map(float, printed[case])
        assert measured["built_in"] == pytest.approx(built_in, rel=0.1, abs=1e-6)
        assert measured["keras_ga"] < 1e-6
        assert ours < 1e-6


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_split_batches(backend, tmp_path):
    needs(backend)
    options = ["--batch", "8", "--rows", "2", "--models", "dense", "--rounds", "1"]
    run("split_batches.py", "--backend", backend, *options, output=tmp_path)
    figures = json.loads((tmp_path / f"split_batches_{backend}.json").read_text())
    assert figures.keys() >= CIRCUMSTANCES
    whole, split = figures["rows"]
    assert (whole["split"], whole["share"], split["split"]) == (False, 1, True)
    if backend == "jax":  # planned, so the same each time
        assert split["share"] < 0.6
    assert (tmp_path / f"split_batches_{backend}.png").exists()
