"""Whether a model's batch is the sum of its micro-batches: whole and split, compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_ga.split.step import TrainStep, share_of
from keras_ga.window import Tensor

_TOLERANCE = 1e-4
"""Of relative differences: far above float32's rounding, far below what a wrong divisor makes."""

_OTHERS = "add_loss and regularisers"


class Difference(NamedTuple):
    """One of the things compared."""

    name: str
    whole: float
    split: float
    difference: float
    """Relative to the larger."""


class SplitCheck(NamedTuple):
    """What `check_split` found."""

    exact: bool
    """Whether losses and gradients agree in inference mode, and no layer normalises by its
    micro-batch in training."""
    losses: tuple[Difference, ...]
    """Each compiled loss, what is added to them, and their total."""
    gradients: tuple[Difference, ...]
    """Norms of the gradients, by variable; the difference is that of the vectors."""
    layers: tuple[str, ...]
    """Layers whose output for a row depends on the other rows, with how."""

    def __str__(self) -> str:
        worst = sorted(self.gradients, key=lambda row: -row.difference)[:5]
        rows = [*self.losses, *(row._replace(name=f"gradient of {row.name}") for row in worst)]
        width = max(len(row.name) for row in rows)
        lines = [f"{'':{width}}  {'whole':>12}  {'split':>12}  difference"]
        lines += [
            f"{row.name:{width}}  {row.whole:12.6g}  {row.split:12.6g}  {row.difference:.1e}"
            + ("  <- differs" if row.difference > _TOLERANCE else "")
            for row in rows
        ]
        lines += [f"layer {layer}" for layer in self.layers]
        if self.exact:
            verdict = "exact, but for random numbers" if self.layers else "exact"
        elif _agree(*self.losses, *self.gradients):
            verdict = "exact in inference mode, not exact in training"
        else:
            verdict = "not exact"
        return "\n".join([*lines, verdict])


def _agree(*rows: Difference) -> bool:
    return all(row.difference <= _TOLERANCE for row in rows)


def compared(step: TrainStep, batch: Any, rows: int, size: int) -> SplitCheck:
    """Compares a batch's losses and gradients, whole and split."""
    step.training = False
    whole, split = (_losses(step, batch, rows, of) for of in (rows, size))
    losses = [_difference(name, whole[name], split[name]) for name in whole]
    variables = step.model.trainable_variables
    gradients = [
        _difference(_name(variable), *pair)
        for variable, *pair in zip(
            variables, *(step.gradients(batch, rows, of) for of in (rows, size)), strict=True
        )
    ]
    agree = _agree(*losses, *gradients)
    normalising, drawing = _in_training(step.model)
    layers = [*normalising, *drawing, *([] if agree else _mixing(step, batch, rows, size))]
    return SplitCheck(agree and not normalising, tuple(losses), tuple(gradients), tuple(layers))


def _losses(step: TrainStep, batch: Any, rows: int, size: int) -> dict[str, float]:
    """Each loss of a batch that is worked through in micro-batches, and their total."""
    names = [loss.name for loss in step.divisors.losses]
    sums = dict.fromkeys([*names, _OTHERS, "loss"], 0.0)
    with step.in_place():
        carry = step.backend.start(batch)
        totals = step.totals(carry, batch, rows, size)
        for place, part in step.parts(batch, rows, size):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(part)
            with step.scope(carry.state):
                step.divisors.correct(place.rows, place.of_rows, totals)
                loss = step.loss(x, y, step.predictions(x), sample_weight)
            values = step.divisors.values()
            share = float(share_of(place))
            for index, name in enumerate(names):
                sums[name] += share * _number(values.get(index, 0.0))
            sums["loss"] += share * _number(loss)
            of_compiled = sum(
                (1 if entry.loss_weights is None else entry.loss_weights)
                * _number(values.get(index, 0.0))
                for index, entry in enumerate(step.divisors.losses)
            )
            sums[_OTHERS] += share * (_number(loss) - of_compiled)
    if abs(sums[_OTHERS]) <= 1e-6 * abs(sums["loss"]):
        sums.pop(_OTHERS)
    return sums


def _difference(name: str, whole: Any, split: Any) -> Difference:
    whole, split = np.asarray(whole, "float64"), np.asarray(split, "float64")
    size = max(np.linalg.norm(whole), np.linalg.norm(split))
    apart = float(np.linalg.norm(whole - split))
    relative = float(apart / size if size > 1e-12 else apart)
    of_whole, of_split = (float(v if v.ndim == 0 else np.linalg.norm(v)) for v in (whole, split))
    return Difference(name, of_whole, of_split, relative if np.isfinite(relative) else float("inf"))


def _in_training(model: keras.Model) -> tuple[list[str], list[str]]:
    """Layers that see their micro-batch in training: that normalise by it, that draw for it."""
    normalising, drawing = [], []
    for layer in model._flatten_layers():  # private (Keras 3.15): those in lists and wrappers too
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            normalising.append(f"{layer.name}: normalises by its micro-batch in training")
        elif any(
            isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values()
        ) and getattr(layer, "rate", True):
            drawing.append(f"{layer.name}: draws other random numbers in training")
    return normalising, drawing


def _mixing(step: TrainStep, batch: Any, rows: int, size: int) -> list[str]:
    """Layers that give a row another output when it comes with fewer rows."""
    x, *_ = keras.utils.unpack_x_y_sample_weight(batch)
    with _recorded(step.model) as calls:
        step.predictions(x)
    found = []
    for layer, call, arguments, keywords, output in calls:
        tensors = [
            leaf for leaf in keras.tree.flatten((arguments, keywords)) if _is_batch(leaf, rows)
        ]
        if not tensors or not _is_batch(output, rows):
            continue
        parts = []
        for start in range(0, rows, size):
            arguments_, keywords_ = keras.tree.map_structure(
                lambda leaf, start=start: (
                    leaf[start : start + size] if _is_batch(leaf, rows) else leaf
                ),
                (arguments, keywords),
            )
            parts.append(ops.convert_to_numpy(call(*arguments_, **keywords_)))
        row = _difference(layer.name, ops.convert_to_numpy(output), np.concatenate(parts))
        if row.difference > _TOLERANCE:
            found.append(f"{layer.name}: a row's output depends on the other rows")
    return found


@contextlib.contextmanager
def _recorded(model: keras.Model) -> Iterator[list[tuple[Any, ...]]]:
    """Keeps what innermost layers are called with, and what they return."""
    calls: list[tuple[Any, ...]] = []
    innermost = [layer for layer in model._flatten_layers() if not layer._layers]

    def record(layer: keras.layers.Layer) -> None:
        call = layer.call

        def recording(*arguments: Any, **keywords: Any) -> Any:
            output = call(*arguments, **keywords)
            calls.append((layer, call, arguments, keywords, output))
            return output

        layer.call = recording

    for layer in innermost:
        record(layer)
    try:
        yield calls
    finally:
        for layer in innermost:
            layer.__dict__.pop("call", None)


def _is_batch(leaf: Any, rows: int) -> bool:
    shape = getattr(leaf, "shape", ())
    return bool(ops.is_tensor(leaf) and tuple(shape)[:1] == (rows,))


def _number(value: Tensor) -> float:
    return float(ops.convert_to_numpy(value)) if ops.is_tensor(value) else float(value)


def _name(variable: keras.Variable) -> str:
    return variable.path or variable.name
