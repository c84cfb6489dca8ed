"""`LossScaleOptimizer`: a loss scale that all replicas agree on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, final

import keras
from keras import ops

from keras_ga import engines
from keras_ga.window import Tensor


@final
@keras.saving.register_keras_serializable(package="keras_ga")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Keras's dynamic loss scale, for `mixed_float16` on several replicas.

    Keras's own (3.15), which `compile` puts around any optimizer under `mixed_float16`, asks
    whether the gradients are finite on the first replica only. An overflow on another one goes
    into the weights; with two workers it hangs the job. This one asks all replicas, for a
    reduction of one number per micro-step: they skip the same micro-step and halve the scale once.
    `compile` leaves it as it is. On one device, and on JAX and torch, it is Keras's.

    Args:
        inner_optimizer: The `GradientAccumulationOptimizer`, or any other.
        initial_scale: As in `keras.optimizers.LossScaleOptimizer`.
        dynamic_growth_steps: As there, in micro-steps.
        name: Name of the optimizer; a default is made.
        **kwargs: As there.

    Example:

    ```python
    import keras, keras_ga
    import numpy as np

    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras_ga.LossScaleOptimizer(
        keras_ga.GradientAccumulationOptimizer("sgd", accumulation_steps=4)
    )
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(np.ones((32, 4)), np.ones((32, 1)), batch_size=4, verbose=0)
    keras.config.set_dtype_policy("float32")
    ```
    """

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        name: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(inner_optimizer, initial_scale, dynamic_growth_steps, name=name, **kwargs)

    def build(self, var_list: Iterable[keras.Variable]) -> None:
        """Builds the scale's state and the inner optimizer."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", engines.DISAGREES)  # not here
            super().build(var_list)

    def check_finite(self, grads: list[Tensor | None]) -> Tensor:
        """Whether all gradients are finite, on all replicas: scalar bool tensor."""
        overflows = ops.cast(ops.logical_not(super().check_finite(grads)), "float32")
        return ops.equal(engines.sum_over_replicas(overflows), 0)
