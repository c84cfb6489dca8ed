"""Direct preference optimisation (DPO) with accumulation: from pairs of a better and a worse text.

A policy is to prefer the chosen continuation of a prompt to the rejected one. Its reward for a text
is beta times the log of (its probability by the policy / that by a frozen reference copy), and the
loss of a pair is -log(sigmoid(reward of chosen - reward of rejected)). A pair takes four forward
passes and two of them are kept for backward, so few pairs fit at a time; accumulation makes the
batch of them that the recipe asks for. The loss is a mean over pairs, so micro-batches of equally
many pairs need no weights, and the accumulated run ends on the large batch's weights.

`Preference` gives the reward margin of each pair, and plain binary cross-entropy does the rest, so
it trains with `compile` and `fit` on each backend. The policy is tuned through adapters (LoRA); the
reference's weights are frozen, so there are accumulators for the adapters only. The last way is the
small batch with the large batch's recipe, for comparison: it makes more updates, and noisier ones.

It runs offline, with a tiny model of bytes: the chosen text is a line of scikit-learn's dataset
descriptions, the rejected one the same line, with the letters of its second half in disorder.
A quarter of the pairs is held out for the margins and the accuracy that are shown.

    pip install -e ".[tensorflow,examples,hub]"
    python examples/preference_dpo.py

With a real model, and pairs of your own ({"prompt": ..., "chosen": ..., "rejected": ...} a line):

    python examples/preference_dpo.py --preset llama3.2_1b_instruct --pairs pairs.jsonl
        --sequence-length 512 --learning-rate 1e-5

It prints a table and draws `examples/output/preference_dpo.png`.

References:
    Rafailov et al., 2023, https://arxiv.org/abs/2305.18290
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

try:
    import keras_hub
except ModuleNotFoundError:
    sys.exit("This example needs KerasHub: pip install 'keras-ga[hub]'")

import keras
import numpy as np
from pictures import DASHED, REFERENCE, VERMILION, Line, Panel, draw
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tiny_llama import START, descriptions_of_datasets, make_model, padded

import keras_ga

Pairs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Way:
    """One way to train: its name, the pairs in a step, and N (None: no accumulation)."""

    name: str
    batch_size: int
    accumulation_steps: int | None


@dataclass(frozen=True)
class Result:
    """After each large batch, on pairs held out: mean margin and accuracy; and the weights."""

    margins: list[float]
    accuracies: list[float]
    path: np.ndarray
    updates: int


class Preference(keras.Model):
    """The reward margin of pairs: how much more the policy likes the chosen one."""

    def __init__(self, policy: keras.Model, reference: keras.Model, beta: float) -> None:
        """Takes two language models, of which the second is frozen here."""
        super().__init__()
        reference.trainable = False
        self.policy, self.reference, self.beta = policy, reference, beta

    def call(self, pairs: dict[str, Any]) -> Any:
        """Returns the margins (pairs, 1)."""
        ids, counts = (
            keras.ops.concatenate([pairs[f"chosen_{what}"], pairs[f"rejected_{what}"]])
            for what in ("ids", "counts")
        )
        ratio = log_probability(self.policy, ids, counts) - log_probability(
            self.reference, ids, counts
        )
        chosen, rejected = keras.ops.split(ratio, 2)
        return self.beta * (chosen - rejected)[:, None]


def log_probability(model: keras.Model, ids: Any, counts: Any) -> Any:
    """Returns the log-probability of each row's tokens that count, given those before."""
    tokens = ids[:, :-1]
    logits = model({"token_ids": tokens, "padding_mask": keras.ops.ones_like(tokens)})
    losses = keras.losses.sparse_categorical_crossentropy(ids[:, 1:], logits, from_logits=True)
    return -keras.ops.sum(losses * counts[:, 1:], axis=1)


def shipped_pairs() -> list[dict[str, str]]:
    """Returns lines, and the same ones with the letters of the second half in disorder."""
    disorder = np.random.default_rng(0)
    pairs = []
    for line in descriptions_of_datasets():
        half = len(line) // 2
        letters = list(line[half:])
        disorder.shuffle(letters)
        pairs.append({"prompt": line[:half], "chosen": line[half:], "rejected": "".join(letters)})
    return [pair for pair in pairs if len(pair["chosen"]) > 8]


def as_arrays(
    pairs: Sequence[dict[str, str]], tokenize: Callable[[str], list[int]], start: int, length: int
) -> Pairs:
    """Returns padded token ids of prompt and answer, and 1 for the tokens of the answer."""
    arrays = {}
    for answer in ("chosen", "rejected"):
        prompts = [[start, *tokenize(pair["prompt"])] for pair in pairs]
        rows = [
            [*prompt, *tokenize(pair[answer])] for prompt, pair in zip(prompts, pairs, strict=True)
        ]
        ids, counts = padded(rows, length)
        for row, prompt in enumerate(prompts):
            counts[row, : len(prompt)] = 0
        arrays |= {f"{answer}_ids": ids, f"{answer}_counts": counts}
    return arrays


def models_and_pairs(
    chosen: argparse.Namespace, on_step: Callable[[], None]
) -> tuple[keras.Model, keras.Model, Pairs]:
    """Returns policy and reference, which are equal as yet, and the pairs as they read them."""
    if chosen.preset is None:
        length = chosen.sequence_length
        reference = make_model(chosen.layers, chosen.base_steps, length, on_step)
        policy = make_model(chosen.layers, 0, length, on_step)
        policy.set_weights(reference.get_weights())
        tokenize, start = (lambda text: list(text.encode())), START
    else:
        policy, reference = (
            keras_hub.models.CausalLM.from_preset(chosen.preset, dtype=chosen.dtype)
            for _ in range(2)
        )
        tokenizer = policy.preprocessor.tokenizer
        start = tokenizer.start_token_id

        def tokenize(text: str) -> list[int]:
            return np.asarray(keras.ops.convert_to_numpy(tokenizer(text))).tolist()

    policy.backbone.enable_lora(chosen.rank)
    pairs = shipped_pairs()
    if chosen.pairs:
        pairs = [json.loads(line) for line in chosen.pairs.read_text().splitlines() if line]
    return policy, reference, as_arrays(pairs, tokenize, start, chosen.sequence_length)


def some(pairs: Pairs, rows: np.ndarray) -> Pairs:
    """Returns some of the pairs."""
    return {name: array[rows] for name, array in pairs.items()}


def split(pairs: Pairs, chosen: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows to train on, in whole large batches (updates, rows), and those held out."""
    count, size = len(pairs["chosen_ids"]), chosen.micro_batch * chosen.accumulation_steps
    order = np.random.default_rng(0).permutation(count)
    kept, held_out = order[count // 4 :], order[: count // 4]
    per_epoch = len(kept) // size
    if per_epoch == 0:
        sys.exit(f"error: {len(kept)} pairs to train on are fewer than a large batch has: {size}")
    epochs = [
        np.random.default_rng(epoch).permutation(kept)[: per_epoch * size]
        for epoch in range(chosen.epochs)
    ]
    return np.concatenate(epochs).reshape(-1, size), held_out


def recipe(chosen: argparse.Namespace, large_batches: int) -> keras.optimizers.Optimizer:
    """Returns the large batch's optimizer: warm-up and cosine decay, counted in its updates."""
    steps = chosen.accumulation_steps
    updates = keras_ga.total_updates(large_batches * steps, epochs=1, accumulation_steps=steps)
    warmup = max(1, updates // 10)
    rate = keras.optimizers.schedules.CosineDecay(
        chosen.learning_rate / 10,
        decay_steps=max(1, updates - warmup),
        warmup_target=chosen.learning_rate,
        warmup_steps=warmup,
    )
    return keras.optimizers.AdamW(rate, weight_decay=0.01, global_clipnorm=1.0)


def train(
    model: Preference,
    judge: Preference,
    way: Way,
    pairs: Pairs,
    chosen: argparse.Namespace,
    on_large_batch: Callable[[], None],
) -> Result:
    """Trains the policy's adapters in one way."""
    large_batches, held_out = split(pairs, chosen)
    optimizer = recipe(chosen, len(large_batches))
    if way.accumulation_steps is not None:
        optimizer = keras_ga.GradientAccumulationOptimizer(optimizer, way.accumulation_steps)
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    margins, accuracies, path = [], [], []
    for large in large_batches:
        for rows in large.reshape(-1, way.batch_size):
            model.train_on_batch(some(pairs, rows), np.ones((len(rows), 1), "float32"))
        margin = judge.predict_on_batch(some(pairs, held_out))
        margins.append(float(margin.mean()))
        accuracies.append(float((margin > 0).mean()))
        path.append(flat(model.trainable_variables))
        on_large_batch()
    return Result(margins, accuracies, np.array(path), int(optimizer.iterations))


def flat(variables: Sequence[keras.Variable]) -> np.ndarray:
    """Returns variables in one vector."""
    arrays = [keras.ops.convert_to_numpy(variable) for variable in variables]
    return np.concatenate([array.astype("float32").ravel() for array in arrays])


def ways(chosen: argparse.Namespace) -> list[Way]:
    """Lists the ways; the first is the one that the others are measured against."""
    micro, steps = chosen.micro_batch, chosen.accumulation_steps
    return [
        Way(f"batch of {micro * steps}", micro * steps, None),
        Way(f"batch of {micro} alone", micro, None),
        Way(f"{steps} x {micro}, accumulated", micro, steps),
    ]


def train_in_all_ways(chosen: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """Trains from the same start in each way, and returns the figures of each."""
    base = progress.add_task("tiny model", total=chosen.base_steps, visible=not chosen.preset)
    policy, reference, pairs = models_and_pairs(chosen, lambda: progress.advance(base))
    adapters = policy.trainable_variables
    start = [keras.ops.convert_to_numpy(variable).copy() for variable in adapters]
    # Of the same two models; it is not compiled anew for each way.
    judge = Preference(policy, reference, chosen.beta)
    figures, results = [], []
    for way in ways(chosen):
        for variable, value in zip(adapters, start, strict=True):
            variable.assign(value)
        task = progress.add_task(way.name, total=len(split(pairs, chosen)[0]))
        advance = lambda task=task: progress.advance(task)  # noqa: E731
        model = Preference(policy, reference, chosen.beta)
        results.append(train(model, judge, way, pairs, chosen, advance))
        away = np.abs(results[-1].path - results[0].path).max(axis=1)
        figures.append(
            {
                "name": way.name,
                "updates": results[-1].updates,
                "margins": results[-1].margins,
                "accuracies": results[-1].accuracies,
                "differences": away.tolist(),
            }
        )
    return figures


def report(console: Console, figures: dict[str, Any]) -> None:
    """Prints what each way comes to."""
    table = Table("way", "updates", "reward margin", "accuracy", "largest difference")
    for way in figures["ways"]:
        table.add_row(
            way["name"],
            str(way["updates"]),
            f"{way['margins'][-1]:.3f}",
            f"{way['accuracies'][-1]:.1%}",
            f"{way['differences'][-1]:.1e}",
        )
    console.print(table)
    console.print("Margin (0 at the start) and accuracy are those of the pairs held out.")


def draw_picture(figures: dict[str, Any], path: Path) -> None:
    """Draws margins, accuracies, and how far the weights are from the large batch's."""
    styles = (REFERENCE, {"color": VERMILION, "linewidth": 1.5}, DASHED)
    titles = {
        "margins": "Reward margin, pairs held out",
        "accuracies": "Share of them where chosen is preferred",
        "differences": f"Largest weight difference from the {figures['ways'][0]['name']}",
    }
    panels = []
    for what, title in titles.items():
        scales = ("linear", "log" if what == "differences" else "linear")
        lines = [
            Line(way["name"], np.arange(len(way[what])) + 1, way[what], style)
            for way, style in zip(figures["ways"], styles, strict=True)
        ]
        shown = lines[1:] if what == "differences" else lines
        panels.append(Panel(title, "large batches seen", shown, scales))
    away = figures["ways"][-1]["differences"][-1]
    subtitle = f"Accumulated, the weights end within {away:.0e} of the large batch's."
    draw("Direct preference optimisation", subtitle, panels, path)


def options() -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    output = Path(__file__).parent / "output" / "preference_dpo.png"
    add = parser.add_argument
    add("--preset", help="of KerasHub, such as llama3.2_1b_instruct; is downloaded (a tiny model)")
    add("--dtype", help="of the preset's weights (its own)")
    add("--pairs", type=Path, help="a JSON object with prompt, chosen, rejected a line (made here)")
    add("--rank", type=int, default=8, help="of the policy's adapters (%(default)s)")
    add("--beta", type=float, default=0.1, help="of the reward (%(default)s)")
    add("--sequence-length", type=int, default=64, help="tokens, the rest is cut (%(default)s)")
    add("--micro-batch", type=int, default=4, help="pairs in a micro-batch (%(default)s)")
    add("--accumulation-steps", type=int, default=4, help="micro-batches (%(default)s)")
    add("--epochs", type=int, default=4, help="passes over the pairs (%(default)s)")
    add("--learning-rate", type=float, default=1e-2, help="after warm-up (%(default)s)")
    add("--layers", type=int, default=2, help="of the tiny model (%(default)s)")
    add("--base-steps", type=int, default=100, help="to train the tiny model for (%(default)s)")
    add("--picture", type=Path, default=output, help="(examples/output/preference_dpo.png)")
    add("--json", type=Path, help="also write all figures to this file")
    chosen = parser.parse_args()
    least_one = ("rank", "sequence_length", "micro_batch", "accumulation_steps", "epochs", "layers")
    for name in least_one:
        if (value := getattr(chosen, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1. Received: {value}")
    if chosen.beta <= 0:
        parser.error(f"--beta must be above 0. Received: {chosen.beta}")
    if chosen.dtype and not chosen.preset:
        parser.error("--dtype must come with --preset, because the tiny model is float32")
    return chosen


def main() -> None:
    """Trains in all ways and shows how they compare."""
    chosen = options()
    console = Console(highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        figures = {"ways": train_in_all_ways(chosen, progress)}
    report(console, figures)
    draw_picture(figures, chosen.picture)
    console.print(f"Picture: {chosen.picture}", soft_wrap=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
