"""The train step that `model.fit` runs, called without `fit`, on data that is on the device.

A step is a callable: `step(n)` makes n micro-steps and returns when the device has finished them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

Batch = tuple[np.ndarray, np.ndarray]


def train_step(model: keras.Model, batch: Batch) -> Callable[[int], None]:
    """Returns the step of a compiled model on the current backend."""
    model.optimizer.build(model.trainable_variables)
    steps = {"jax": JaxStep, "tensorflow": TensorFlowStep, "torch": TorchStep}
    return steps[keras.backend.backend()](model, batch)


class JaxStep:
    """`model.train_step`, jitted as Keras's trainer does it: the state goes in and is donated."""

    def __init__(self, model: keras.Model, batch: Batch):
        self._start(model.train_step, state_of(model), batch)

    def _start(self, step: Callable[..., Any], state: Any, batch: Batch) -> None:
        import jax

        self._state, self._batch = state, jax.device_put(batch)
        jitted = jax.jit(step, donate_argnums=0)
        self.compiled = jitted.lower(self._state, self._batch).compile()

    def __call__(self, micro_steps: int) -> None:
        """Makes so many micro-steps."""
        import jax

        state = self._state
        for _ in range(micro_steps):
            _, state = self.compiled(state, self._batch)
        self._state = jax.block_until_ready(state)


class OptaxStep(JaxStep):
    """The same model in a jitted loop of one's own, with an optax transformation."""

    def __init__(self, model: keras.Model, batch: Batch, transformation: Any):
        import jax
        import optax

        def loss_of(trainable: Any, non_trainable: Any, x: Any, y: Any) -> Any:
            outputs, non_trainable = model.stateless_call(trainable, non_trainable, x)
            return ((outputs - y) ** 2).mean(), non_trainable

        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            trainable, non_trainable, optimizer_state = state
            (loss, non_trainable), gradients = jax.value_and_grad(loss_of, has_aux=True)(
                trainable, non_trainable, *batch
            )
            updates, optimizer_state = transformation.update(gradients, optimizer_state, trainable)
            trainable = optax.apply_updates(trainable, updates)
            return loss, (trainable, non_trainable, optimizer_state)

        trainable = [variable.value for variable in model.trainable_variables]
        non_trainable = [variable.value for variable in model.non_trainable_variables]
        self._start(step, (trainable, non_trainable, transformation.init(trainable)), batch)


class TensorFlowStep:
    """`model.train_function` on an iterator that repeats one batch."""

    def __init__(self, model: keras.Model, batch: Batch):
        import tensorflow as tf

        # It takes the many models of one process for retraces of one function, and warns.
        tf.get_logger().setLevel("ERROR")
        model.make_train_function()
        self._function = model.train_function
        self._iterator = iter(tf.data.Dataset.from_tensors(batch).repeat())
        self._wait = tf.test.experimental.sync_devices

    def __call__(self, micro_steps: int) -> None:
        """Makes so many micro-steps."""
        for _ in range(micro_steps):
            self._function(self._iterator)
        self._wait()


class TorchStep:
    """`model.train_function` on tensors that stay where the model is."""

    def __init__(self, model: keras.Model, batch: Batch):
        import torch

        model.make_train_function()
        model.train()
        self._function = model.train_function
        x, y = (keras.ops.convert_to_tensor(part) for part in batch)
        self._batch = [(x, y)]
        # Builds the loss, which dynamo can't follow; `fit` does it before the first step, too.
        model.compute_loss(x=x, y=y, y_pred=model(x))
        self._wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def __call__(self, micro_steps: int) -> None:
        """Makes so many micro-steps."""
        for _ in itertools.repeat(None, micro_steps):
            self._function(self._batch)
        self._wait()


def state_of(model: keras.Model) -> tuple[list[Any], ...]:
    """Returns the values that Keras's JAX trainer threads through a step."""
    return tuple(
        [variable.value for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )


def memory_plan(compiled: Any) -> dict[str, float]:
    """Returns what XLA has planned for one compiled step, in MiB.

    Arguments are what the step is given (weights, slots, accumulators, data); temporaries what it
    needs besides while it runs. Outputs live in the arguments' memory as far as they are aliased,
    so the peak is the arguments, the temporaries and the rest of the outputs.
    """
    plan = compiled.memory_analysis()
    mib = {
        "arguments": plan.argument_size_in_bytes / 2**20,
        "temporaries": plan.temp_size_in_bytes / 2**20,
        "outputs": plan.output_size_in_bytes / 2**20,
        "aliased": plan.alias_size_in_bytes / 2**20,
    }
    new_outputs = mib["outputs"] - mib["aliased"]
    return {**mib, "peak": mib["arguments"] + mib["temporaries"] + new_outputs}
