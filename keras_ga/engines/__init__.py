"""Adding to a window and closing it, on the backend that Keras runs on.

The arithmetic is the same everywhere (`window.py`); what differs is where state lives and how a
compiled step does something only sometimes. TensorFlow assigns to variables, JAX threads values
through, torch runs eagerly and must not wait for the device. This is the one place that asks
which it is.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import keras

from keras_ga.window import Tensor, Window


class Engine(Protocol):
    """One window on one backend."""

    def micro_step(self, gradients: list[Tensor | None], weight: Tensor | float | None) -> None:
        """Takes one micro-batch in, and makes the update if that completes the window."""

    def close(self) -> None:
        """Makes the update with what the open window holds; an empty window stays as it is."""


# The start of the warning that replicas may disagree about an overflow.
DISAGREES = "Under `mixed_float16` replicas must agree"


def sum_over_replicas(value: Tensor) -> Tensor:
    """The sum of a number over the replicas of a TensorFlow strategy; elsewhere the number."""
    if keras.backend.backend() != "tensorflow":
        return value
    from keras_ga.engines.tensorflow import sum_over_replicas

    return sum_over_replicas(value)


def outside_of_a_trace() -> contextlib.AbstractContextManager[Any]:
    """Where variables can be read and set at once, though TensorFlow may be tracing a step."""
    if keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    from keras_ga.engines.tensorflow import outside_of_a_trace

    return outside_of_a_trace()


def backend() -> str:
    """The current Keras backend.

    Raises:
        ValueError: If it can't train.
    """
    name = keras.backend.backend()
    if name not in ("tensorflow", "jax", "torch"):
        raise ValueError(
            "The Keras backend must be 'tensorflow', 'jax' or 'torch', because gradients can't be "
            "taken on another. Set the environment variable KERAS_BACKEND before importing keras. "
            f"Received: backend={name!r}"
        )
    return name


def create(window: Window, inner_optimizer: Any) -> Engine:
    """The engine of the current Keras backend.

    Args:
        window: The window's state and rules.
        inner_optimizer: The built `keras.optimizers.Optimizer` that makes the updates.

    Raises:
        ValueError: If the backend can't train.
    """
    name = backend()
    if name == "tensorflow":
        from keras_ga.engines.tensorflow import engine_for

        return engine_for(window, inner_optimizer)
    if name == "jax":
        from keras_ga.engines.jax import JaxEngine

        return JaxEngine(window, inner_optimizer)
    from keras_ga.engines.torch import TorchEngine

    return TorchEngine(window, inner_optimizer)
