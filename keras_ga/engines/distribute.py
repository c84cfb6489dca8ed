"""The engine under `tf.distribute`: accumulators per replica, one reduction per window."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_ga.engines import DISAGREES
from keras_ga.engines.tensorflow import (
    TensorFlowEngine,
    add,
    apply_what_came,
    count,
    when,
)
from keras_ga.window import Tensor, Window, admit, empty_total, overwrites, window_gradient

# The policy for which `compile` puts a loss scale around the optimizer.
_SCALED = "mixed_float16"
_SUPPORTED = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)


class StrategyEngine:
    """One window over all replicas, each of which adds what is its own without a word.

    Accumulators and W are `synchronization="on_read"` variables: a replica's micro-step adds to its
    own copy. The counters are the same on every replica, and judged in the cross-replica context,
    because TensorFlow can't trace a branch that holds a `merge_call` in replica context. When the
    window closes, all accumulators and W are summed in one packed reduction, and the inner
    optimizer is handed that sum. It clips the sum then: what a large batch on one device would
    clip. Keras clips each replica's gradient before it reduces.
    """

    def __init__(self, window: Window, inner_optimizer: Any, strategy: tf.distribute.Strategy):
        self._window = window
        self._inner_optimizer = inner_optimizer
        self._strategy = strategy
        # N = 1 has no window: each replica's gradient goes to the inner optimizer as it is.
        self._without_window = TensorFlowEngine(window, inner_optimizer)
        if not isinstance(strategy, _SUPPORTED):
            raise ValueError(
                "The strategy must be a MirroredStrategy, a MultiWorkerMirroredStrategy or a "
                "OneDeviceStrategy, because no other has been tried. Use one of these. Received: "
                f"strategy={type(strategy).__name__}"
            )
        if any(map(overwrites, window.variables)):
            raise ValueError(
                "`tf.distribute` must not be used with float8 layers, because Keras does not "
                "reduce their scales over replicas. Train on one device. "
                f"Received: strategy={type(strategy).__name__}"
            )
        if strategy.num_replicas_in_sync > 1 and keras.config.dtype_policy().name == _SCALED:
            warnings.warn(
                f"{DISAGREES} on an overflow, and Keras's own loss scale asks the first one only: "
                "weights become NaN, or two workers hang. Compile with optimizer="
                "keras_ga.LossScaleOptimizer(GradientAccumulationOptimizer(...)).",
                stacklevel=5,
            )

    def micro_step(self, gradients: list[Tensor | None], weight: Tensor | float | None) -> None:
        """Takes one micro-batch of each replica in, and makes the update if that is the last."""
        replica = tf.distribute.get_replica_context()
        if replica is None or replica.strategy is not self._strategy:
            raise ValueError(
                "`apply` must be called in the replica context of the strategy that the optimizer "
                "was built under, because its accumulators are kept per replica. Call it within "
                "strategy.run(...). Received: "
                f"context of {type(tf.distribute.get_strategy()).__name__}, built under "
                f"{type(self._strategy).__name__}"
            )
        window = self._window
        gradients = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
        arrived = [gradient for gradient in gradients if gradient is not None]
        if not window.accumulators:
            if weight is not None or window.nonfinite == "drop":
                raise ValueError(
                    "`weight` and nonfinite='drop' need accumulators under `tf.distribute`, "
                    "because replicas can't decide on an update one by one. Construct the "
                    "optimizer with accumulation_steps=2, then set it to 1. Received: "
                    f"accumulation_steps=1 under {type(self._strategy).__name__}"
                )
            self._without_window.micro_step(gradients, weight)
            return
        if weight is not None:
            weight = tf.reshape(weight, ())
        # As on one device: no counter may move when a step fails for want of data.
        with tf.control_dependencies(arrived):
            admission = admit(gradients, weight, window)
            if admission.dropped is not None:
                dropped = window.dropped_micro_steps
                dropped.value.assign_add(tf.cast(admission.dropped, dropped.dtype))
            add(window, gradients, admission)
            counts_for = 1.0 if admission.weight is None else admission.weight
            window.weight_sum.value.assign_add(tf.cast(counts_for, window.weight_sum.dtype))
        present = [gradient is not None for gradient in gradients]
        replica.merge_call(lambda _, arrived: self._judge(arrived, present), args=(arrived,))

    def close(self) -> None:
        """Makes the update with what the open window holds; an empty window stays as it is."""
        if not self._window.accumulators:
            return

        def close() -> None:
            nothing_came = [False] * len(self._window.variables)
            when(self._window.pending.value > 0, lambda: self._close(nothing_came))

        replica = tf.distribute.get_replica_context()
        if replica is not None and replica.strategy is self._strategy:
            replica.merge_call(lambda _: close())
        else:
            with self._strategy.scope():
                close()

    def _judge(self, arrived: list[Tensor], present: list[bool]) -> None:
        """Counts the micro-step, once for all replicas, and closes a window that is full."""
        window = self._window
        on_each = self._strategy.experimental_local_results
        with tf.control_dependencies([g for gradient in arrived for g in on_each(gradient)]):
            window.micro_steps.assign_add(1)
            window.has_gradient.assign(tf.logical_or(window.has_gradient.value, present))
            window.pending.assign_add(1)
            pending = tf.convert_to_tensor(window.pending.value)
            steps = window.steps(lambda variable: tf.convert_to_tensor(variable.value))
            window.has_updated.assign(False)
            when(pending >= tf.cast(steps, pending.dtype), lambda: self._close(present))

    def _close(self, present: list[bool]) -> None:
        window, extended = self._window, self._strategy.extended
        kept = [*window.accumulators, window.weight_sum]
        to = [*window.variables, window.variables[0]]  # W goes where the first variable is
        reduced: dict[int, Any] = {}
        for dtype in {variable.dtype for variable in kept}:  # a pack has one dtype
            places = [i for i, variable in enumerate(kept) if variable.dtype == dtype]
            pairs = [(kept[i].value, to[i].value) for i in places]
            sums = extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
            reduced.update(zip(places, sums, strict=True))
        *totals, weight_sum = [reduced[i] for i in range(len(kept))]
        summed = self._strategy.experimental_local_results(weight_sum)[0]
        # A replica's gradient is that of its share of the loss, 1 / replicas of its mean, as Keras
        # has it; so the weights that they are divided by are the replicas' mean.
        divisor = summed / self._strategy.num_replicas_in_sync
        updates = summed != 0
        when(updates, lambda: self._update(totals, divisor, present))
        window.has_updated.assign(updates)
        count(window.skipped_updates, ~updates)
        for accumulator, variable in zip(window.accumulators, window.variables, strict=True):
            empty = tf.cast(empty_total(variable), accumulator.dtype)
            accumulator.value.assign(tf.fill(accumulator.shape, empty))
        window.pending.assign(0)
        window.weight_sum.value.assign(tf.zeros_like(divisor))

    def _update(self, totals: list[Any], divisor: Tensor, present: list[bool]) -> None:
        window, inner = self._window, self._inner_optimizer

        def apply(came: list[bool]) -> None:
            def on_replica(totals: list[Tensor]) -> None:
                gradients = [
                    window_gradient(total, divisor, variable, window.reduction) if c else None
                    for total, variable, c in zip(totals, window.variables, came, strict=True)
                ]
                inner.apply(gradients, window.variables)

            # Entered here and not on a replica: replicas' threads take turns at each merge_call.
            with _reduced_already(inner):
                self._strategy.extended.call_for_each_replica(on_replica, args=(totals,))

        apply_what_came(window, present, apply)


@contextlib.contextmanager
def _reduced_already(optimizer: Any) -> Iterator[None]:
    """Lets the inner optimizer take gradients that are summed over replicas as they are.

    Private (`_all_reduce_sum_gradients`, Keras 3.15): no public way hands it a sum without
    multiplying it by the replicas, or clipping before the sum.
    """
    parts = getattr(optimizer, "optimizers", [optimizer])
    try:
        for part in parts:
            part._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars
        yield
    finally:
        for part in parts:
            del part._all_reduce_sum_gradients
