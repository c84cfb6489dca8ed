"""The arithmetic of a window: what a micro-batch adds, and what an update is made of.

For micro-gradients `g_1..g_n` with weights `w_1..w_n`, a window holds

    A = sum(w_i * g_i)        W = sum(w_i)        n = how many there were

and closes when `n` reaches the accumulation steps `N`. The inner optimizer then sees `A / W`
(`reduction="mean"`) or `A` (`reduction="sum"`), once, and a window of nothing opens. Everything
here is written on values with `keras.ops`; where the values live, and how a window is closed
inside a compiled step, is the engines' part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_ga.arguments import checked_schedule_value

Tensor = Any  # a tensor of whichever backend Keras runs on
REDUCTIONS = ("mean", "sum")
NONFINITE = ("propagate", "drop")


@dataclass(frozen=True, eq=False)
class Window:
    """The state of an optimizer's open window, and the rules it is judged by.

    Every variable here is in `optimizer.variables`, so it travels through whatever carries an
    optimizer: checkpoints, JAX's functional state, distribution.
    """

    variables: list[keras.Variable]
    """The trainable variables, in the order of `build`."""
    accumulators: list[keras.Variable]
    """A, one for each of `variables`; empty for N = 1, which needs none.

    While nothing is pending A counts as nothing, whatever it holds: the JAX engine empties it at
    the next addition, the others when the window closes.
    """
    micro_steps: keras.Variable
    """Micro-steps in all, since the optimizer was made."""
    pending: keras.Variable
    """n: micro-batches in the open window."""
    weight_sum: keras.Variable
    """W: the sum of their weights."""
    has_updated: keras.Variable
    """Whether the last micro-step (or flush) made an update."""
    has_gradient: keras.Variable
    """One flag for each of `variables`: has it ever had a gradient that was not None?"""
    dropped_micro_steps: keras.Variable
    """Micro-batches left out for a non-finite gradient (`nonfinite="drop"`)."""
    skipped_updates: keras.Variable
    """Windows that closed with W = 0, and so without an update."""
    iterations: keras.Variable
    """Updates made: the inner optimizer's counter."""
    accumulation_steps: keras.Variable | None
    """N, a variable so that it can be set without a retrace; None where a schedule gives it."""
    schedule: Callable[[Any], Any] | None
    """N as a function of the updates made."""
    reduction: str
    nonfinite: str
    sharded: bool = False
    """Whether accumulators are cut along a mesh axis that their variables are not (JAX)."""

    def steps(self, read: Callable[[keras.Variable], Any] = lambda variable: variable.value) -> Any:
        """N as it stands now; `read` gets at a variable's value."""
        if self.schedule is not None:
            return checked_schedule_value(self.schedule(read(self.iterations)))
        return read(self.accumulation_steps)


class Admission(NamedTuple):
    """Whether a micro-batch counts in its window, and for how much.

    The flags are None where the answer is known without looking at a tensor, so that the plain
    case (no weight, `nonfinite="propagate"`) compiles to an addition and nothing else.
    """

    weight: Tensor | None
    """What it adds to W: its weight, 0 if it is not admitted; None: it counts for 1."""
    admitted: Tensor | None
    """Scalar bool; None: it is."""
    dropped: Tensor | None
    """Scalar bool, left out because of a NaN or inf; None: it isn't."""


def admit(
    gradients: Sequence[Tensor | None], weight: Tensor | float | None, window: Window
) -> Admission:
    """Judges one micro-batch by its gradients (dense values; None where there are none)."""
    dtype = window.weight_sum.dtype
    if weight is not None:
        weight = ops.cast(ops.convert_to_tensor(weight), dtype)
    if window.nonfinite == "drop":
        checked = [g for g in [*gradients, weight] if g is not None]
        finite = ops.all(ops.stack([ops.all(ops.isfinite(g)) for g in checked]))
        dropped = ops.logical_not(finite)
        admitted = finite if weight is None else ops.logical_and(finite, ops.not_equal(weight, 0))
    elif weight is not None:
        admitted, dropped = ops.not_equal(weight, 0), None
    else:
        return Admission(None, None, None)
    counts_for = ops.ones((), dtype) if weight is None else weight
    return Admission(ops.where(admitted, counts_for, ops.zeros((), dtype)), admitted, dropped)


def weighted(gradient: Tensor, admission: Admission, dtype: str) -> Tensor:
    """What a gradient adds to its accumulator, w * g in the accumulator's dtype.

    A micro-batch that is not admitted is left out with a select, never by multiplying with its
    zero weight: 0 * NaN is NaN.
    """
    gradient = ops.cast(gradient, dtype)
    if admission.weight is not None:
        gradient = ops.multiply(gradient, ops.cast(admission.weight, dtype))
    if admission.admitted is not None:
        gradient = ops.where(admission.admitted, gradient, ops.zeros_like(gradient))
    return gradient


def largest(total: Tensor, gradient: Tensor, admission: Admission, dtype: str) -> Tensor:
    """The elementwise maximum over the window so far, for variables a gradient overwrites.

    Float8 training hands new scales over as gradients; their window is the largest of them,
    which is what Keras's own accumulation keeps too. They are neither weighted nor divided.
    """
    larger = ops.maximum(total, ops.cast(gradient, dtype))
    return larger if admission.admitted is None else ops.where(admission.admitted, larger, total)


def window_gradient(
    total: Tensor, weight_sum: Tensor, variable: keras.Variable, reduction: str
) -> Tensor:
    """The gradient that an update of `variable` is made with, in the variable's own dtype."""
    if overwrites(variable):
        nothing_came = ops.equal(total, empty_total(variable))
        value = ops.where(nothing_came, ops.cast(variable, total.dtype), total)
    elif reduction == "mean":
        # In 16 bits a sum of weights would overflow or lose its last digits.
        total = ops.cast(total, wide_dtype(total.dtype))
        # A product and not a quotient: XLA computes a division once and keeps it, a copy of the
        # weights, but repeats a cheap product wherever it is used.
        value = ops.multiply(total, ops.divide(1.0, ops.cast(weight_sum, total.dtype)))
    else:
        value = total
    return ops.cast(value, variable.dtype)


def number(variable: Any) -> int:
    """The value of a counter, also of one that replicas have copies of (`int` refuses those)."""
    try:
        return int(variable)
    except TypeError:
        return int(variable.numpy())


def empty_total(variable: keras.Variable) -> float:
    """What the accumulator of `variable` holds when a window opens."""
    return float("-inf") if overwrites(variable) else 0.0


def overwrites(variable: keras.Variable) -> bool:
    """Whether the gradient of `variable` is its next value (Keras's float8 scales)."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def accumulator_dtype(variable: keras.Variable, requested: str | None = None) -> str:
    """The dtype to accumulate in: float32 for the narrower floats, else the variable's own.

    In bfloat16 the sum of 1,024 ones stops at 256: past that a one is rounded away.
    """
    return wide_dtype(variable.dtype) if requested is None else requested


def wide_dtype(dtype: Any) -> str:
    """`dtype`, but float32 for the narrower floats."""
    name = str(keras.backend.standardize_dtype(dtype))
    narrow = name in ("float16", "bfloat16") or name.startswith("float8")
    return "float32" if narrow else name
