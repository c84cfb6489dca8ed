"""A window's state in a file, and the state of optimizers that have no window."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np

from keras_ga.window import Window, empty_total, number

# Files without a number are of format 1.
_FORMAT = 1


def write(window: Window, store: Any) -> None:
    """Writes a window's state."""
    store["format"] = np.array(_FORMAT)
    for key, variable in _saved(window).items():
        value = keras.ops.convert_to_numpy(variable)
        if key.startswith("accumulator_") and number(window.pending) == 0:
            # It may still hold the last window, which counts as nothing (on JAX).
            index = int(key.removeprefix("accumulator_"))
            value = np.full_like(value, empty_total(window.variables[index]))
        store[key] = value


def is_of_a_wrapper(store: Any) -> bool:
    """Whether a file is of a `GradientAccumulationOptimizer`."""
    return "micro_steps" in store


def read(optimizer: Any, window: Window, store: Any) -> None:
    """Reads a window's state.

    Raises:
        ValueError: If the file is of a later version; nothing is changed then.
    """
    if "format" in store and int(store["format"][()]) > _FORMAT:
        raise ValueError(
            "The file must be of this version of keras_ga or an earlier one, because it may "
            "hold what this one does not know. Install the version that wrote it. Received: "
            f"format {int(store['format'][()])}, this version reads up to {_FORMAT}"
        )
    # All is read before anything is set, so that a file that breaks off changes nothing.
    found = {key: store[key][()] for key in store.keys()}  # noqa: SIM118 - no dict, in HDF5
    saved = _saved(window)
    known = {key: tuple(variable.shape) for key, variable in saved.items()}
    unfit = [
        key
        for key in sorted({*found, *known} - {"format"})
        if key not in found or np.shape(found[key]) != known.get(key)
    ]
    if unfit:
        _leave_window_out(optimizer, window, int(found["pending"]), unfit)
    kept = ("pending", "weight_sum", "accumulator_") if unfit else ()
    for key, variable in saved.items():
        if key not in unfit and not key.startswith(kept):
            variable.assign(found[key])


def read_of_keras(inner_optimizer: keras.optimizers.Optimizer, store: Any) -> None:
    """Reads the state of an optimizer without wrapper, so that training goes on under one."""
    inner_optimizer.load_own_variables(store)
    # Private (Keras 3.15). What else could have that many more can't be told from a file.
    trainable = inner_optimizer._trainable_variables
    if trainable and len(store.keys()) == len(inner_optimizer.variables) + len(trainable):
        warnings.warn(
            "The file may be of an optimizer with Keras's `gradient_accumulation_steps`: it has "
            "one variable too many for each that is trained. Nothing of it was loaded. Load it "
            "into that optimizer, then pass it to `GradientAccumulationOptimizer.from_builtin`, "
            "which takes its state over.",
            stacklevel=3,
        )


def take_over(
    builtin: keras.optimizers.Optimizer, inner: keras.optimizers.Optimizer, window: Window
) -> None:
    """Copies the state of an optimizer with Keras's `gradient_accumulation_steps`.

    It holds sums of gradients, and its counter counts micro-batches.
    """
    steps = builtin.gradient_accumulation_steps
    accumulators = builtin._accumulated_gradients  # private (Keras 3.15), as is the counter
    micro_steps = number(builtin._iterations)
    others = {id(variable) for variable in accumulators}
    state = [variable for variable in builtin.variables if id(variable) not in others]
    for variable, of_builtin in zip(inner.variables, state, strict=True):
        # A copy: on JAX two variables would have one buffer, which a step donates.
        variable.assign(keras.ops.copy(of_builtin.value))
    inner.iterations.assign(micro_steps // steps)
    if micro_steps % steps:
        for accumulator, of_builtin in zip(window.accumulators, accumulators, strict=True):
            copied = keras.ops.copy(of_builtin.value)
            accumulator.assign(keras.ops.cast(copied, accumulator.dtype))
    window.micro_steps.assign(micro_steps)
    window.pending.assign(micro_steps % steps)
    window.weight_sum.assign(micro_steps % steps)
    window.has_updated.assign(micro_steps > 0 and micro_steps % steps == 0)
    # Keras leaves variables without a gradient out of an update. In the open window those have sums
    # of 0; after it each micro-step shows it anew.
    sums = map(keras.ops.convert_to_numpy, accumulators)
    window.has_gradient.assign([bool(np.any(of_variable)) for of_variable in sums])


def _leave_window_out(optimizer: Any, window: Window, pending: int, unfit: list[str]) -> None:
    """Starts an empty window instead of a file's, and says so if that was not empty."""
    optimizer.reset_window()
    if pending == 0:
        return
    reason = (
        f"it is of other variables: {', '.join(unfit)} do not fit"
        if window.accumulators
        else "this optimizer has no accumulators: construct it with accumulation_steps > 1"
    )
    warnings.warn(
        f"The file holds a window of {pending} micro-batches, which is left out, because "
        f"{reason}. Training goes on with an empty one.",
        stacklevel=4,
    )


def _saved(window: Window) -> dict[str, keras.Variable]:
    # Accumulators by position: a variable's name counts the layers made before it.
    accumulators = {f"accumulator_{i}": a for i, a in enumerate(window.accumulators)}
    return {
        "micro_steps": window.micro_steps,
        "pending": window.pending,
        "weight_sum": window.weight_sum,
        "has_updated": window.has_updated,
        "has_gradient": window.has_gradient,
        "dropped_micro_steps": window.dropped_micro_steps,
        "skipped_updates": window.skipped_updates,
        **accumulators,
    }
