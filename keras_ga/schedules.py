"""Counting in updates: accumulation steps as a schedule, totals, scaled learning rates."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from keras_ga.arguments import checked_choice, checked_steps


@keras.saving.register_keras_serializable(package="keras_ga")
class PiecewiseConstantSteps:
    """Accumulation steps that change at given updates, to let the batch grow during training.

    Use it for `accumulation_steps` where N depends on the progress of training alone; a window
    is judged by the N of the update that it leads to. Where N should change at an epoch's begin,
    use `keras_ga.callbacks.AccumulationStepsScheduler`.

    Args:
        boundaries: Updates at which N changes, increasing ints >= 1.
        values: N before the first boundary, and from each boundary on: ints >= 1, one more than
            `boundaries`.

    Raises:
        TypeError: If a boundary or value is no int.
        ValueError: If one is below 1, the boundaries do not increase, or the lengths do not fit.

    Example:

    ```python
    import keras
    import keras_ga

    # updates 0..99 of 4 micro-batches, 100..499 of 16, then of 64
    steps = keras_ga.schedules.PiecewiseConstantSteps([100, 500], [4, 16, 64])
    optimizer = keras_ga.GradientAccumulationOptimizer(keras.optimizers.SGD(0.1), steps)
    print(steps(99), steps(100), optimizer.accumulation_steps)  # 4 16 4
    ```

    References:
        - Smith et al., 2018, https://arxiv.org/abs/1711.00489, on growing the batch instead of
          decaying the learning rate
    """

    def __init__(self, boundaries: Sequence[int], values: Sequence[int]):
        self.boundaries = [checked_steps("boundaries", boundary) for boundary in boundaries]
        self.values = [checked_steps("values", value) for value in values]
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                "`values` must be one more than `boundaries`, because each boundary parts two of "
                "them. Add the value that holds before the first boundary. Received: "
                f"boundaries={boundaries!r}, values={values!r}"
            )
        if sorted(set(self.boundaries)) != self.boundaries:
            raise ValueError(
                "`boundaries` must increase, because N changes at one after the other. Sort them. "
                f"Received: boundaries={boundaries!r}"
            )

    def __call__(self, update: Any) -> Any:
        """N for the window that leads to an update.

        Args:
            update: How many updates were made before it: an int or a scalar integer tensor.

        Returns:
            An int for an int, else a scalar int32 tensor.
        """
        if isinstance(update, numbers.Integral):
            return self.values[sum(int(update) >= boundary for boundary in self.boundaries)]
        steps = ops.convert_to_tensor(self.values[0], "int32")
        for boundary, value in zip(self.boundaries, self.values[1:], strict=True):
            steps = ops.where(update >= boundary, ops.convert_to_tensor(value, "int32"), steps)
        return steps

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments.

        Returns:
            A dict of plain lists.
        """
        return {"boundaries": self.boundaries, "values": self.values}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PiecewiseConstantSteps:
        """Makes a schedule from `get_config`'s dict.

        Args:
            config: The dict; it is left as it is.

        Returns:
            A `PiecewiseConstantSteps`.
        """
        return cls(**config)


class _OfASchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A learning-rate schedule made of another one, `schedule`, and plain values."""

    schedule: Any

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**vars(self), "schedule": keras.optimizers.schedules.serialize(self.schedule)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Makes a schedule from `get_config`'s dict, which it leaves as it is."""
        schedule = keras.optimizers.schedules.deserialize(config["schedule"])
        return cls(**{**config, "schedule": schedule})


@keras.saving.register_keras_serializable(package="keras_ga")
class ScaledSchedule(_OfASchedule):
    """A learning-rate schedule times a number; what `scale_learning_rate` makes of a schedule.

    Args:
        schedule: A `keras.optimizers.schedules.LearningRateSchedule`.
        scale: The number, a float > 0.

    Example:

    ```python
    import keras
    import keras_ga

    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    print(float(keras_ga.schedules.ScaledSchedule(decay, 4.0)(1)))  # 0.2
    ```
    """

    def __init__(self, schedule: Any, scale: float):
        self.schedule = schedule
        self.scale = scale

    def __call__(self, step: Any) -> Any:
        """The schedule's rate at `step` (updates), times the scale."""
        return ops.multiply(self.schedule(step), self.scale)


@keras.saving.register_keras_serializable(package="keras_ga")
class InMicroSteps(_OfASchedule):
    """A learning-rate schedule whose lengths are in micro-batches.

    Optimizers under the wrapper ask a schedule with updates. This one asks the schedule within it
    with the micro-batches that came before the one that makes the update, as Keras's
    `gradient_accumulation_steps` does, so that `GradientAccumulationOptimizer.from_builtin` keeps
    a training's rates.

    Args:
        schedule: A `keras.optimizers.schedules.LearningRateSchedule`.
        accumulation_steps: N, int >= 1, that stays the same during training.

    Raises:
        TypeError: If N is no int.
        ValueError: If N is below 1.

    Example:

    ```python
    import keras
    import keras_ga

    decay = keras.optimizers.schedules.PolynomialDecay(1.0, decay_steps=40, end_learning_rate=0.0)
    rates = keras_ga.schedules.InMicroSteps(decay, 8)
    print(float(rates(1)))  # 0.625: after 15 micro-batches of 40
    ```
    """

    def __init__(self, schedule: Any, accumulation_steps: int):
        self.schedule = schedule
        self.accumulation_steps = checked_steps("accumulation_steps", accumulation_steps)

    def __call__(self, step: Any) -> Any:
        """The schedule's rate for the update after `step` updates."""
        return self.schedule((step + 1) * self.accumulation_steps - 1)


def total_updates(
    micro_steps_per_epoch: int,
    epochs: int,
    accumulation_steps: int | Callable[[int], int],
    partial_window: str = "carry",
) -> int:
    """How many updates a training makes: what `decay_steps` and warm-up lengths are counted in.

    Args:
        micro_steps_per_epoch: Batches that `fit` draws in an epoch, int >= 1 (rows divided by
            `batch_size`, rounded up).
        epochs: Epochs, int >= 1.
        accumulation_steps: N, as given to `GradientAccumulationOptimizer`: an int >= 1 or a
            schedule.
        partial_window: What becomes of a short window at an epoch's end: `"carry"` (default) into
            the next epoch; `"flush"` makes an update of it
            (`keras_ga.callbacks.FlushPartialWindow`).

    Returns:
        The number of updates, int.

    Raises:
        TypeError: If a count is no int.
        ValueError: If a count is below 1, or `partial_window` is unknown.

    Example:

    ```python
    import keras
    import keras_ga

    updates = keras_ga.total_updates(
        micro_steps_per_epoch=1000, epochs=3, accumulation_steps=8, partial_window="flush"
    )
    schedule = keras.optimizers.schedules.CosineDecay(1e-3, decay_steps=updates)
    print(updates)  # 375
    ```
    """
    micro_steps = checked_steps("micro_steps_per_epoch", micro_steps_per_epoch)
    epochs = checked_steps("epochs", epochs)
    checked_choice("partial_window", partial_window, ("carry", "flush"))
    schedule = accumulation_steps
    if not callable(schedule):
        steps = checked_steps("accumulation_steps", accumulation_steps)
        if partial_window == "flush":
            return epochs * math.ceil(micro_steps / steps)
        return epochs * micro_steps // steps
    updates = pending = 0
    for _ in range(epochs):
        for _ in range(micro_steps):
            pending += 1
            if pending >= int(schedule(updates)):
                updates, pending = updates + 1, 0
        if partial_window == "flush" and pending:
            updates, pending = updates + 1, 0
    return updates


def scale_learning_rate(learning_rate: Any, factor: float, rule: str = "linear") -> Any:
    """A learning rate for a batch `factor` times as large.

    Both rules are starting points, not laws: the linear rule is for SGD (with warm-up), the
    square-root rule keeps the noise of Adam-like optimizers. Past some batch size neither holds.

    Args:
        learning_rate: A float, or a `keras.optimizers.schedules.LearningRateSchedule`.
        factor: How many times larger the effective batch is, a number > 0 (such as N).
        rule: `"linear"` multiplies by `factor` (default), `"sqrt"` by its square root.

    Returns:
        A float for a float; for a schedule, a schedule (serialisable if the given one is).

    Raises:
        TypeError: If `learning_rate` or `factor` is of another type.
        ValueError: If `factor` is not above 0, or `rule` is unknown.

    Example:

    ```python
    import keras_ga

    print(keras_ga.scale_learning_rate(0.1, 16))          # 1.6
    print(keras_ga.scale_learning_rate(0.1, 16, "sqrt"))  # 0.4
    ```

    References:
        - linear: Goyal et al., 2017, https://arxiv.org/abs/1706.02677
        - square root: Krizhevsky, 2014, https://arxiv.org/abs/1404.5997; for Adam: Malladi et
          al., 2022, https://arxiv.org/abs/2205.10287
    """
    checked_choice("rule", rule, ("linear", "sqrt"))
    if isinstance(factor, bool) or not isinstance(factor, numbers.Real):
        raise TypeError(
            "`factor` must be a number > 0, because it says how many times larger the batch is. "
            f"Pass e.g. 8. Received: factor={factor!r} (of type {type(factor).__name__})"
        )
    if not 0 < float(factor) < math.inf:
        raise ValueError(
            "`factor` must be a number > 0, because it says how many times larger the batch is. "
            f"Pass e.g. 8. Received: factor={factor!r} (of type {type(factor).__name__})"
        )
    scale = float(factor) if rule == "linear" else math.sqrt(factor)
    if isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        return ScaledSchedule(learning_rate, scale)
    if isinstance(learning_rate, bool) or not isinstance(learning_rate, numbers.Real):
        raise TypeError(
            "`learning_rate` must be a float or a `LearningRateSchedule`, because it is "
            "multiplied. Wrap another callable in a schedule. Received: "
            f"learning_rate={learning_rate!r} (of type {type(learning_rate).__name__})"
        )
    return float(learning_rate) * scale
