"""LoRA and QLoRA on a KerasHub language model, on the batch you want.

A Llama 3 causal language model gets adapters (LoRA), on weights that are quantised if you like
(QLoRA), and is tuned on lines of text that are padded to one length. Only the adapters train, so
only they have accumulators: the first lines print what that takes, and what all weights would.

The loss is the mean over the valid tokens of the large batch. To have that from micro-batches with
`compile` and `fit` or `train_on_batch`, each token weighs 1 / (valid tokens of the large batch),
losses are sums, and so is the window: `reduction="sum"`. What a plain `fit` on micro-batches does
is a mean over each, then a mean of those: tokens of micro-batches with short lines weigh more then.
One model is tuned from the same start in three ways: on whole batches, in that way, and weighted.
Weighted ends 1e-7 from the whole batch, for adapters on float and on int4 weights; with int8, which
rounds activations too, some 1e-6, since float32 rounding now and then tips one over into the next.
(`token_weights.py` does the same in a training loop of one's own, with `apply(weight=...)`.)

It runs offline: the model is a tiny one that reads bytes, and has been trained for some seconds on
Python's own documentation. It is then tuned on scikit-learn's descriptions of its datasets.

    pip install -e ".[tensorflow,examples,hub]"
    python examples/finetune_lora.py --quantize int4

With a real model (a download, and an accelerator is wanted):

    python examples/finetune_lora.py --preset llama3.2_1b --dtype bfloat16 --quantize int8
        --text my_lines.txt --sequence-length 256 --only-accumulated --save my.lora.h5
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from tiny_llama import START, descriptions_of_datasets, make_model, padded, token_loss

import keras_ga

# Layers without weights can't be quantised, and Keras says so of each.
warnings.filterwarnings("ignore", message=".*does not have a `quantize` method")


@dataclass(frozen=True)
class Rows:
    """Padded lines: what the model takes, the tokens that follow, and 1 for those that count."""

    x: dict[str, np.ndarray]
    y: np.ndarray
    valid: np.ndarray


@dataclass(frozen=True)
class Way:
    """One way to tune: its name, rows in a step, the rows whose tokens weigh 1 in all, the sum."""

    name: str
    batch_size: int
    weighed_together: int
    reduction: str | None  # None: the bare optimizer


@dataclass(frozen=True)
class Result:
    """After each update: the loss of lines that stay the same, and the adapters in one vector."""

    losses: np.ndarray
    path: np.ndarray


def batch(rows: Rows, some: np.ndarray, tokens: float) -> dict[str, Any]:
    """Returns some rows as `train_on_batch` takes them, a token weighing 1 / tokens."""
    x = {name: array[some] for name, array in rows.x.items()}
    return {"x": x, "y": rows.y[some], "sample_weight": rows.valid[some] / tokens}


def loss_of(judge: keras.Model, rows: Rows, chosen: argparse.Namespace) -> float:
    """Returns the loss of the first lines, as many as a large batch has."""
    sample = np.arange(chosen.micro_batch * chosen.accumulation_steps)
    tokens = rows.valid[sample].sum()
    parts = sample.reshape(-1, chosen.micro_batch)  # so that it takes no more memory than training
    return sum(float(judge.test_on_batch(**batch(rows, part, tokens))) for part in parts)


def model_and_rows(
    chosen: argparse.Namespace, on_step: Callable[[], None]
) -> tuple[keras.Model, Rows]:
    """Returns the tiny model or the preset's, and the lines as it reads them."""
    lines = descriptions_of_datasets()
    if chosen.text:
        lines = [line for line in chosen.text.read_text().splitlines() if line.strip()]
    length = chosen.sequence_length
    if chosen.preset is None:
        ids, valid = padded([[START, *line.encode()] for line in lines], length + 1)
        x = {"token_ids": ids[:, :-1], "padding_mask": valid[:, :-1]}
        model = make_model(chosen.layers, chosen.base_steps, length, on_step)
        return model, Rows(x, ids[:, 1:], valid[:, 1:])
    model = keras_hub.models.CausalLM.from_preset(chosen.preset, dtype=chosen.dtype)
    x, y, valid = model.preprocessor(lines, sequence_length=length)
    model.preprocessor = None  # the rows have been through it
    x = {name: keras.ops.convert_to_numpy(array) for name, array in x.items()}
    y, valid = (keras.ops.convert_to_numpy(array) for array in (y, valid))
    return model, Rows(x, y, valid.astype("float32"))


def add_adapters(model: keras.Model, chosen: argparse.Namespace) -> dict[str, int]:
    """Quantises the weights if asked to, adds adapters, and returns what accumulators take.

    With int8 the embedding stays as it is: it makes the logits too, and for that Keras 3.15 rounds
    what goes in and passes no true gradient on. (The adapters' gradient then points elsewhere: its
    cosine with that on float weights is -0.5, and 0.9999 with the embedding left out.)
    """
    all_weights = 4 * model.backbone.count_params()  # float32
    if chosen.quantize:
        keep = keras.layers.ReversibleEmbedding if chosen.quantize == "int8" else ()
        model.backbone.quantize(chosen.quantize, filters=lambda layer: not isinstance(layer, keep))
    model.backbone.enable_lora(chosen.rank)
    optimizer = accumulating(keras.optimizers.SGD(0.0), chosen.accumulation_steps, "sum")
    optimizer.build(model.trainable_variables)
    accumulators = [v for v in optimizer.variables if v.path.endswith("_accumulator")]
    adapters = sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in accumulators)
    return {"adapters": adapters, "all_weights": all_weights}


def accumulating(
    optimizer: keras.optimizers.Optimizer, steps: int, reduction: str
) -> keras_ga.GradientAccumulationOptimizer:
    """Returns the optimizer, with an update every so many micro-batches."""
    return keras_ga.GradientAccumulationOptimizer(optimizer, steps, reduction=reduction)


def recipe(chosen: argparse.Namespace, large_batches: int) -> keras.optimizers.Optimizer:
    """Returns the large batch's optimizer: warm-up and cosine decay, counted in updates."""
    micro_steps = large_batches * chosen.accumulation_steps
    updates = keras_ga.total_updates(micro_steps, chosen.epochs, chosen.accumulation_steps)
    warmup = max(1, updates // 10)
    rate = keras.optimizers.schedules.CosineDecay(
        chosen.learning_rate / 10,
        decay_steps=max(1, updates - warmup),
        warmup_target=chosen.learning_rate,
        warmup_steps=warmup,
    )
    return keras.optimizers.AdamW(rate, weight_decay=0.01, global_clipnorm=1.0)


def large_batches(rows: Rows, chosen: argparse.Namespace) -> int:
    """Returns how many whole large batches an epoch has."""
    return len(rows.y) // (chosen.micro_batch * chosen.accumulation_steps)


def in_order(rows: Rows, chosen: argparse.Namespace) -> Iterator[np.ndarray]:
    """Yields the rows of each large batch; the order is each epoch's own."""
    count, size = large_batches(rows, chosen), chosen.micro_batch * chosen.accumulation_steps
    for epoch in range(chosen.epochs):
        order = np.random.default_rng(epoch).permutation(len(rows.y))
        yield from order[: count * size].reshape(count, size)


def flat(variables: Sequence[keras.Variable]) -> np.ndarray:
    """Returns variables in one vector."""
    arrays = [keras.ops.convert_to_numpy(variable) for variable in variables]
    return np.concatenate([array.astype("float32").ravel() for array in arrays])


def tune(
    model: keras.Model,
    judge: keras.Model,
    way: Way,
    rows: Rows,
    chosen: argparse.Namespace,
    on_update: Callable[[], None],
) -> Result:
    """Tunes the adapters in one way."""
    optimizer = recipe(chosen, large_batches(rows, chosen))
    if way.reduction is not None:
        optimizer = accumulating(optimizer, chosen.accumulation_steps, way.reduction)
    model.compile(optimizer, token_loss(), weighted_metrics=[])
    losses, path = [], []
    for large in in_order(rows, chosen):
        for together in large.reshape(-1, way.weighed_together):
            tokens = rows.valid[together].sum()
            for part in together.reshape(-1, way.batch_size):
                model.train_on_batch(**batch(rows, part, tokens))
        losses.append(loss_of(judge, rows, chosen))
        path.append(flat(model.trainable_variables))
        on_update()
    return Result(np.array(losses), np.array(path))


def ways(chosen: argparse.Namespace) -> list[Way]:
    """Lists the ways; the first is the one that the others are measured against."""
    micro, steps = chosen.micro_batch, chosen.accumulation_steps
    accumulated = Way(f"{steps} x {micro}, tokens weighted", micro, micro * steps, "sum")
    if chosen.only_accumulated:
        return [accumulated]
    whole = Way(f"batch of {micro * steps}", micro * steps, micro * steps, None)
    alike = Way(f"{steps} x {micro}, all alike", micro, micro, "mean")
    return [whole, alike, accumulated]


def tune_in_all_ways(
    model: keras.Model, rows: Rows, chosen: argparse.Namespace, progress: Progress
) -> list[dict[str, Any]]:
    """Tunes from the same start in each way, and returns the figures of each."""
    adapters = model.trainable_variables
    start = [keras.ops.convert_to_numpy(variable).copy() for variable in adapters]
    # Of the same backbone; it is not compiled anew for each way.
    judge = type(model)(backbone=model.backbone, preprocessor=None)
    judge.compile(loss=token_loss(), weighted_metrics=[])
    figures, results = [], []
    for way in ways(chosen):
        for variable, value in zip(adapters, start, strict=True):
            variable.assign(value)
        task = progress.add_task(way.name, total=large_batches(rows, chosen) * chosen.epochs)
        advance = lambda task=task: progress.advance(task)  # noqa: E731
        results.append(tune(model, judge, way, rows, chosen, advance))
        away = np.abs(results[-1].path - results[0].path).max(axis=1)
        losses = results[-1].losses.tolist()
        figures.append({"name": way.name, "losses": losses, "differences": away.tolist()})
    return figures


def report(console: Console, figures: dict[str, Any]) -> None:
    """Prints the losses, and how far each way is from the first."""
    table = Table("update", *(way["name"] for way in figures["ways"]), title="loss of a sample")
    updates = len(figures["ways"][0]["losses"])
    for update in sorted({*range(0, updates, max(1, updates // 5)), updates - 1}):
        losses = (f"{way['losses'][update]:.6f}" for way in figures["ways"])
        table.add_row(str(update + 1), *losses)
    console.print(table)
    for way in figures["ways"][1:]:
        away = way["differences"][-1]
        console.print(f"Largest difference of a weight at the end, {way['name']}: {away:.1e}")


def draw_picture(figures: dict[str, Any], title: str, subtitle: str, path: Path) -> None:
    """Draws losses on the left, and how far the weights are from the large batch's."""
    styles = (REFERENCE, {"color": VERMILION, "linewidth": 1.5}, DASHED)
    losses, distances = [], []
    for way, style in zip(figures["ways"], styles, strict=False):
        updates = np.arange(len(way["losses"])) + 1
        losses.append(Line(way["name"], updates, way["losses"], style))
        distances.append(Line(way["name"], updates, way["differences"], style))
    panels = [Panel("Loss of a sample of the lines", "updates", losses)]
    if distances[1:]:
        name = f"Largest weight difference from the {figures['ways'][0]['name']}"
        panels.append(Panel(name, "updates", distances[1:], ("linear", "log")))
    draw(title, subtitle, panels, path)


def options() -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    output = Path(__file__).parent / "output" / "finetune_lora.png"
    add = parser.add_argument
    add("--preset", help="of KerasHub, such as llama3.2_1b; is downloaded (a tiny model)")
    add("--dtype", help="of the preset's weights (its own)")
    add("--quantize", choices=("int8", "int4"), help="QLoRA (LoRA on float weights)")
    add("--rank", type=int, default=8, help="of the adapters (%(default)s)")
    add("--text", type=Path, help="lines to tune on (scikit-learn's dataset descriptions)")
    add("--sequence-length", type=int, default=48, help="tokens of a line (%(default)s)")
    add("--micro-batch", type=int, default=4, help="lines in a micro-batch (%(default)s)")
    add("--accumulation-steps", type=int, default=8, help="micro-batches (%(default)s)")
    add("--epochs", type=int, default=5, help="passes over the lines (%(default)s)")
    add("--learning-rate", type=float, default=5e-3, help="after warm-up (%(default)s)")
    add("--layers", type=int, default=2, help="of the tiny model (%(default)s)")
    add("--base-steps", type=int, default=100, help="to train the tiny model for (%(default)s)")
    add("--only-accumulated", action="store_true", help="no comparison: for large models")
    add("--save", type=Path, help="the tuned adapters (a .lora.h5 file)")
    add("--picture", type=Path, default=output, help="(examples/output/finetune_lora.png)")
    add("--json", type=Path, help="also write all figures to this file")
    chosen = parser.parse_args()
    for name in ("rank", "sequence_length", "micro_batch", "accumulation_steps", "epochs"):
        if (value := getattr(chosen, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1. Received: {value}")
    if chosen.dtype and not chosen.preset:
        parser.error("--dtype must come with --preset, because the tiny model is float32")
    if chosen.save and not chosen.save.name.endswith(".lora.h5"):
        parser.error(f"--save must end in .lora.h5. Received: {chosen.save}")
    return chosen


def main() -> None:
    """Tunes in all ways and shows how they compare."""
    chosen = options()
    console = Console(highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("tiny model", total=chosen.base_steps, visible=not chosen.preset)
        model, rows = model_and_rows(chosen, lambda: progress.advance(task))
        if large_batches(rows, chosen) == 0:
            sys.exit(f"error: {len(rows.y)} lines are fewer than a large batch has")
        memory = add_adapters(model, chosen)
        in_words = (
            f"Accumulators of the adapters take {memory['adapters']:,} bytes; those of all weights "
            f"would take {memory['all_weights']:,}."
        )
        console.print(in_words)
        figures = {"memory": memory, "ways": tune_in_all_ways(model, rows, chosen, progress)}
    report(console, figures)
    title = f"QLoRA ({chosen.quantize})" if chosen.quantize else "LoRA"
    draw_picture(figures, f"{title} on micro-batches", in_words, chosen.picture)
    console.print(f"Picture: {chosen.picture}", soft_wrap=True)
    if chosen.save:
        model.backbone.save_lora_weights(chosen.save)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
