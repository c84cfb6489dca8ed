"""The JAX engine: state threaded through as values, a zero-or-one-trip loop in compiled steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras

from keras_ga import sharding
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


class _State(NamedTuple):
    """What an update changes: the loop's carry."""

    trainable: list[jax.Array]
    inner: list[jax.Array]


class JaxEngine:
    """Runs eagerly and, inside a `keras.StatelessScope`, under `jax.jit` and `jax.lax.scan`.

    Reading `variable.value` and calling `variable.assign` go to the scope where there is one, so
    the same code serves `model.fit`, `stateless_apply` and a plain `apply`.
    """

    def __init__(self, window: Window, inner_optimizer: Any):
        self._window = window
        self._inner_optimizer = inner_optimizer

    def micro_step(self, gradients: list[Tensor | None], weight: Tensor | float | None) -> None:
        """Takes one micro-batch in, and makes the update if that completes the window."""
        window = self._window
        admission = admit(gradients, weight, window)
        window.micro_steps.assign(window.micro_steps.value + 1)
        if admission.dropped is not None:
            window.dropped_micro_steps.assign(window.dropped_micro_steps.value + admission.dropped)
        if not window.accumulators:
            self._update_at_once(gradients, admission)
            return
        present = jnp.array([gradient is not None for gradient in gradients])
        has_gradient = window.has_gradient.value | present
        window.has_gradient.assign(has_gradient)
        totals = self._added(gradients, admission, opens=window.pending.value == 0)
        pending = window.pending.value + 1
        counts_for = 1 if admission.weight is None else admission.weight
        weight_sum = window.weight_sum.value + counts_for
        closes = pending >= jnp.asarray(window.steps())
        updates = closes & (weight_sum != 0)
        self._close(totals, weight_sum, updates, gradients)
        for accumulator, total in zip(window.accumulators, totals, strict=True):
            accumulator.assign(total)
        window.pending.assign(jnp.where(closes, 0, pending))
        window.weight_sum.assign(jnp.where(closes, 0, weight_sum))
        window.has_updated.assign(updates)
        window.skipped_updates.assign(window.skipped_updates.value + (closes & ~updates))

    def close(self) -> None:
        """Makes the update with what the open window holds; an empty window stays as it is."""
        window = self._window
        if not window.accumulators:
            return
        weight_sum = window.weight_sum.value
        closes = window.pending.value > 0
        updates = closes & (weight_sum != 0)
        totals = [accumulator.value for accumulator in window.accumulators]
        self._close(totals, weight_sum, updates, [None] * len(totals))
        window.skipped_updates.assign(window.skipped_updates.value + (closes & ~updates))
        window.has_updated.assign(jnp.where(closes, updates, window.has_updated.value))
        window.pending.assign(jnp.zeros_like(window.pending.value))
        window.weight_sum.assign(jnp.zeros_like(weight_sum))

    def _added(
        self, gradients: list[Tensor | None], admission: Admission, opens: jax.Array
    ) -> list[jax.Array]:
        """The accumulators with this micro-batch in them.

        Whatever they hold while nothing is pending is the last window's, and counts as nothing:
        emptying them here costs a select in the addition. Emptied where the window closes, they
        would have to be in the loop's carry, and XLA keeps copies of what a trip both reads and
        overwrites: 14 MiB and a fifth of the step's time for Adam on 16.8 M parameters.
        """
        window = self._window
        totals = []
        for gradient, accumulator, variable in zip(
            gradients, window.accumulators, window.variables, strict=True
        ):
            dtype = accumulator.dtype
            empty = jnp.asarray(empty_total(variable), dtype)
            total = jnp.where(opens, empty, accumulator.value)
            if gradient is None:
                totals.append(total)
            elif overwrites(variable):
                totals.append(largest(total, gradient, admission, dtype))
            else:
                totals.append(total + weighted(gradient, admission, dtype))
        return self._pinned(totals, window.accumulators)

    def _close(
        self,
        totals: list[jax.Array],
        weight_sum: jax.Array,
        updates: jax.Array,
        gradients: list[Tensor | None],
    ) -> None:
        """If `updates`, one update of the inner optimizer with the window's gradient."""
        window, inner = self._window, self._inner_optimizer
        state = _State(
            [variable.value for variable in window.variables],
            [variable.value for variable in inner.variables],
        )
        apply = self._apply_function([gradient is not None for gradient in gradients], updates)

        def update(state: _State) -> _State:
            gradients = [
                window_gradient(total, weight_sum, variable, window.reduction)
                for total, variable in zip(totals, window.variables, strict=True)
            ]
            gradients = self._pinned(gradients, window.variables)
            trainable, inner_state = apply(state, gradients)
            return _State(
                self._pinned(trainable, window.variables),
                self._pinned(inner_state, inner.variables),
            )

        self._store(_when(updates, update, state))

    def _pinned(self, values: list[jax.Array], variables: list[Any]) -> list[jax.Array]:
        """The values, in their variables' layouts, where accumulators have another.

        Left to itself XLA cuts the loop's carry as the accumulators are, and gathers weights and
        slots again on every micro-step; pinned, it gathers within the loop, once per window.
        """
        if not self._window.sharded:
            return values
        return [
            keras.distribution.distribute_tensor(value, sharding.layout_of(variable))
            for value, variable in zip(values, variables, strict=True)
        ]

    def _apply_function(self, present: list[bool], updates: jax.Array) -> Callable[..., Any]:
        """The inner optimizer's update, for gradients some of which may never have come.

        A variable that never had a gradient is handed on as None, as the bare optimizer gets it.
        A trace knows only its own Nones. A variable that is missing here may have had its
        gradients from another trace (another branch of the model, a resumed checkpoint), so
        where some are missing the flags decide at run time. An optimizer can't be given a None
        at run time; a variable without gradients among others that had theirs is given zeros,
        and then its value back.
        """
        has_gradient = self._window.has_gradient.value

        def apply(
            state: _State, gradients: list[Tensor | None]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            return self._inner_optimizer.stateless_apply(state.inner, gradients, state.trainable)

        if all(present):
            return apply
        if not isinstance(has_gradient, jax.core.Tracer):
            if not isinstance(updates, jax.core.Tracer) and not updates:
                return apply
            had = has_gradient.tolist()
            return lambda state, gradients: apply(
                state, [g if h else None for g, h in zip(gradients, had, strict=True)]
            )

        def apply_all(
            state: _State, gradients: list[Tensor]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            trainable, inner_state = apply(state, gradients)
            kept = [
                new if here else jnp.where(had, new, old)
                for new, old, here, had in zip(
                    trainable, state.trainable, present, has_gradient, strict=True
                )
            ]
            return kept, inner_state

        if not any(present):  # a flush
            return apply_all
        return lambda state, gradients: jax.lax.cond(
            jnp.any(has_gradient & ~jnp.array(present)),
            lambda state: apply_all(state, gradients),
            lambda state: apply(
                state, [g if p else None for g, p in zip(gradients, present, strict=True)]
            ),
            state,
        )

    def _store(self, state: _State) -> None:
        window = self._window
        variables = [window.variables, self._inner_optimizer.variables]
        for group, values in zip(variables, state, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)

    def _update_at_once(self, gradients: list[Tensor | None], admission: Admission) -> None:
        """N = 1: the micro-batch is the window, and the inner optimizer gets what came."""
        window, inner = self._window, self._inner_optimizer
        if window.reduction == "sum" and admission.weight is not None:
            gradients = [
                g if g is None or overwrites(v) else g * admission.weight.astype(g.dtype)
                for g, v in zip(gradients, window.variables, strict=True)
            ]
        if admission.admitted is None:
            inner.apply(gradients, window.variables)
            window.has_updated.assign(True)
            return

        def update(state: _State) -> _State:
            return _State(*inner.stateless_apply(state.inner, gradients, state.trainable))

        trainable = [variable.value for variable in window.variables]
        state = _State(trainable, [variable.value for variable in inner.variables])
        self._store(_when(admission.admitted, update, state))
        window.has_updated.assign(admission.admitted)
        window.skipped_updates.assign(window.skipped_updates.value + ~admission.admitted)


def _when(predicate: jax.Array, update: Callable[[_State], _State], state: _State) -> _State:
    """`update(state)` if `predicate` holds, else `state`: a branch, or a loop of 0 or 1 trip.

    A loop and not a `lax.cond`, because XLA updates what a loop carries in place, whereas each
    branch of a cond returns copies: 18.5 ms against 65.5 ms a micro-step for Adam on 16.8 M
    parameters (JAX 0.10 on two CPU cores), whether the branch is taken or not.
    """
    if not isinstance(predicate, jax.core.Tracer):
        return update(state) if predicate else state

    def trip(carry: tuple[jax.Array, _State]) -> tuple[jax.Array, _State]:
        return jnp.zeros_like(carry[0]), update(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], trip, (predicate, state))[1]
