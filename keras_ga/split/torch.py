"""Micro-steps on torch: eager, each backward pass adding to the gradients of the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch

from keras_ga.split.step import Carry, Place, TrainStep, added, share_of
from keras_ga.window import Tensor, empty_total, overwrites, wide_dtype


def train_function(step: TrainStep) -> Callable[[Any], Any]:
    """What `make_train_function` makes on torch: a list of one batch to logs."""
    if step.model.steps_per_execution > 1:
        raise ValueError(
            "`steps_per_execution` must be 1 on torch, because Keras has no other there. Leave it "
            f"out. Received: steps_per_execution={step.model.steps_per_execution}"
        )

    def train(batches: Any) -> Any:
        step.build(batches[0], in_fit=True)
        return step(batches[0])

    return train


def prepare(step: TrainStep, batch: Any) -> Any:
    """Makes a step ready outside of `fit`; returns the batch as the backend wants it."""
    step.build(batch)
    return step.backend.ready(batch)


class Backend:
    """A model's micro-steps on torch."""

    def __init__(self, step: TrainStep):
        self._step, self._model = step, step.model
        self._before: dict[int, Tensor] = {}
        self._random: list[Tensor] = []
        self._devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        self._forward = torch.compile(self._loss) if step.model.jit_compile else self._loss

    def local(self, batch: Any) -> Any:
        """The batch as it came."""
        return batch

    def ready(self, batch: Any) -> Any:
        """The batch as tensors on the model's device."""
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), batch
        )

    def rows(self, batch: Any) -> int:
        """Rows of a batch."""
        return _first(batch).shape[0]

    def part(self, batch: Any, start: int, size: int) -> Any:
        """`size` rows of a batch, from `start` on."""
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else leaf[start : start + size], batch
        )

    def start(self, batch: Any) -> Carry:
        """No gradients yet, and the model's values."""
        self._model.zero_grad()
        # Keras's dropout without a seed draws from torch's own generator.
        self._random = [torch.get_rng_state()]
        if self._devices:
            self._random.append(torch.cuda.get_rng_state())
        self._before = {n: v.value for n, v in enumerate(self._step.variables)}
        # A variable of its own dtype is added to in its `.grad`, without a copy of it.
        sums = [
            torch.full(v.shape, empty_total(v), dtype=getattr(torch, dtype), device=v.value.device)
            if (dtype := wide_dtype(v.dtype)) != v.dtype or overwrites(v)
            else None
            for v in self._model.trainable_variables
        ]
        return Carry(sums, self._before, self._step.statistics(self._before), {})

    @torch.no_grad()
    def divisors(self, totals: Any, carry: Carry, part: Any) -> Any:
        """The losses' divisors on a micro-batch, added to the totals."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(part)
        step = self._step
        with torch.random.fork_rng(self._devices), step.scope(carry.state):
            step.divisors.measure()
            step.loss(x, y, step.predictions(x), sample_weight)
        return totals + step.divisors.measured()

    def micro_step(self, carry: Carry, totals: Any, part: Any, place: Place) -> Carry:
        """Takes one micro-batch in."""
        model, step = self._model, self._step
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(part)
        with step.scope(carry.state) as scope:
            step.divisors.correct(place.rows, place.of_rows, totals)
            y_pred, loss = self._forward(x, y, sample_weight)
            # The loss and not its gradient: in float16 that would be too large on its way.
            scaled = model.optimizer.scale_loss(loss * share_of(place))
        step.check_not_set(scope)
        if scaled.requires_grad:
            scaled.backward()
        with torch.no_grad():
            sums = [
                self._taken(*each)
                for each in zip(carry.gradients, model.trainable_variables, strict=True)
            ]
            with scope:
                # Private (Keras 3.15), as its own train step does it.
                model._loss_tracker.update_state(loss, sample_weight=place.rows)
                logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
            # Detached, or the next micro-batch would drag this one's graph along.
            new = {
                number: value.detach()
                for number, variable in enumerate(step.variables)
                if (value := scope.get_current_value(variable)) is not carry.state[number]
            }
            statistics, changed = step.changed(carry.statistics, new, carry.state, place)
        return Carry(sums, {**carry.state, **changed}, statistics, logs)

    def wait(self, carry: Carry) -> None:
        """Nothing: memory is asked for when an operation is called."""

    @torch.no_grad()
    def finish(self, carry: Carry, totals: Any, rows: int) -> Any:
        """Sets what was carried, makes the update, returns the logs."""
        model, step = self._model, self._step
        changed = {n: v for n, v in carry.state.items() if v is not self._before[n]}
        changed |= step.moved(step.statistics(carry.state), carry.statistics)
        for number, value in changed.items():
            step.variables[number].assign(value)
        self._before = {}
        trainable = model.trainable_variables
        model.optimizer.apply(self._found(carry), trainable, **step.weighted(totals, rows))
        return carry.logs

    def undo(self) -> None:
        """Puts random numbers back; lets go of gradients."""
        self._model.zero_grad()
        torch.set_rng_state(self._random[0])
        if self._devices:
            torch.cuda.set_rng_state(self._random[1])

    def gradients(self, carry: Carry) -> list[Any]:
        """What is carried of gradients, as arrays; leaves none behind."""
        gradients = [
            keras.ops.convert_to_numpy(torch.zeros_like(variable.value) if found is None else found)
            for found, variable in zip(
                self._found(carry), self._model.trainable_variables, strict=True
            )
        ]
        self._model.zero_grad()
        return gradients

    def plan(self, carry: Carry, totals: Any, batch: Any, part: Any) -> None:
        """None: torch has no plan to ask."""

    def _loss(self, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Tensor]:
        y_pred = self._step.predictions(x)
        return y_pred, self._step.loss(x, y, y_pred, sample_weight)

    def _found(self, carry: Carry) -> list[Tensor | None]:
        return [
            variable.value.grad if total is None else total.to(variable.value.dtype)
            for total, variable in zip(
                carry.gradients, self._model.trainable_variables, strict=True
            )
        ]

    @staticmethod
    def _taken(total: Tensor | None, variable: keras.Variable) -> Tensor | None:
        """A sum in another dtype than its variable's, with the micro-batch's gradient in it."""
        gradient = variable.value.grad
        if total is None or gradient is None:
            return total
        variable.value.grad = None
        return added(total, gradient, variable)


def _first(batch: Any) -> Any:
    return next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None)
