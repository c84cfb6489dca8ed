"""Micro-steps on JAX: functions from values to values, jitted one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_ga.split import memory
from keras_ga.split.step import Carry, Place, TrainStep, added, share_of
from keras_ga.window import Tensor, empty_total, wide_dtype


def train_function(step: TrainStep) -> Callable[[Any, Iterator[Any]], Any]:
    """What `make_train_function` makes on JAX: `(state, iterator)` to `(logs, state)`."""
    if step.sizes.automatic and jax.process_count() > 1:
        raise ValueError(
            "`micro_batch_size` must be an int with several processes, because each would find a "
            "size of its own, and wait for the others for ever. Pass the smallest that any finds. "
            f"Received: micro_batch_size='auto' with {jax.process_count()} processes"
        )

    def train(state: Any, iterator: Iterator[Any]) -> Any:
        batch = next(iterator)
        backend = step.build(batch, in_fit=True)
        backend.state = state
        try:
            logs = step(batch)
            for _, batch in zip(range(step.model.steps_per_execution - 1), iterator, strict=False):
                logs = step(batch)
        except BaseException:  # an interrupted notebook as well
            # `fit` has taken the values out of the model; a step that failed has not changed them.
            backend.return_state_to_model()
            raise
        return logs, backend.state

    return train


def prepare(step: TrainStep, batch: Any) -> Any:
    """Makes a step ready outside of `fit`; returns the batch as the backend wants it."""
    model = step.model
    step.build(batch)
    step.backend.state = tuple(
        [variable.value for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    return step.backend.ready(batch)


class Backend:
    """A model's micro-steps on JAX.

    Only the sums of gradients are donated from one micro-step to the next; the model's values are
    donated to the update alone, when all micro-steps are known to have been computed.
    """

    def __init__(self, step: TrainStep):
        model = step.model
        self._step, self._model = step, model
        self.state: Any = None
        """Values of the trainable, other, optimizer's and metrics' variables, as `fit` has them."""
        self._compiled = model.jit_compile and not model.run_eagerly
        self._cutters: dict[tuple[int, int], Callable[..., Any]] = {}
        self._micro_step = self._jit(self._gradients_and_changes, donate_argnums=0)
        self._divisors = self._jit(self._added_divisors)
        self._moved = self._jit(step.moved)

    @functools.cached_property
    def _zeros(self) -> Callable[..., Any]:
        trainable, *_ = self._shardings
        return self._jit(self._no_gradients, out_shardings=trainable)

    @functools.cached_property
    def _update(self) -> Callable[..., Any]:
        trainable, _, optimizer, _ = self._shardings
        return self._jit(self._updated, donate_argnums=(0, 1), out_shardings=(trainable, optimizer))

    @functools.cached_property
    def _shardings(self) -> Any:
        """Where the model's values are, if on several devices: what is made of them stays there.

        On one device it is left unsaid: values that are said to be there are others to `jit` than
        those that are there by default, and all would be compiled a second time.
        """
        if all(len(value.devices()) == 1 for value in _leaves(self.state)):
            return None, None, None, None
        return jax.tree.map(lambda value: value.sharding, self.state)

    def _jit(self, function: Callable[..., Any], **arguments: Any) -> Any:
        return jax.jit(function, **arguments) if self._compiled else function

    def local(self, batch: Any) -> Any:
        """The batch as it came."""
        return batch

    def ready(self, batch: Any) -> Any:
        """The batch on the devices."""
        return jax.tree.map(jnp.asarray, batch)

    def rows(self, batch: Any) -> int:
        """Rows of a batch on each device."""
        return _leaves(batch)[0].shape[0] // _shards(batch)

    def part(self, batch: Any, start: int, size: int) -> Any:
        """`size` rows of a batch on each device, from `start` on; none of them moves."""
        if size == self.rows(batch):
            return batch
        shards = _shards(batch)
        if (size, shards) not in self._cutters:
            # As the batch is cut over the devices, so are its parts.
            layouts = jax.tree.map(lambda leaf: leaf.sharding, batch) if shards > 1 else None
            cut = functools.partial(_rows_from, size=size, shards=shards)
            self._cutters[size, shards] = self._jit(cut, out_shardings=layouts)
        return self._cutters[size, shards](batch, start)

    def start(self, batch: Any) -> Carry:
        """No gradients yet, and the model's values."""
        trainable, others, _, metrics = self.state
        state = dict(enumerate([*others, *metrics]))
        gradients = self._zeros(trainable)
        return Carry(gradients, state, self._step.statistics(state), {})

    def divisors(self, totals: Any, carry: Carry, part: Any) -> Any:
        """The losses' divisors on a micro-batch, added to the totals."""
        return self._divisors(totals, self.state, part)

    def micro_step(self, carry: Carry, totals: Any, part: Any, place: Place) -> Carry:
        """Takes one micro-batch in."""
        gradients, changed, statistics, logs = self._micro_step(
            *self._arguments(carry, totals, part, place)
        )
        return Carry(gradients, {**carry.state, **changed}, statistics, logs)

    def wait(self, carry: Carry) -> None:
        """Returns when all that is carried has really been computed, or raises."""
        jax.block_until_ready((carry.gradients, carry.state, carry.statistics))

    def finish(self, carry: Carry, totals: Any, rows: int) -> Any:
        """Makes the update; returns the logs."""
        trainable, others, optimizer, _ = self.state
        state = carry.state
        if carry.statistics:
            moved = self._moved(self._step.statistics(state), carry.statistics)
            state = {**state, **moved}
        weighted = self._step.weighted(totals, rows)
        trainable, optimizer = self._update(trainable, optimizer, carry.gradients, weighted)
        values = [state[number] for number in range(len(state))]
        self.state = (trainable, values[: len(others)], optimizer, values[len(others) :])
        return carry.logs

    def gradients(self, carry: Carry) -> list[Any]:
        """What is carried of gradients, as arrays."""
        return [np.asarray(gradient) for gradient in carry.gradients]

    def plan(self, carry: Carry, totals: Any, batch: Any, part: Any) -> memory.Plan | None:
        """What the compiler plans for a micro-batch; None if nothing is compiled."""
        if not self._compiled:
            return None
        place = Place(0, self.rows(part), self.rows(part))
        lowered = self._micro_step.lower(*self._arguments(carry, totals, part, place))
        plan = lowered.compile().memory_analysis()
        if plan is None:
            return None
        outputs = plan.output_size_in_bytes - plan.alias_size_in_bytes
        shards = _shards(part)
        known = jax.local_devices()[0].memory_stats() or {}
        limit = self._step.options.memory_limit or known.get("bytes_limit")
        # A CPU does not tell what is in use; what is known to be is little beside its memory.
        there = _bytes((self.state, carry.gradients, batch)) // shards
        return memory.plan(
            needed=plan.temp_size_in_bytes + outputs + _bytes(part) // shards,
            limit=limit or memory.of_this_machine(),
            in_use=known.get("bytes_in_use", there),
        )

    def undo(self) -> None:
        """Nothing: values are handed on, not set."""

    def return_state_to_model(self) -> None:
        """Gives the model back the values that `fit` has taken out of it."""
        trainable, others, optimizer, metrics = self.state
        model = self._model
        model._jax_state = {  # private (Keras 3.15): what `jax_state_sync` reads
            "trainable_variables": trainable,
            "non_trainable_variables": others,
            "optimizer_variables": optimizer,
            "metrics_variables": metrics,
        }
        model._jax_state_synced = False
        model.jax_state_sync()

    # The compiled functions.

    def _arguments(self, carry: Carry, totals: Any, part: Any, place: Place) -> tuple[Any, ...]:
        trainable, _, optimizer, _ = self.state
        place = Place(*map(jnp.int32, place))
        values = carry.gradients, carry.statistics, carry.state, trainable, optimizer
        return (*values, totals, part, place)

    def _no_gradients(self, trainable: list[Tensor]) -> list[Tensor]:
        return [
            jnp.full(value.shape, empty_total(variable), wide_dtype(value.dtype))
            for value, variable in zip(trainable, self._model.trainable_variables, strict=True)
        ]

    def _gradients_and_changes(
        self,
        gradients: list[Tensor],
        statistics: Any,
        state: dict[int, Tensor],
        trainable: list[Tensor],
        optimizer: list[Tensor],
        totals: Tensor,
        data: Any,
        place: Place,
    ) -> tuple[list[Tensor], dict[int, Tensor], Any, Any]:
        model, divisors = self._model, self._step.divisors
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        values = [state[number] for number in range(len(state))]
        count = len(model.non_trainable_variables)
        others, metrics = values[:count], values[count:]

        def part_of_loss(trainable: list[Tensor]) -> tuple[Tensor, Any]:
            divisors.correct(place.rows, place.of_rows, totals)
            loss, results = self._loss((trainable, others, optimizer, metrics), data)
            # The loss and not its gradient: in float16 that would be too large on its way.
            return loss * share_of(place).astype(loss.dtype), results

        found, (loss, y_pred, others, metrics) = jax.grad(part_of_loss, has_aux=True)(trainable)
        # Private (Keras 3.15): updates the loss's and the compiled metrics, as its train step does.
        logs, metrics = model._update_metrics_variables(metrics, loss, x, y, y_pred, sample_weight)
        new = dict(enumerate([*others, *metrics]))
        statistics, changed = self._step.changed(statistics, new, state, place)
        totals_and_gradients = zip(gradients, found, model.trainable_variables, strict=True)
        return [added(*each) for each in totals_and_gradients], changed, statistics, logs

    def _added_divisors(self, totals: Tensor, state: Any, data: Any) -> Tensor:
        self._step.divisors.measure()
        self._loss(state, data)
        return totals + self._step.divisors.measured()

    def _loss(self, state: Any, data: Any) -> tuple[Tensor, Any]:
        trainable, others, optimizer, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        return self._model.compute_loss_and_updates(
            trainable,
            others,
            metrics,
            x,
            y,
            sample_weight,
            training=self._step.training,
            optimizer_variables=optimizer,
        )

    def _updated(
        self, trainable: Any, optimizer: Any, gradients: list[Tensor], weighted: dict[str, Any]
    ) -> tuple[Any, Any]:
        gradients = [
            gradient.astype(value.dtype)
            for gradient, value in zip(gradients, trainable, strict=True)
        ]
        return self._model.optimizer.stateless_apply(optimizer, gradients, trainable, **weighted)


def _rows_from(batch: Any, start: Tensor, *, size: int, shards: int) -> Any:
    def of(leaf: Tensor) -> Tensor:
        leaf = leaf.reshape(shards, leaf.shape[0] // shards, *leaf.shape[1:])
        leaf = jax.lax.dynamic_slice_in_dim(leaf, start, size, axis=1)
        return leaf.reshape(shards * size, *leaf.shape[2:])

    return jax.tree.map(of, batch)


def _leaves(data: Any) -> list[Any]:
    return jax.tree.leaves(data)


def _bytes(data: Any) -> int:
    return sum(leaf.nbytes for leaf in _leaves(data))


def _shards(batch: Any) -> int:
    """Into how many parts the devices have cut a batch."""
    return max(leaf.shape[0] // leaf.sharding.shard_shape(leaf.shape)[0] for leaf in _leaves(batch))
