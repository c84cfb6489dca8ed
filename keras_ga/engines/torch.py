"""The torch engine: fused in-place sums, and no waiting for the device on a held micro-step."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import torch
import torch.distributed

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


def _warn_of_other_processes() -> None:
    # Keras 3.15 has no distributed training on torch: each process would train on its own.
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        processes = distributed.get_world_size()
        if processes > 1:
            warnings.warn(
                f"`torch.distributed` has {processes} processes, but gradients are not averaged "
                "over them: Keras has no distributed training on torch, and each process trains "
                "weights of its own. Average the gradients before `apply`, or train on JAX or "
                "TensorFlow.",
                stacklevel=5,
            )


class TorchEngine:
    """Runs eagerly; compiled models call it from outside their graph."""

    def __init__(self, window: Window, inner_optimizer: Any):
        self._window = window
        self._inner_optimizer = inner_optimizer
        _warn_of_other_processes()
        self._pending = _HostCopy(window.pending)
        self._judged_by = {
            id(variable): _HostCopy(variable)
            for variable in (window.iterations, window.accumulation_steps)
            if variable is not None
        }

    # Dynamo would specialise the step on every value that the counters take, and give up.
    @torch.compiler.disable
    @torch.no_grad()
    def micro_step(self, gradients: list[Tensor | None], weight: Tensor | float | None) -> None:
        """Takes one micro-batch in, and makes the update if that completes the window."""
        window = self._window
        if window.accumulators or weight is not None or window.nonfinite == "drop":
            gradients = [_dense(g) for g in gradients]
        admission = admit(gradients, weight, window)
        window.micro_steps.value.add_(1)
        if admission.dropped is not None:
            window.dropped_micro_steps.value.add_(admission.dropped)
        if not window.accumulators:
            self._update_at_once(gradients, admission)
            return
        present = [gradient is not None for gradient in gradients]
        if all(present):
            window.has_gradient.value.fill_(True)
        else:
            window.has_gradient.value.logical_or_(_like(window.has_gradient, present))
        self._add(gradients, admission)
        window.weight_sum.value.add_(1 if admission.weight is None else admission.weight)
        self._pending.set(self._pending.get() + 1)
        if self._pending.get() >= window.steps(
            lambda variable: self._judged_by[id(variable)].get()
        ):
            self._close(present)
        else:
            window.has_updated.value.fill_(False)

    @torch.compiler.disable
    @torch.no_grad()
    def close(self) -> None:
        """Makes the update with what the open window holds; an empty window stays as it is."""
        if self._window.accumulators and self._pending.get() > 0:
            self._close([False] * len(self._window.variables))

    def _add(self, gradients: list[Tensor | None], admission: Admission) -> None:
        window = self._window
        totals, summands = [], []
        for gradient, accumulator, variable in zip(
            gradients, window.accumulators, window.variables, strict=True
        ):
            if gradient is None:
                continue
            total = accumulator.value
            if overwrites(variable):
                total.copy_(largest(total, gradient, admission, accumulator.dtype))
            else:
                totals.append(total)
                as_it_is = admission.weight is None and gradient.dtype == total.dtype
                summands.append(
                    gradient if as_it_is else weighted(gradient, admission, accumulator.dtype)
                )
        if totals:
            torch._foreach_add_(totals, summands)

    def _close(self, present: list[bool]) -> None:
        """One update of the inner optimizer with the window's gradient; a fresh window."""
        window = self._window
        weight_sum = window.weight_sum.value
        updates = bool(weight_sum != 0)
        if updates:
            gradients = [
                window_gradient(accumulator.value, weight_sum, variable, window.reduction)
                for accumulator, variable in zip(window.accumulators, window.variables, strict=True)
            ]
            if not all(present):
                # What never had a gradient is handed on as None, as the bare optimizer gets it.
                had = window.has_gradient.value.tolist()
                gradients = [g if h else None for g, h in zip(gradients, had, strict=True)]
            self._inner_optimizer.apply(gradients, window.variables)
            for accumulator, variable in zip(window.accumulators, window.variables, strict=True):
                accumulator.value.fill_(empty_total(variable))
        else:
            window.skipped_updates.value.add_(1)
        window.has_updated.value.fill_(updates)
        self._pending.set(0)
        window.weight_sum.value.zero_()

    def _update_at_once(self, gradients: list[Tensor | None], admission: Admission) -> None:
        """N = 1: the micro-batch is the window, and the inner optimizer gets what came."""
        window = self._window
        if window.reduction == "sum" and admission.weight is not None:
            gradients = [
                g if g is None or overwrites(v) else g * admission.weight.to(g.dtype)
                for g, v in zip(gradients, window.variables, strict=True)
            ]
        updates = admission.admitted is None or bool(admission.admitted)
        if updates:
            self._inner_optimizer.apply(gradients, window.variables)
        else:
            window.skipped_updates.value.add_(1)
        window.has_updated.value.fill_(updates)


class _HostCopy:
    """A counter that lives on the device, with its value known on the host.

    Reading a number from the device makes the host wait until the device has caught up with it.
    The copy is read anew only when someone else has written to the variable (a checkpoint, a
    reset), which torch counts in the tensor's version.
    """

    def __init__(self, variable: keras.Variable):
        self._variable = variable
        self._seen: tuple[int, int] | None = None
        self._value = 0

    def get(self) -> int:
        if self._seen != self._mark():
            self._value, self._seen = int(self._variable.value), self._mark()
        return self._value

    def set(self, value: int) -> None:
        self._variable.value.fill_(value)
        self._value, self._seen = value, self._mark()

    def _mark(self) -> tuple[int, int]:
        tensor = self._variable.value
        return id(tensor), tensor._version


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _like(variable: keras.Variable, values: list[bool]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool, device=variable.value.device)
