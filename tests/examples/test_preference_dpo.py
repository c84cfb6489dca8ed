"""Preference tuning on accumulated pairs is the large batch's, and learns the preference."""

import json

import pytest
from support_examples import needs, run

needs("sklearn", "matplotlib", "rich", "keras_hub")


def test_accumulated_it_is_the_large_batch_and_learns(tmp_path):
    file, picture = tmp_path / "figures.json", tmp_path / "preference_dpo.png"
    done = run(
        "preference_dpo",
        "--epochs", 3, "--layers", 1, "--base-steps", 30,
        "--json", file, "--picture", picture,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    large, alone, accumulated = json.loads(file.read_text())["ways"]
    assert large["updates"] == accumulated["updates"] == alone["updates"] / 4
    assert accumulated["differences"][-1] < 1e-5
    assert alone["differences"][-1] > 1e-2
    assert accumulated["margins"] == pytest.approx(large["margins"], rel=1e-3, abs=1e-5)
    assert accumulated["margins"][-1] > accumulated["margins"][0] > 0
    assert accumulated["accuracies"][-1] > 0.55  # of 37 pairs; longer training gets to 0.8 and more
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_too_few_pairs_for_a_large_batch_are_refused(tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pair = {"prompt": "Two and two", "chosen": " are four", "rejected": " are five"}
    pairs.write_text(8 * (json.dumps(pair) + "\n"))
    done = run("preference_dpo", "--pairs", pairs, "--base-steps", 0)
    assert done.returncode == 1
    assert "6 pairs to train on are fewer than a large batch has: 16" in done.stderr
