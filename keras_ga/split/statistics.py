"""BatchNormalization's running statistics, taken from the whole batch.

A layer that is given the momentum 0 for the time of a micro-batch leaves that micro-batch's own
mean and variance in its running ones. Pooled over the batch (Chan et al., 1983,
https://doi.org/10.1080/00031305.1983.10483115) they are the batch's, and move the running
statistics once, with the layer's momentum. What a layer is normalised by stays its micro-batch's,
so this is exact for the first of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import keras
from keras import ops

from keras_ga import batch_norm, layers
from keras_ga.window import Tensor

Statistics = dict[int, tuple[Tensor, Tensor]]
"""A layer's mean and variance, by the number of its running mean."""


class Pooling:
    """The BatchNormalization layers of a model whose statistics can be pooled.

    Left out, to move on every micro-batch as with a small batch: layers that a step calls more than
    once or with `renorm` (which normalises by the running statistics), and those of
    `keras_ga.layers`, which pool by themselves.

    Args:
        model: A built model.
        numbers: The number of each of its variables, by `id`.
    """

    def __init__(self, model: keras.Model, numbers: Mapping[int, int]):
        repeated = batch_norm.called_repeatedly(model)
        self._layers = {
            numbers[id(layer.moving_mean)]: layer
            for layer in batch_norm.layers_of(model)
            if layer.built
            and layer not in repeated
            and not getattr(layer, "renorm", False)
            and not isinstance(layer, layers.BatchNormalization)
        }
        self._variances = {
            mean: numbers[id(layer.moving_variance)] for mean, layer in self._layers.items()
        }

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the layers the momentum 0, for as long as a batch is worked through."""
        before = {layer: layer.momentum for layer in self._layers.values()}
        for layer in before:
            layer.momentum = 0.0
        try:
            yield
        finally:
            for layer, momentum in before.items():
                layer.momentum = momentum

    def start(self, state: Mapping[int, Tensor]) -> Statistics:
        """The running statistics: where pooling begins, and what it moves."""
        return {mean: (state[mean], state[variance]) for mean, variance in self._variances.items()}

    def merged(
        self,
        pooled: Statistics,
        changed: dict[int, Tensor],
        rows_before: int | Tensor,
        rows: int | Tensor,
    ) -> Statistics:
        """A micro-batch's statistics, taken out of what it changed, merged into the pool."""
        merged = dict(pooled)
        for number, variance_number in self._variances.items():
            if number not in changed:
                continue  # frozen, or not called in training mode
            mean, variance = changed.pop(number), changed.pop(variance_number)
            mean_before, variance_before = pooled[number]
            dtype = mean.dtype
            all_rows = ops.maximum(ops.add(rows_before, rows), 1)
            share = ops.divide(ops.cast(rows, dtype), ops.cast(all_rows, dtype))
            # The mean of no rows is NaN; that of the first rows is all there is.
            distance = ops.where(share > 0, ops.subtract(mean, mean_before), 0)
            between = share * (1 - share) * ops.square(distance)
            within = (1 - share) * variance_before + share * variance
            first = ops.equal(share, 1)
            merged[number] = (
                ops.where(first, mean, mean_before + share * distance),
                ops.where(first, variance, ops.where(share > 0, within + between, variance_before)),
            )
        return merged

    def moved(self, before: Statistics, pooled: Statistics) -> dict[int, Tensor]:
        """The running statistics, moved once by the pooled ones. Not to be called `in_place`."""
        moved = {}
        for number, pair in pooled.items():
            keep = self._layers[number].momentum
            numbers = number, self._variances[number]
            for which, running, value in zip(numbers, before[number], pair, strict=True):
                moved[which] = running * keep + value * (1 - keep)
        return moved
