"""Callbacks for windows: flush at an epoch's end, change N by epoch, count updates."""

from __future__ import annotations

from typing import Any

import keras

from keras_ga import batch_norm
from keras_ga.arguments import checked_epoch, checked_steps
from keras_ga.optimizer import GradientAccumulationOptimizer
from keras_ga.window import number


class _WindowCallback(keras.callbacks.Callback):
    """A callback that knows the model's `GradientAccumulationOptimizer`."""

    @property
    def optimizer(self) -> GradientAccumulationOptimizer:
        """The wrapper that the model was compiled with, also inside a `LossScaleOptimizer`."""
        optimizer = self.model.optimizer
        while optimizer is not None and not isinstance(optimizer, GradientAccumulationOptimizer):
            optimizer = getattr(optimizer, "inner_optimizer", None)
        if optimizer is None:
            raise ValueError(
                f"`{type(self).__name__}` must be used with a model that is compiled with a "
                "`GradientAccumulationOptimizer`, because it acts on its window. Wrap the "
                "optimizer, or leave the callback out (with `split_batches` alone there is nothing "
                "to do). Received: "
                f"model.optimizer={type(self.model.optimizer).__name__}"
            )
        return optimizer

    def flush(self) -> None:
        """Flushes the optimizer's window and those of pooling layers."""
        self.optimizer.flush()
        for layer in batch_norm.pooled_layers(self.model):
            layer.flush()


class FlushPartialWindow(_WindowCallback):
    """Makes an update of what is left in the window at each epoch's end, before its validation.

    With it, `fit` equals the large batch's `fit` also where an epoch's micro-batches do not
    divide by N: its last batch is short, and so is this window, divided by what it holds. Without
    it, what is left is carried into the next epoch. Exact as long as all micro-batches have the
    same number of rows; where the very last one is smaller (rows that do not divide by
    `batch_size`), it counts as much as the others do, a slight overweight of its rows.

    Put it before callbacks that look at the weights (`ModelCheckpoint`, `SwapEMAWeights`).

    Example:

    ```python
    import keras, keras_ga
    import numpy as np

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras_ga.GradientAccumulationOptimizer("sgd", accumulation_steps=4)
    model.compile(optimizer=optimizer, loss="mse")
    flush = keras_ga.callbacks.FlushPartialWindow()
    model.fit(np.ones((24, 4)), np.ones((24, 1)), batch_size=4, verbose=0, callbacks=[flush])
    print(int(optimizer.iterations), int(optimizer.pending))  # 2 updates (of 4 and 2), 0 pending
    ```
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_epoch = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Fails at once where there is no window to flush."""
        _ = self.optimizer

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """A validation from here on is this epoch's."""
        self._in_epoch = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Flushes before the epoch's validation; an evaluation outside `fit` is left alone."""
        if self._in_epoch:
            self.flush()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Flushes where there was no validation."""
        self.flush()
        self._in_epoch = False


class AccumulationStepsScheduler(_WindowCallback):
    """Sets the accumulation steps at the begin of given epochs.

    Use it where N depends on the epoch; where it depends on the updates made, pass a schedule
    such as `keras_ga.schedules.PiecewiseConstantSteps` to the optimizer. A window that is open
    when N changes keeps what it holds.

    Args:
        steps_by_epoch: A dict from epoch (int >= 0) to accumulation steps (int >= 1), which hold
            from that epoch on. Before the first one the optimizer's own hold. Construct the
            optimizer with the largest of them.

    Raises:
        TypeError: If an epoch or a number of steps is no int, or it is no dict.
        ValueError: If one is out of range, or there is none.

    Example:

    ```python
    import keras, keras_ga
    import numpy as np

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras_ga.GradientAccumulationOptimizer("sgd", accumulation_steps=4)
    model.compile(optimizer=optimizer, loss="mse")
    scheduler = keras_ga.callbacks.AccumulationStepsScheduler({0: 1, 2: 4})
    x, y = np.ones((32, 4)), np.ones((32, 1))
    model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[scheduler])
    print(int(optimizer.iterations))  # 8 + 8 + 2
    ```
    """

    def __init__(self, steps_by_epoch: dict[int, int]):
        super().__init__()
        if not isinstance(steps_by_epoch, dict):
            raise TypeError(
                "`steps_by_epoch` must be a dict from epoch to accumulation steps, because each "
                "holds from its epoch on. Write e.g. {0: 1, 5: 4}. Received: "
                f"steps_by_epoch={steps_by_epoch!r} (of type {type(steps_by_epoch).__name__})"
            )
        if not steps_by_epoch:
            raise ValueError(
                "`steps_by_epoch` must name an epoch, because there is nothing to set otherwise. "
                "Write e.g. {0: 1, 5: 4}. Received: steps_by_epoch={}"
            )
        self.steps_by_epoch = {
            checked_epoch("steps_by_epoch", epoch): checked_steps("steps_by_epoch", steps)
            for epoch, steps in steps_by_epoch.items()
        }

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets what holds in this epoch."""
        begun = [first for first in self.steps_by_epoch if first <= epoch]
        if begun:
            steps = self.steps_by_epoch[max(begun)]
            self.optimizer.accumulation_steps = steps
            for layer in batch_norm.pooled_layers(self.model):
                layer.accumulation_steps = steps


class UpdateCounter(_WindowCallback):
    """Puts the number of updates into each epoch's logs, where N varies also N.

    `updates` then stands in the progress bar's last line, in `History`, and in what `CSVLogger`
    and `TensorBoard` write if they come after it in the list of callbacks. `accumulation_steps` is
    added where it is a schedule, and once it has been set to another number.

    Example:

    ```python
    import keras, keras_ga
    import numpy as np

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras_ga.GradientAccumulationOptimizer("sgd", accumulation_steps=4)
    model.compile(optimizer=optimizer, loss="mse")
    counter = keras_ga.callbacks.UpdateCounter()
    x, y = np.ones((32, 4)), np.ones((32, 1))
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[counter])
    print(history.history["updates"])  # [2, 4]
    ```
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps_seen: set[int] = set()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds `updates` (and `accumulation_steps`) to the logs."""
        if logs is None:
            return
        optimizer = self.optimizer
        logs["updates"] = number(optimizer.iterations)
        self._steps_seen.add(optimizer.accumulation_steps)
        if optimizer.follows_a_schedule or len(self._steps_seen) > 1:
            logs["accumulation_steps"] = optimizer.accumulation_steps
