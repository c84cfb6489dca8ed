"""Adapters tuned on weighted micro-batches are the large batch's; a mean of means gives others."""

import json

import pytest
from support_examples import needs, run

needs("sklearn", "matplotlib", "rich", "keras_hub")


# int8 rounds activations too, and rounding in float32 may tip one over into the next of 255.
@pytest.mark.parametrize(
    ("quantize", "rounding"),
    [("int4", 1e-5), pytest.param("int8", 1e-4, marks=pytest.mark.slow)],
)
def test_tokens_weighted_it_is_the_large_batch(tmp_path, quantize, rounding):
    file, picture = tmp_path / "figures.json", tmp_path / "finetune_lora.png"
    done = run(
        "finetune_lora",
        "--epochs", 1, "--layers", 1, "--base-steps", 0, "--learning-rate", 0.05,
        "--quantize", quantize, "--json", file, "--picture", picture,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    large, alike, weighted = figures["ways"]
    assert weighted["differences"][-1] < rounding
    assert alike["differences"][-1] > 1e-2
    assert weighted["losses"] == pytest.approx(large["losses"], rel=1e-4)
    # Four bytes for each of the adapters' numbers, and none for the weights that are frozen.
    assert figures["memory"]["adapters"] == 4 * 3_328
    assert figures["memory"]["all_weights"] > 200_000
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_a_file_name_that_keras_hub_would_refuse_at_the_end_is_refused_at_once():
    done = run("finetune_lora", "--save", "adapters.h5")
    assert done.returncode == 2
    assert "--save must end in .lora.h5" in done.stderr
