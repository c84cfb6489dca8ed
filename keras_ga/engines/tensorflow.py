"""The TensorFlow engine: state in variables, a zero-or-one-trip loop in compiled steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_ga.window import (
    Admission,
    Tensor,
    Window,
    admit,
    empty_total,
    largest,
    overwrites,
    weighted,
    window_gradient,
)


def engine_for(window: Window, inner_optimizer: Any) -> Any:
    """The engine for one device, or for the strategy whose scope this is."""
    if not tf.distribute.has_strategy():
        return TensorFlowEngine(window, inner_optimizer)
    from keras_ga.engines.distribute import StrategyEngine

    return StrategyEngine(window, inner_optimizer, tf.distribute.get_strategy())


def outside_of_a_trace() -> contextlib.AbstractContextManager[Any]:
    """The eager context."""
    return tf.init_scope()


def sum_over_replicas(value: Tensor) -> Tensor:
    """The sum of a number over all replicas, in replica context."""
    replica = tf.distribute.get_replica_context()
    if replica is None or not tf.distribute.has_strategy():
        return value
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, value)


class TensorFlowEngine:
    """Accumulates into `tf.Variable`s in place; runs in graph, XLA and eager mode."""

    def __init__(self, window: Window, inner_optimizer: Any):
        self._window = window
        self._inner_optimizer = inner_optimizer

    def micro_step(self, gradients: list[Tensor | None], weight: Tensor | float | None) -> None:
        """Takes one micro-batch in, and makes the update if that completes the window."""
        self._refuse_strategies()
        window = self._window
        if weight is not None:
            weight = tf.reshape(weight, ())  # the rank need not be known while tracing
        values = [_values(gradient) for gradient in gradients]
        # `fit` finds the end of a dataset of unknown size by running one more step that fails for
        # want of data, and what does not depend on the batch still runs. No counter may move then.
        with tf.control_dependencies([value for value in values if value is not None]):
            admission = admit(values, weight, window)
            window.micro_steps.assign_add(1)
            if admission.dropped is not None:
                count(window.dropped_micro_steps, admission.dropped)
            if not window.accumulators:
                self._update_at_once(gradients, admission)
                return
            present = [gradient is not None for gradient in gradients]
            window.has_gradient.assign(tf.logical_or(window.has_gradient.value, present))
            add(window, gradients, admission)
            window.pending.assign_add(1)
            window.weight_sum.assign_add(1 if admission.weight is None else admission.weight)
            pending = tf.identity(window.pending.value)
            weight_sum = tf.identity(window.weight_sum.value)
            closes = pending >= tf.cast(window.steps(), pending.dtype)
            if admission.weight is None:
                updates = closes  # this micro-batch alone makes W > 0
            else:
                updates = closes & (weight_sum != 0)
                count(window.skipped_updates, closes & ~updates)
            when(updates, lambda: self._update(weight_sum, present))
            window.has_updated.assign(updates)
            window.pending.assign(tf.where(closes, tf.zeros_like(pending), pending))
            window.weight_sum.assign(tf.where(closes, tf.zeros_like(weight_sum), weight_sum))

    def close(self) -> None:
        """Makes the update with what the open window holds; an empty window stays as it is."""
        self._refuse_strategies()
        window = self._window
        if not window.accumulators:
            return
        weight_sum = window.weight_sum.value
        closes = window.pending.value > 0
        updates = closes & (weight_sum != 0)
        when(updates, lambda: self._update(weight_sum, [False] * len(window.variables)))
        count(window.skipped_updates, closes & ~updates)
        window.has_updated.assign(tf.where(closes, updates, window.has_updated.value))
        window.pending.assign(0)
        window.weight_sum.assign(tf.zeros_like(weight_sum))

    def _update(self, weight_sum: Tensor, present: list[bool]) -> None:
        """One update of the inner optimizer with the window's gradient; a fresh window."""
        window = self._window
        gradients = [
            window_gradient(accumulator.value, weight_sum, variable, window.reduction)
            for accumulator, variable in zip(window.accumulators, window.variables, strict=True)
        ]

        def apply(came: list[bool]) -> None:
            kept = [g if c else None for g, c in zip(gradients, came, strict=True)]
            self._inner_optimizer.apply(kept, window.variables)

        apply_what_came(window, present, apply)
        for accumulator, variable in zip(window.accumulators, window.variables, strict=True):
            accumulator.value.assign(
                tf.fill(accumulator.shape, tf.cast(empty_total(variable), accumulator.dtype))
            )

    def _refuse_strategies(self) -> None:
        if tf.distribute.has_strategy() and self._window.accumulators:
            raise ValueError(
                "The optimizer must be built under the strategy that it is used under, because its "
                "accumulators are kept per replica. Make model and optimizer within "
                "strategy.scope(). Received: strategy="
                f"{type(tf.distribute.get_strategy()).__name__}, built without one"
            )

    def _update_at_once(self, gradients: list[Tensor | None], admission: Admission) -> None:
        """N = 1: the micro-batch is the window, and the inner optimizer gets what came."""
        window = self._window
        if window.reduction == "sum" and admission.weight is not None:
            gradients = [
                g if g is None or overwrites(v) else g * tf.cast(admission.weight, g.dtype)
                for g, v in zip(gradients, window.variables, strict=True)
            ]
        updates = tf.constant(True) if admission.admitted is None else admission.admitted
        if admission.admitted is None:
            self._inner_optimizer.apply(gradients, window.variables)
        else:
            when(updates, lambda: self._inner_optimizer.apply(gradients, window.variables))
            count(window.skipped_updates, ~updates)
        window.has_updated.assign(updates)


def add(window: Window, gradients: list[Tensor | None], admission: Admission) -> None:
    """Adds a micro-batch's gradients to the accumulators, in place."""
    for gradient, accumulator, variable in zip(
        gradients, window.accumulators, window.variables, strict=True
    ):
        total, dtype = accumulator.value, accumulator.dtype
        if gradient is None:
            continue
        if overwrites(variable):
            total.assign(largest(total, gradient, admission, dtype))
        elif isinstance(gradient, tf.IndexedSlices):
            rows = weighted(gradient.values, admission, dtype)
            total.scatter_add(tf.IndexedSlices(rows, gradient.indices))
        else:
            total.assign_add(weighted(gradient, admission, dtype))


def apply_what_came(
    window: Window, present: list[bool], apply: Callable[[list[bool]], None]
) -> None:
    """Hands a variable that never had a gradient on as None, as the bare optimizer gets it.

    A trace knows only its own Nones (`present`). A variable that is missing here may have had its
    gradients from another trace (another branch of the model, a resumed checkpoint), so where some
    are missing the flags decide at run time. An optimizer can't be given a None at run time; a
    variable without gradients among others that had theirs is given zeros, and then its value
    back. `apply` makes the update with the gradients of the variables that it is told.
    """
    if all(present):
        apply(present)
        return
    if tf.executing_eagerly():
        apply(keras.ops.convert_to_numpy(window.has_gradient).tolist())
        return

    def apply_all() -> None:
        missing = [
            (variable.value, tf.identity(variable.value), window.has_gradient.value[i])
            for i, variable in enumerate(window.variables)
            if not present[i]
        ]
        apply([True] * len(present))
        for variable, before, had in missing:
            variable.assign(tf.where(had, variable, before))

    if not any(present):  # a flush
        apply_all()
        return
    tf.cond(
        tf.reduce_any(window.has_gradient.value & tf.logical_not(present)),
        apply_all,
        lambda: apply(present),
    )


def when(predicate: Tensor, body: Callable[[], None]) -> None:
    """Runs `body` if `predicate` holds: by a Python branch, or by a loop of zero or one trip.

    A loop and not a `tf.cond`, because XLA updates what a loop carries in place, whereas each
    branch of a cond returns copies: 19 ms against 50 ms a micro-step for Adam on 16.8 M
    parameters (TensorFlow 2.21 on two CPU cores), whether the branch is taken or not.
    """
    if tf.executing_eagerly():
        if predicate:
            body()
        return

    def trip(_: Tensor) -> list[Tensor]:
        body()
        return [tf.constant(False)]

    tf.while_loop(lambda again: again, trip, [predicate])


def count(counter: keras.Variable, happened: Tensor) -> None:
    """Adds one to a counter if something happened."""
    counter.assign_add(tf.cast(happened, counter.dtype))


def _values(gradient: Tensor | None) -> Tensor | None:
    """The numbers of a gradient; those of its rows where it is sparse."""
    if gradient is None:
        return None
    return (
        gradient.values
        if isinstance(gradient, tf.IndexedSlices)
        else tf.convert_to_tensor(gradient)
    )
