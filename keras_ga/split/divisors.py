"""What each loss divides by, so that micro-batches add up to the batch.

Keras computes a loss as S / D: the weighted sum of its values over what its reduction divides by
(rows, tokens that are not masked, sample weights). For the whole batch that is

    L = S / D = sum over micro-batches m of (D_m / D) * L_m

so a micro-batch's loss counts for D_m / D. The rest of the total (regularisers, `add_loss`) counts
for the share of its rows, B_m / B, by which the total is multiplied. Each compiled loss is
therefore multiplied beforehand by

    c_m = (D_m / D) / (B_m / B)

Then loss, metrics and gradients of the micro-batches, each with the weight of its rows, have the
batch's as their mean. Where D is the number of rows, c is 1 and nothing is computed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from keras_ga.window import Tensor

# Private (Keras 3.15); no public way to masks, and to what they do to sample weights.
from keras.src.backend import get_keras_mask  # isort: skip
from keras.src.losses.loss import apply_mask  # isort: skip

_BATCH_WIDE = {
    "dice": "sums over the whole batch before it divides (axis=None)",
    "tversky": "sums over the whole batch before it divides (axis=None)",
    "circle": "compares each row with all others",
}


class Divisors:
    """Stands between a model and its compiled losses while a batch is worked through.

    Args:
        model: A model that is compiled, with its losses built.
        divisor: For losses that average by themselves: a function of `y_true`, or one for each
            name of a loss.
        add_loss: `"mean"` or `"sum"`: what `add_loss` was given, a mean or a sum over rows.
    """

    def __init__(self, model: keras.Model, divisor: Any, add_loss: str, advise: bool = True):
        self._model = model
        self._add_loss = add_loss
        self.losses = _compiled_losses(model)
        self._custom = _by_name(divisor, [loss.name for loss in self.losses])
        # Replicas are traced in turns, a thread for each.
        self._of_this_thread = threading.local()
        self.depend_on_data = False
        """Whether a loss that was called has a divisor that is a tensor."""
        for entry in self.losses:
            _check(entry.name, entry.loss, advise)
        if add_loss == "sum":
            _refuse_activity_regularisers(model)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the corrected losses in the place of the compiled ones."""
        model = self._model
        if self.losses:
            # Private (Keras 3.15): the only place where each loss is by itself.
            before = model._compile_loss._flat_losses
            model._compile_loss._flat_losses = [
                entry._replace(loss=functools.partial(self.corrected, index, entry.loss))
                for index, entry in enumerate(before)
            ]
        if self._add_loss == "sum":
            # Private (Keras 3.15): called with each further loss, regularisers last.
            model._aggregate_additional_loss = self._additional
        try:
            yield
        finally:
            if self.losses:
                model._compile_loss._flat_losses = before
            if self._add_loss == "sum":
                model.__dict__.pop("_aggregate_additional_loss")

    def correct(self, rows: int | Tensor, of_rows: int | Tensor, totals: Tensor) -> None:
        """From now on losses are multiplied by c, for a micro-batch of `rows`.

        Args:
            rows: Rows of the micro-batch.
            of_rows: Rows of the batch.
            totals: Each loss's divisor on the batch; 0 where it is not a tensor.
        """
        local = self._of_this_thread
        local.part, local.measured, local.additional = (rows, of_rows, totals), None, 0
        local.values = {}

    def values(self) -> dict[int, Tensor]:
        """The corrected losses of the micro-batch that was last computed, by number."""
        return self._of_this_thread.values

    def measure(self) -> None:
        """From now on losses are left as they are, and their divisors kept."""
        local = self._of_this_thread
        local.part, local.measured, local.additional = None, {}, 0

    def measured(self) -> Tensor:
        """The divisors that were measured, one for each loss, 0 where rows will do."""
        measured, zero = self._of_this_thread.measured, ops.zeros((), "float32")
        return ops.stack([measured.get(index, zero) for index in range(max(1, len(self.losses)))])

    def no_totals(self) -> Tensor:
        """The totals before anything is added to them."""
        return ops.zeros((max(1, len(self.losses)),), "float32")

    @property
    def has_one(self) -> bool:
        """Whether one divisor is the whole loss's."""
        return len(self.losses) == 1 and self.depend_on_data

    def corrected(
        self,
        index: int,
        loss: keras.losses.Loss,
        y_true: Any,
        y_pred: Any,
        sample_weight: Any = None,
    ) -> Tensor:
        """What is called in a compiled loss's place: its value on this micro-batch, times c."""
        local = self._of_this_thread
        value, divisor = _value_and_divisor(loss, y_true, y_pred, sample_weight)
        if len(value.shape) > 0:
            value = ops.sum(value)  # of no rows, which Keras (3.15) leaves as none
        if index in self._custom:
            divisor = ops.cast(self._custom[index](y_true), "float32")
        if divisor is not None:
            self.depend_on_data = True
        if local.measured is not None:
            if divisor is not None:
                local.measured[index] = divisor
            return value
        rows, of_rows, totals = local.part
        ratio = _ratio(of_rows, rows, value.dtype)
        if divisor is not None:
            share = ops.divide_no_nan(divisor, totals[index])
            value = ops.multiply(value, ops.multiply(ops.cast(share, value.dtype), ratio))
        elif loss.reduction == "sum":
            value = ops.multiply(value, ratio)
        local.values[index] = value
        return value

    def _additional(self, loss: Tensor) -> Tensor:
        local, model = self._of_this_thread, self._model
        value = type(model)._aggregate_additional_loss(model, loss)
        if local.measured is not None:
            return value
        if local.additional == 0:
            local.count = len(model.losses)
        regularisers = sum(v.regularizer is not None for v in model.trainable_weights)
        is_added = local.additional < local.count - regularisers
        local.additional = (local.additional + 1) % local.count
        if not is_added:
            return value
        rows, of_rows, _ = local.part
        return ops.multiply(value, _ratio(of_rows, rows, value.dtype))


def _value_and_divisor(
    loss: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any
) -> tuple[Tensor, Tensor | None]:
    """A loss's value, and what it was divided by if that is not just the rows.

    Constant factors are left out: only ratios of divisors are used.
    """
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return loss(y_true, y_pred, sample_weight), None
    seen: list[Tensor] = []
    call = loss.call

    def watched(y_true: Any, y_pred: Any) -> Tensor:
        seen.append(call(y_true, y_pred))
        return seen[0]

    # What the reduction sees: it may have a mask of its own (`ignore_class`).
    loss.call = watched
    try:
        value = loss(y_true, y_pred, _copied(sample_weight))
    finally:
        loss.__dict__.pop("call")
    (values,) = seen
    masks = [mask for mask in map(get_keras_mask, (y_pred, values)) if mask is not None]
    mask = masks[0] & masks[-1] if masks else None
    if tuple(values.shape) == () or loss.reduction == "sum":
        return value, None  # nothing is divided; a scalar is taken as a mean over rows
    if loss.reduction == "mean_with_sample_weight" and (sample_weight is not None or masks):
        weights = _copied(sample_weight)
        if weights is not None:
            weights = ops.convert_to_tensor(weights, dtype=loss.dtype)
        weights = apply_mask(weights, mask, dtype=loss.dtype, reduction=loss.reduction)
        return value, ops.cast(ops.sum(weights), "float32")
    if mask is None:
        return value, None
    return value, ops.cast(ops.sum(ops.cast(mask, "float32")), "float32")


def _copied(sample_weight: Any) -> Any:
    # On torch, Keras (3.15) multiplies a mask into the caller's sample weights, in place.
    return None if sample_weight is None else ops.copy(sample_weight)


def _ratio(rows: int | Tensor, by: int | Tensor, dtype: Any) -> Tensor | float:
    if isinstance(rows, int) and isinstance(by, int):
        return rows / by
    return ops.divide_no_nan(ops.cast(rows, dtype), ops.cast(by, dtype))


def _compiled_losses(model: keras.Model) -> list[Any]:
    """The compiled losses, each with the name that logs have it under."""
    compiled = model._compile_loss
    if compiled is None:
        return []
    if not hasattr(compiled, "_flat_losses"):
        raise RuntimeError(
            f"keras_ga does not know how Keras {keras.__version__} keeps compiled losses, and "
            "can't split batches exactly. Use `GradientAccumulationOptimizer`."
        )
    return list(compiled._flat_losses or ())


def _by_name(divisor: Any, names: list[str]) -> dict[int, Callable[[Any], Any]]:
    if divisor is None:
        return {}
    if callable(divisor):
        if len(names) == 1:
            return {0: divisor}
        raise ValueError(
            "`divisor` must be a dict from losses' names to functions, because the model is "
            f"compiled with {len(names)} losses. Use the names "
            f"{', '.join(map(repr, names))}. Received: divisor={divisor!r}"
        )
    unknown = sorted(set(divisor) - set(names))
    if unknown:
        raise ValueError(
            "`divisor` must have names of compiled losses for keys, because it says what each "
            f"divides by. Use {', '.join(map(repr, names))}. Received: {', '.join(unknown)}"
        )
    return {index: divisor[name] for index, name in enumerate(names) if name in divisor}


def _check(name: str, loss: Any, advise: bool) -> None:
    if loss.reduction in (None, "none"):
        raise ValueError(
            "The compiled loss must have a reduction, because a batch's loss is one number. "
            "Construct it with reduction='sum_over_batch_size'. Received: "
            f"reduction={loss.reduction!r} of loss {name!r}"
        )
    function = getattr(getattr(loss, "fn", None), "__name__", "")
    arguments = getattr(loss, "_fn_kwargs", {})
    if advise and function in _BATCH_WIDE and arguments.get("axis") is None:
        warnings.warn(
            f"The loss {name!r} {_BATCH_WIDE[function]}, so the batch's is not made of those "
            "of micro-batches: it is taken as their mean. "
            + (
                "Give it axis=(1, 2, ...), so that it is one number per row. "
                if function != "circle"
                else ""
            )
            + "`keras_ga.check_split` shows the difference.",
            stacklevel=2,
        )


def _refuse_activity_regularisers(model: keras.Model) -> None:
    # Private (Keras 3.15): reaches layers in lists and wrappers as well.
    found = [
        layer.name
        for layer in model._flatten_layers()
        if getattr(layer, "activity_regularizer", None) is not None
    ]
    if found:
        raise ValueError(
            "`add_loss` must be 'mean' where a layer has an activity regulariser, because that is "
            "a mean over rows and is added in the same way. Divide what you add by the rows of "
            f"its batch. Received: add_loss='sum' with {', '.join(found)}"
        )
