"""Checks of what a caller passes in, with errors that say what to write instead."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

# Arguments of Keras's base optimizer. They act on an update, so they belong to the inner one.
_INNER_ARGUMENTS = (
    "learning_rate",
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


def _received(name: str, value: Any) -> str:
    return f"Received: {name}={value!r} (of type {type(value).__name__})"


_LARGEST_COUNT = 2**31 - 1


def _checked_count(name: str, value: Any, counted: str, at_least_one: str) -> int:
    """An int >= 1 (a NumPy one too; `True`, `2.5` and `"4"` are not)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"`{name}` must be an int >= 1, because {counted} are counted. Pass a whole number. "
            f"{_received(name, value)}"
        )
    if value < 1:
        raise ValueError(
            f"`{name}` must be an int >= 1, because {at_least_one}. {_received(name, value)}"
        )
    return int(value)


def checked_steps(name: str, value: Any) -> int:
    """A count of micro-batches or updates, below 2**31."""
    at_least_one = "an update needs a micro-batch. Pass 1 to make an update at every step"
    steps = _checked_count(name, value, "micro-batches", at_least_one)
    if steps > _LARGEST_COUNT:
        raise ValueError(
            f"`{name}` must be below 2**31, because counters have 32 bits on some backends. Pass a "
            f"smaller one. {_received(name, value)}"
        )
    return steps


def checked_rows(name: str, value: Any) -> int:
    """A count of rows."""
    at_least_one = "a batch without rows trains nothing. Pass 1 or more"
    return _checked_count(name, value, "rows", at_least_one)


def checked_bytes(name: str, value: Any) -> int:
    """A count of bytes."""
    return _checked_count(name, value, "bytes", "nothing fits into no memory. Pass 1 or more")


def checked_micro_batch_size(value: Any) -> int | None:
    """A number of rows, or None for `"auto"`."""
    if isinstance(value, str) and value != "auto":
        raise ValueError(
            "`micro_batch_size` must be an int >= 1 or 'auto', because rows are counted. Pass "
            f"'auto' to have the largest found that fits. {_received('micro_batch_size', value)}"
        )
    return None if isinstance(value, str) else checked_rows("micro_batch_size", value)


def checked_divisor(value: Any) -> Any:
    """A function, a dict of functions, or None."""
    functions = value.values() if isinstance(value, dict) else [value]
    if value is not None and not all(map(callable, functions)):
        raise TypeError(
            "`divisor` must be a function of `y_true`, or a dict from losses' names to such, "
            "because it computes what a loss divides by. Pass e.g. lambda y: ops.sum(y != -1). "
            f"{_received('divisor', value)}"
        )
    return value


def checked_schedule_value(value: Any) -> Any:
    """What a schedule of N returns: an int >= 1, or a tensor, which is taken as it is."""
    is_a_tensor = hasattr(value, "shape") and not isinstance(value, np.ndarray | np.generic)
    return value if is_a_tensor else checked_steps("accumulation_steps", value)


def checked_epoch(name: str, epoch: Any) -> int:
    """An epoch: an int >= 0."""
    if isinstance(epoch, bool) or not isinstance(epoch, numbers.Integral):
        raise TypeError(
            f"`{name}` must have ints >= 0 for keys, because epochs are counted from 0. Pass whole "
            f"numbers. {_received('epoch', epoch)}"
        )
    if epoch < 0:
        raise ValueError(
            f"`{name}` must have ints >= 0 for keys, because epochs are counted from 0. Pass 0 for "
            f"the first one. {_received('epoch', epoch)}"
        )
    return int(epoch)


def checked_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of `choices`."""
    if value not in choices:
        raise ValueError(
            f"`{name}` must be {' or '.join(map(repr, choices))}, because nothing else is "
            f"defined. Pass one of them. {_received(name, value)}"
        )
    return value


def checked_dtype(value: Any) -> str | None:
    """The name of a float dtype, or None."""
    if value is None:
        return None
    try:
        dtype = str(keras.backend.standardize_dtype(value))
    except (ValueError, TypeError):
        dtype = ""
    if not dtype.startswith(("float", "bfloat")):
        raise ValueError(
            "`accumulator_dtype` must be a float dtype, because gradients are floats. Pass "
            "'float32', or None to let each variable decide. "
            f"{_received('accumulator_dtype', value)}"
        )
    return dtype


def checked_axis(value: Any) -> str | None:
    """The name of a mesh axis, or None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(
            "`shard_accumulators` must be the name of an axis of the device mesh, because "
            "accumulators are cut along it. Pass e.g. 'batch', or None. "
            f"{_received('shard_accumulators', value)}"
        )
    return value


def checked_weight(weight: Any) -> Any:
    """A scalar; its range is checked where it is a Python number, a tensor is taken as it is."""
    if weight is None:
        return None
    if isinstance(weight, bool | str | bytes):
        raise TypeError(
            "`weight` must be a number or a scalar tensor, because it says what the micro-batch "
            f"counts for. Pass its rows or valid tokens. {_received('weight', weight)}"
        )
    number = weight.item() if isinstance(weight, np.ndarray) and weight.size == 1 else weight
    if isinstance(number, numbers.Real) and not 0 <= float(number) < float("inf"):
        raise ValueError(
            "`weight` must be finite and >= 0, because a window is divided by the sum of its "
            f"weights. Pass 0 to leave the micro-batch out. {_received('weight', weight)}"
        )
    try:
        shape = tuple(weight.shape) if hasattr(weight, "shape") else np.shape(weight)
    except ValueError:  # a TensorFlow tensor of unknown rank
        return weight
    if shape:
        raise ValueError(
            "`weight` must be a scalar, because it is for the whole micro-batch. Weight the rows "
            f"in the loss, and pass the sum of their weights. Received: weight of shape {shape}"
        )
    return weight


def checked_optimizer(optimizer: Any, wrapper: type) -> keras.optimizers.Optimizer:
    """The optimizer to wrap, from an instance, a name or a config; `wrapper` is our class."""
    known = isinstance(optimizer, str | dict | keras.optimizers.Optimizer)
    inner = keras.optimizers.get(optimizer) if known else None
    if inner is None:
        raise TypeError(
            "`optimizer` must be a Keras optimizer, its name or its config, because it makes the "
            "updates. Pass an instance, not its class, and `accumulation_steps` after it: e.g. "
            "GradientAccumulationOptimizer(keras.optimizers.Adam(1e-3), 8). "
            f"{_received('optimizer', optimizer)}"
        )
    if isinstance(inner, wrapper):
        raise ValueError(
            "`optimizer` must not be a `GradientAccumulationOptimizer`, because windows of windows "
            "are one window. Wrap its inner optimizer, with the product of both "
            f"`accumulation_steps`. {_received('optimizer', inner)}"
        )
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`optimizer` must not be a `LossScaleOptimizer`, because the loss scale may change in "
            "mid-window. Put it outside: LossScaleOptimizer(GradientAccumulationOptimizer(...)), "
            "which is what `compile` does under 'mixed_float16'. "
            f"{_received('optimizer', inner)}"
        )
    for part in (inner, *getattr(inner, "optimizers", ())):
        if getattr(part, "gradient_accumulation_steps", None):
            raise ValueError(
                "`gradient_accumulation_steps` must not be set on the inner optimizer, because it "
                "would accumulate twice. Leave it out, and pass "
                f"accumulation_steps={part.gradient_accumulation_steps} to "
                "`GradientAccumulationOptimizer`; or, to go on from this optimizer's state, use "
                "`GradientAccumulationOptimizer.from_builtin`. Received: "
                f"gradient_accumulation_steps={part.gradient_accumulation_steps!r} on {part.name!r}"
            )
    return inner


def checked_builtin(optimizer: Any) -> int:
    """The N of an optimizer with Keras's own option."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`optimizer` must be a Keras optimizer, because its state is taken over. Pass e.g. "
            f"model.optimizer. {_received('optimizer', optimizer)}"
        )
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if not steps:
        raise ValueError(
            "`optimizer` must have Keras's `gradient_accumulation_steps`, because that is what is "
            "replaced. Write GradientAccumulationOptimizer(optimizer, accumulation_steps), which "
            f"goes on from the state of a bare one. {_received('optimizer', optimizer)}"
        )
    return int(steps)


def checked_model(model: Any, schedule: Any) -> keras.Model:
    """A Keras model, to adjust by an N that is not decided within the compiled step."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a `keras.Model`, because its BatchNormalization layers are adjusted. "
            f"Pass the model that you compile. {_received('model', model)}"
        )
    if schedule is not None:
        raise ValueError(
            "`model` must be left out with a schedule of `accumulation_steps`, because a layer's "
            "momentum can't change within a compiled step. Use `AccumulationStepsScheduler`, or "
            "`keras_ga.batch_norm.recalibrate` after training. Received: a schedule and "
            f"model={model.name!r}"
        )
    return model


def refuse_arguments(kwargs: dict[str, Any]) -> None:
    """Refuses what is left over, by name and with what to write instead."""
    for name, value in kwargs.items():
        if name == "gradient_accumulation_steps":
            raise TypeError(
                "`gradient_accumulation_steps` must not be given, because this class has a name "
                f"of its own for it. Write accumulation_steps={value!r}. {_received(name, value)}"
            )
        if name in _INNER_ARGUMENTS:
            raise TypeError(
                f"`{name}` must be given to the inner optimizer, because it acts on an update. "
                "Write GradientAccumulationOptimizer(keras.optimizers.Adam("
                f"{name}={value!r}), ...). {_received(name, value)}"
            )
        raise TypeError(
            f"`{name}` must be left out, because `GradientAccumulationOptimizer` has no such "
            "argument. It takes optimizer, accumulation_steps, reduction, accumulator_dtype, "
            f"nonfinite, model, shard_accumulators and name. {_received(name, value)}"
        )


def check_length(name: str, values: Sequence[Any], targets: Sequence[Any], what: str) -> None:
    """One value for each target."""
    if len(values) != len(targets):
        raise ValueError(
            f"`{name}` must match {what} one to one, because they are paired. Pass None where "
            f"there is none. Received: {len(values)} values for {len(targets)} variables"
        )
