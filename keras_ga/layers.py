"""`layers.BatchNormalization`: running statistics of the window, not of its micro-batches."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
from keras import ops

from keras_ga import engines
from keras_ga.arguments import checked_steps
from keras_ga.window import Tensor, number, wide_dtype


@keras.saving.register_keras_serializable(package="keras_ga")
class BatchNormalization(keras.layers.BatchNormalization):
    """Batch normalisation whose running statistics are those of the large batch.

    In training each micro-batch is normalised by its own statistics, as by Keras's layer. Its mean
    and variance go into a pool, with what differs between the micro-batches, and the last
    micro-batch of a window moves the running statistics once, with `momentum` as the large batch
    would. Exact (to float rounding) for the first such layer of a model; deeper ones see inputs
    that were normalised by micro-batch, which no running statistics can undo. Trainable weights
    are those of Keras's layer, bit for bit.

    It counts its own calls in training mode, so call it once per micro-step (no shared layers,
    no `RematScope`). A micro-batch whose mean or variance is not finite is left out, as is one
    that is wholly masked. Weight files are the same as those of Keras's layer, and load both ways,
    wherever no window is open; a file with an open window loads into this layer only.

    Use `keras_ga.batch_norm.convert` to turn the layers of a model that you have into these.

    Args:
        axis: As in `keras.layers.BatchNormalization`.
        momentum: As there; per update.
        epsilon: As there.
        accumulation_steps: Micro-batches per window, int >= 1: that of the optimizer.
        **kwargs: Further arguments of `keras.layers.BatchNormalization`, other than `renorm`.

    Raises:
        TypeError: If `accumulation_steps` is no int.
        ValueError: If it is below 1, or `renorm` is set.

    Example:

    ```python
    import keras, keras_ga
    import numpy as np

    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras_ga.layers.BatchNormalization(momentum=0.9, accumulation_steps=4),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras_ga.GradientAccumulationOptimizer("sgd", 4), loss="mse")
    x = np.random.default_rng(0).normal(3.0, size=(32, 4))
    model.fit(x, np.ones((32, 1)), batch_size=8, verbose=0)
    print(np.allclose(model.layers[0].moving_mean, 0.1 * x.mean(0), atol=1e-6))  # True
    ```

    References:
        - Chan, Golub and LeVeque, 1979, *Updating formulae and a pairwise algorithm for computing
          sample variances*, on merging means and variances
    """

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        *,
        accumulation_steps: int = 1,
        **kwargs: Any,
    ):
        steps = checked_steps("accumulation_steps", accumulation_steps)
        if kwargs.get("renorm"):
            raise ValueError(
                "`renorm` must be left out, because batch renormalisation uses its running "
                "statistics within each micro-batch. Use `keras.layers.BatchNormalization` and "
                "`keras_ga.batch_norm.adjust_momentum`. Received: renorm=True"
            )
        super().__init__(axis, momentum, epsilon, **kwargs)
        self._steps = steps

    def build(self, input_shape: Any) -> None:
        """Makes the weights of Keras's layer, and the window's."""
        super().build(input_shape)
        self._build_window()

    def _build_window(self, micro_batches: int = 0) -> None:
        """Makes the state of a window that has seen so many micro-batches already."""
        dtype = wide_dtype(self.moving_mean.dtype)
        # Under a TensorFlow strategy each replica has its copy, as of what is made in its scope.
        strategy = getattr(self.moving_mean.value, "distribute_strategy", None)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            self._add_window_variables(dtype, micro_batches)

    def _add_window_variables(self, dtype: str, micro_batches: int) -> None:
        statistics = {"shape": self.moving_mean.shape, "dtype": dtype}
        # "int" has 64 bits on TensorFlow, which keeps it on the GPU: int32 stays on the host.
        for name, initial, arguments in (
            ("window_mean", 0, statistics),
            ("window_variance", 0, statistics),
            ("window_count", 0, {"shape": (), "dtype": dtype}),
            ("window_step", micro_batches, {"shape": (), "dtype": "int"}),
            ("window_length", self._steps, {"shape": (), "dtype": "int"}),
        ):
            variable = self.add_weight(
                name=name,
                initializer=keras.initializers.Constant(initial),
                trainable=False,
                autocast=False,
                **arguments,
            )
            setattr(self, name, variable)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per window; setting it takes effect at the next one, without a retrace.

        Raises:
            TypeError: On setting, if the value is not an int.
            ValueError: On setting, if the value is below 1.
        """
        return self._steps

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        self._steps = checked_steps("accumulation_steps", value)
        if self.built:
            self.window_length.assign(self._steps)

    def call(self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None) -> Any:
        """Normalises, in training by the micro-batch's own statistics, which go into the window.

        Args:
            inputs: Float tensor of the rank that the layer was built with.
            training: Whether to use and pool the statistics of `inputs` (a frozen layer does not).
            mask: Optional bool tensor of the shape of `inputs` without the last axis; entries
                that are False do not enter the statistics.

        Returns:
            A tensor of the shape of `inputs`, in the compute dtype.

        Raises:
            ValueError: If the mask's rank does not fit.
        """
        if not (training and self.trainable):
            return super().call(inputs, training=training, mask=mask)
        # 16-bit inputs overflow in a sum of squares.
        x = ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        mean, variance, count = self._statistics(x, mask)
        self._add_to_window(*map(ops.stop_gradient, (mean, variance, count)))
        outputs = ops.batch_normalization(
            x,
            mean,
            variance,
            axis=self.axis,
            offset=ops.cast(self.beta, x.dtype) if self.center else None,
            scale=ops.cast(self.gamma, x.dtype) if self.scale else None,
            epsilon=self.epsilon,
        )
        return ops.cast(outputs, self.compute_dtype)

    def _statistics(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance of each channel, and the number of entries that they are of."""
        axes = [axis for axis in range(len(x.shape)) if axis != self.axis % len(x.shape)]
        sizes = ops.shape(x)
        entries = 1.0
        for axis in axes:
            entries = entries * ops.cast(sizes[axis], x.dtype)
        if mask is None:
            mean, variance = ops.moments(x, axes=axes, synchronized=self.synchronized)
            count = ops.convert_to_tensor(entries)
            if self.synchronized:
                count = engines.sum_over_replicas(count)
            return mean, variance, count
        if len(mask.shape) != len(x.shape) - 1:
            raise ValueError(
                "`mask` must have one axis less than `inputs`, because it marks whole channels. "
                f"Received: mask of shape {mask.shape} for inputs of shape {x.shape}"
            )
        valid = ops.broadcast_to(ops.expand_dims(ops.cast(mask, "bool"), -1), sizes)
        count = ops.sum(ops.cast(valid, x.dtype), axes)
        divisor = ops.maximum(count, 1)
        mean = ops.sum(ops.where(valid, x, 0), axes) / divisor
        shape = [1] * len(x.shape)
        shape[self.axis] = -1
        deviations = ops.where(valid, x - ops.reshape(mean, shape), 0)
        variance = ops.sum(ops.square(deviations), axes) / divisor
        return mean, variance, ops.max(count)

    def _add_to_window(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        # Selected, never multiplied: 0 * NaN is NaN.
        mean, variance = (ops.cast(value, self.window_mean.dtype) for value in (mean, variance))
        distance = mean - self.window_mean
        finite = ops.logical_and(
            ops.all(ops.isfinite(ops.square(distance))), ops.all(ops.isfinite(variance))
        )
        count = ops.where(finite, ops.cast(count, self.window_count.dtype), 0)
        total = self.window_count + count
        share = count / ops.maximum(total, ops.ones_like(total))
        distance = ops.where(finite, distance, 0)
        spread = ops.where(finite, variance - self.window_variance, 0)
        mean = self.window_mean + share * distance
        variance = (
            self.window_variance + share * spread + share * (1 - share) * ops.square(distance)
        )
        # One in any case, but one that waits for the data: `fit` on TensorFlow finds the end of a
        # dataset in a step whose other operations run.
        one = ops.cast(finite, "int32") + ops.cast(ops.logical_not(finite), "int32")
        step = self.window_step + ops.cast(one, self.window_step.dtype)
        self._set_window(mean, variance, total, step, step >= self.window_length)

    def _set_window(
        self, mean: Tensor, variance: Tensor, count: Tensor, step: Tensor, closes: Tensor
    ) -> None:
        """Keeps the window, or moves the running statistics once and empties it."""
        moves = ops.logical_and(closes, count > 0)
        for running, pooled in ((self.moving_mean, mean), (self.moving_variance, variance)):
            before = ops.cast(running, pooled.dtype)
            after = before * self.momentum + pooled * (1.0 - self.momentum)
            running.assign(ops.cast(ops.where(moves, after, before), running.dtype))
        for variable, value in (
            (self.window_mean, mean),
            (self.window_variance, variance),
            (self.window_count, count),
            (self.window_step, step),
        ):
            variable.assign(ops.where(closes, ops.zeros_like(value), value))

    def flush(self) -> None:
        """Closes the window now: moves the running statistics once, by what it holds.

        An empty window stays as it is. `optimizer.flush()` (where the optimizer was given the
        model) and `FlushPartialWindow` do it for all layers of a model.
        """
        if self.built:
            self._set_window(
                ops.convert_to_tensor(self.window_mean),
                ops.convert_to_tensor(self.window_variance),
                ops.convert_to_tensor(self.window_count),
                ops.convert_to_tensor(self.window_step),
                ops.convert_to_tensor(True),
            )

    def reset_window(self) -> None:
        """Throws away what the open window holds; the running statistics stay as they are."""
        if self.built:
            for variable in self._window_variables():
                variable.assign(ops.zeros(variable.shape, variable.dtype))

    def start_window(self) -> None:
        """Throws away what a window of another optimizer has left, now, also while tracing."""
        with engines.outside_of_a_trace():
            if self.built and number(self.window_step) > 0:
                self.reset_window()

    @property
    def weights(self) -> list[keras.Variable]:
        """Those of Keras's layer; what the window holds is in `variables` only.

        So `get_weights` and `set_weights` (and `EarlyStopping`, which uses them) leave the window
        in step with the optimizer's.
        """
        return self._stock_variables()

    def _window_variables(self) -> list[keras.Variable]:
        return [self.window_mean, self.window_variance, self.window_count, self.window_step]

    def _stock_variables(self) -> list[keras.Variable]:
        known = [self.gamma, self.beta, self.moving_mean, self.moving_variance]
        return [variable for variable in known if variable is not None]

    def save_own_variables(self, store: Any) -> None:
        """Writes what Keras's layer does, and the window where one is open."""
        variables = {str(i): variable for i, variable in enumerate(self._stock_variables())}
        if self.built and number(self.window_step) > 0:
            variables |= {variable.name: variable for variable in self._window_variables()}
        for key, variable in variables.items():
            store[key] = keras.ops.convert_to_numpy(variable)

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` of this or of Keras's layer wrote.

        Raises:
            ValueError: If the file is another layer's.
        """
        if not self.built:
            super().load_own_variables(store)  # says so
            return
        targets = {str(i): variable for i, variable in enumerate(self._stock_variables())}
        window = {variable.name: variable for variable in self._window_variables()}
        keys = set(store.keys())
        if keys not in (set(targets), set(targets | window)):
            raise ValueError(
                f"The file must be of a `BatchNormalization` layer with the {len(targets)} weights "
                f"of {self.name!r}, because they are paired by position. Load it into a layer "
                "with the same `scale` and `center`. Received: a file with "
                f"{', '.join(sorted(keys))}"
            )
        self.reset_window()
        for key, variable in (targets | window).items():
            if key in keys:
                variable.assign(store[key][()])

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, as plain JSON."""
        return {**super().get_config(), "accumulation_steps": self._steps}
