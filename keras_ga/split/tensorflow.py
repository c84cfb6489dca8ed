"""Micro-steps on TensorFlow: compiled functions that read variables, and set none before the last.

That is so under `jit_compile` above all. A step that XLA compiled as a whole donates its variables;
when it runs out of memory they are freed, and the process dies of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_ga.split.step import Carry, Place, TrainStep, added, share_of
from keras_ga.window import Tensor, empty_total, wide_dtype


def train_function(step: TrainStep) -> Callable[[Iterator[Any]], Any]:
    """What `make_train_function` makes on TensorFlow: iterator to logs."""

    def train(iterator: Iterator[Any]) -> Any:
        # Pulled here and not in the graph: a step that failed is made again with the same batch.
        batch = next(iterator)
        strategy = step.model.distribute_strategy
        with strategy.scope():
            step.build(_of_first_replica(batch, strategy))
        logs = step(batch)
        for _, batch in zip(range(step.model.steps_per_execution - 1), iterator, strict=False):
            logs = step(batch)
        return logs

    return train


def prepare(step: TrainStep, batch: Any) -> Any:
    """Makes a step ready outside of `fit`; returns the batch as the backend wants it."""
    with step.model.distribute_strategy.scope():
        step.build(batch)
    return step.backend.ready(batch)


class Backend:
    """A model's micro-steps on TensorFlow, on each replica of its strategy."""

    def __init__(self, step: TrainStep):
        self._step, self._model = step, step.model
        self._strategy = step.model.distribute_strategy
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        self._before: dict[int, Tensor] = {}
        self._of_rows: Any = None
        self._has_gradient: set[int] = set()
        """Numbers of the trainable variables that a trace found gradients for."""

    def local(self, batch: Any) -> Any:
        """What the first replica has of a batch."""
        return _of_first_replica(batch, self._strategy)

    def ready(self, batch: Any) -> Any:
        """The batch as tensors; what `tf.data` calls optional and empty is None."""
        return keras.tree.map_structure(_tensor, batch)

    def rows(self, batch: Any) -> int:
        """Rows of a batch on the replica that has most."""
        return max(self._rows_of(batch))

    def part(self, batch: Any, start: int, size: int) -> Any:
        """`size` rows of a batch on each replica, from `start` on; fewer where there are fewer."""

        def of(batch: Any) -> Any:
            return keras.tree.map_structure(
                lambda leaf: None if leaf is None else leaf[start : start + size], batch
            )

        return self._strategy.run(of, args=(batch,))

    def start(self, batch: Any) -> Carry:
        """No gradients yet, and the model's values."""
        self._of_rows = self._strategy.run(lambda batch: tf.shape(_first(batch))[0], args=(batch,))
        # Not by XLA, which would copy what is only read.
        gradients, state = self._on_replicas("start", self._initial, compiled=False)()
        self._before = state
        return Carry(gradients, state, self._step.statistics(state), {})

    def divisors(self, totals: Any, carry: Carry, part: Any) -> Any:
        """The losses' divisors on a micro-batch, added to the totals."""
        function = self._on_replicas(("divisors", *self._rows_of(part)), self._added_divisors)
        return function(totals, carry.state, part)

    def micro_step(self, carry: Carry, totals: Any, part: Any, place: Place) -> Carry:
        """Takes one micro-batch in."""
        # A function for each number of rows: else a trace would come to know it no longer, and
        # Keras counts calls then where it should count rows.
        function = self._on_replicas(("micro-step", *self._rows_of(part)), self._micro_step)
        gradients, changed, statistics, logs = function(
            carry.gradients,
            carry.state,
            carry.statistics,
            totals,
            part,
            tf.constant(place.before),
            self._of_rows,
        )
        return Carry(gradients, {**carry.state, **changed}, statistics, logs)

    def wait(self, carry: Carry) -> None:
        """Nothing: a function that returns has had its memory."""

    def finish(self, carry: Carry, totals: Any, rows: int) -> Any:
        """Sets what was carried, makes the update, returns the logs."""
        changed = {n: v for n, v in carry.state.items() if v is not self._before[n]}
        self._before = {}
        # What is decided while tracing.
        key = self._step.divisors.has_one, *sorted(self._has_gradient)
        function = self._on_replicas(("finish", *key), self._finish)
        running = self._step.statistics(carry.state)
        function(carry.gradients, running, carry.statistics, changed, totals, self._of_rows)
        return {name: self._mean(value) for name, value in carry.logs.items()}

    def undo(self) -> None:
        """Nothing: no variable has been set."""

    def gradients(self, carry: Carry) -> list[Any]:
        """What is carried of gradients, as arrays; of the first replica."""
        local = self._strategy.experimental_local_results
        return [local(gradient)[0].numpy() for gradient in carry.gradients]

    def plan(self, carry: Carry, totals: Any, batch: Any, part: Any) -> None:
        """None: TensorFlow has no plan to ask."""

    def _on_replicas(
        self, key: Hashable, function: Callable[..., Any], compiled: bool = True
    ) -> Callable[..., Any]:
        """The function run on each replica, in a graph unless the model runs eagerly."""
        if key not in self._functions:
            # Not a closure: TensorFlow knows those by their code, and would count the traces of all
            # functions and models as one function's, and warn of too many.
            run = functools.partial(self._run, function)
            self._functions[key] = (
                run
                if self._model.run_eagerly
                else tf.function(
                    run,
                    autograph=False,
                    reduce_retracing=True,
                    jit_compile=bool(compiled and self._model.jit_compile),
                )
            )
        return self._functions[key]

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._strategy.run(function, args=arguments)

    def _rows_of(self, batch: Any) -> tuple[int, ...]:
        """Rows on each replica."""
        leaf = _first(batch)
        return tuple(value.shape[0] for value in self._strategy.experimental_local_results(leaf))

    def _mean(self, value: Any) -> Any:
        """A log's mean over the replicas, as `fit` has it."""
        if isinstance(value, tf.distribute.DistributedValues):
            return self._strategy.reduce("MEAN", value, axis=None)
        return value

    # On one replica.

    def _initial(self) -> tuple[list[Tensor], dict[int, Tensor]]:
        gradients = [
            tf.fill(v.shape, tf.constant(empty_total(v), wide_dtype(v.dtype)))
            for v in self._step.trainable
        ]
        return gradients, {n: tf.identity(v.value) for n, v in enumerate(self._step.variables)}

    def _micro_step(
        self,
        gradients: list[Tensor],
        state: dict[int, Tensor],
        statistics: Any,
        totals: Tensor,
        data: Any,
        before: Tensor,
        of_rows: Tensor,
    ) -> tuple[list[Tensor], dict[int, Tensor], Any, Any]:
        model, step = self._model, self._step
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        trainable = step.trainable
        rows = _first(data).shape[0]
        place = Place(tf.minimum(before, of_rows), rows, of_rows)
        with tf.GradientTape() as tape, step.scope(state) as scope:
            y_pred = step.predictions(x)
            step.divisors.correct(rows, of_rows, totals)
            loss = step.loss(x, y, y_pred, sample_weight)
            # The loss and not its gradient: in float16 that would be too large on its way.
            part = model.optimizer.scale_loss(loss * tf.cast(share_of(place), loss.dtype))
        step.check_not_set(scope)
        found = tape.gradient(part, [variable.value for variable in trainable])
        with scope:
            # Private (Keras 3.15), as its own train step does it.
            replicas = self._strategy.num_replicas_in_sync  # Keras divides the loss by these
            model._loss_tracker.update_state(loss * replicas, sample_weight=rows)
            logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        new = {n: scope.get_current_value(v) for n, v in enumerate(step.variables)}
        if not model.run_eagerly:
            self._count_batches(new, state, of_rows)
        statistics, changed = step.changed(statistics, new, state, place)
        self._has_gradient |= {n for n, gradient in enumerate(found) if gradient is not None}
        # Sparse ones are made dense: squares of repeated rows are taken of their sum then.
        dense = [None if g is None else tf.convert_to_tensor(g) for g in found]
        sums = [added(*each) for each in zip(gradients, dense, trainable, strict=True)]
        return sums, changed, statistics, logs

    def _count_batches(
        self, new: dict[int, Tensor], state: dict[int, Tensor], of_rows: Tensor
    ) -> None:
        """Lets a batch count once in the logs of single outputs.

        Keras (3.15) weights them with the rows that its trace knows, and it knows none where
        batches have different numbers of them.
        """
        compiled = self._model._compile_loss
        trackers = {id(variable) for variable in (compiled.variables if compiled else ())}
        for number, variable in enumerate(self._step.variables):
            if id(variable) in trackers:
                share = tf.math.divide_no_nan(1.0, tf.cast(of_rows, new[number].dtype))
                new[number] = state[number] + (new[number] - state[number]) * share

    def _added_divisors(self, totals: Tensor, state: dict[int, Tensor], data: Any) -> Tensor:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        step = self._step
        with step.scope(state):
            step.divisors.measure()
            step.loss(x, y, step.predictions(x), sample_weight)
        return totals + step.divisors.measured()

    def _finish(
        self,
        gradients: list[Tensor],
        running: Any,
        statistics: Any,
        changed: dict[int, Tensor],
        totals: Tensor,
        of_rows: Tensor,
    ) -> None:
        model, step = self._model, self._step
        for number, value in {**changed, **step.moved(running, statistics)}.items():
            step.variables[number].assign(value)
        trainable = step.trainable
        found = [
            tf.cast(gradient, variable.dtype) if number in self._has_gradient else None
            for number, (gradient, variable) in enumerate(zip(gradients, trainable, strict=True))
        ]
        model.optimizer.apply(found, trainable, **step.weighted(totals, of_rows))


def _first(batch: Any) -> Any:
    """A part of a batch that is there."""
    return next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None)


def _tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    kinds = tf.Tensor | tf.distribute.DistributedValues | tf.SparseTensor | tf.RaggedTensor
    return leaf if isinstance(leaf, kinds) else tf.convert_to_tensor(leaf)


def _of_first_replica(batch: Any, strategy: tf.distribute.Strategy) -> Any:
    def of(leaf: Any) -> Any:
        leaf = _tensor(leaf)
        return None if leaf is None else strategy.experimental_local_results(leaf)[0]

    return keras.tree.map_structure(of, batch)
