"""`GradientAccumulationOptimizer`: an update every N micro-batches, for any Keras optimizer."""

from __future__ import annotations

import copy
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import keras

from keras_ga import batch_norm, engines, saving, schedules, sharding
from keras_ga.arguments import (
    check_length,
    checked_axis,
    checked_builtin,
    checked_choice,
    checked_dtype,
    checked_model,
    checked_optimizer,
    checked_rows,
    checked_schedule_value,
    checked_steps,
    checked_weight,
    refuse_arguments,
)
from keras_ga.window import (
    NONFINITE,
    REDUCTIONS,
    Tensor,
    Window,
    accumulator_dtype,
    empty_total,
    number,
)


def _forwarded(name: str) -> property:
    """An attribute that is the inner optimizer's.

    Keras's base constructor assigns defaults to these before there is an inner optimizer; those
    are not ours to keep.
    """

    def get(self: GradientAccumulationOptimizer) -> Any:
        return getattr(self.inner_optimizer, name)

    def set_(self: GradientAccumulationOptimizer, value: Any) -> None:
        if "inner_optimizer" in self.__dict__:
            setattr(self.inner_optimizer, name, value)

    return property(get, set_, doc=f"`{name}` of the inner optimizer.")


@final
@keras.saving.register_keras_serializable(package="keras_ga")
class GradientAccumulationOptimizer(keras.optimizers.Optimizer):
    """Trains with the batch you want on the memory you have: one update every N micro-batches.

    Wraps any Keras optimizer. Each call of `apply` (each batch of `model.fit`) is a micro-step:
    it adds its gradients to accumulators and changes nothing else, neither weights nor any
    variable of the inner optimizer. The N-th closes the window: the inner optimizer makes one
    update with the mean gradient, and a new window opens. So everything that belongs to an
    update (learning-rate schedule, clipping, weight decay, bias correction, EMA, constraints,
    `iterations`) happens once per window, on the gradient of the whole window. With equal
    micro-batches and a loss that is a mean over rows, the weights are those of the bare
    optimizer on the batch N times as large, to float rounding.

    Not for: `BatchNormalization`, whose forward pass normalises by the micro-batch it sees
    (`keras_ga.batch_norm` has what can be done; `GroupNormalization` and `LayerNormalization` are
    exact), and losses that are no mean over
    rows (contrastive ones, Dice over a batch), whose large batch is no sum of small ones.

    Args:
        optimizer: The optimizer that makes the updates: a `keras.optimizers.Optimizer`, its name
            or its config. Set `clipnorm`, `weight_decay`, `use_ema` and the like there.
        accumulation_steps: Micro-batches per update: an int >= 1; or a callable that takes the
            number of updates made so far and returns one, to let the batch grow during training
            (inside a compiled step it is called with a scalar integer tensor and must return
            one). An int can be set to another later, at run time; 1 makes a wrapper without
            accumulators, which is the bare optimizer bit for bit.
        reduction: `"mean"` (default) divides the window's sum by the sum of its weights; `"sum"`
            does not, for losses that are sums.
        accumulator_dtype: Float dtype to accumulate in. Default: float32 for 16-bit variables,
            else each variable's own dtype.
        nonfinite: `"propagate"` (default): a NaN or inf reaches the update, as it would from the
            large batch. `"drop"`: a micro-batch with a non-finite gradient is left out of its
            window, though it still counts towards N, and is counted in `dropped_micro_steps`.
        model: The model that will be compiled with this optimizer, to have its
            BatchNormalization layers follow: `keras_ga.batch_norm.adjust_momentum` is called on
            it now and whenever N is set, pooling layers are flushed and reset with the window.
            It is not kept alive, nor saved. Not with a schedule of N. Default: layers are left
            as they are.
        shard_accumulators: JAX under a `keras.distribution`: the name of a mesh axis, such as
            `"batch"`, to cut the accumulators along, so that each device holds a part of them.
            The update gathers them, once per window. Default: as their variables.
        name: Name of the optimizer; a default is made.

    Raises:
        TypeError: If an argument has the wrong type, or belongs to the inner optimizer.
        ValueError: If an argument's value is out of range, or `optimizer` accumulates already or
            is a `LossScaleOptimizer` (that goes outside: `compile` puts it there under
            `mixed_float16`).

    Example:

    ```python
    import keras
    import keras_ga
    import numpy as np

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras_ga.GradientAccumulationOptimizer(
        keras.optimizers.AdamW(1e-3), accumulation_steps=8
    )
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=4, verbose=0)
    print(int(optimizer.micro_steps), int(optimizer.iterations))  # 16 micro-steps, 2 updates
    ```

    References:
        - Goyal et al., 2017, https://arxiv.org/abs/1706.02677, on what the large batch needs
        - Ott et al., 2018, https://arxiv.org/abs/1806.00187, on accumulating it
    """

    def __init__(
        self,
        optimizer: Any,
        accumulation_steps: int | Callable[[Any], Any],
        *,
        reduction: str = "mean",
        accumulator_dtype: str | None = None,
        nonfinite: str = "propagate",
        model: keras.Model | None = None,
        shard_accumulators: str | None = None,
        name: str | None = None,
        **kwargs: Any,
    ):
        refuse_arguments(kwargs)
        inner_optimizer = checked_optimizer(optimizer, GradientAccumulationOptimizer)
        # A callable keeps the base class from making a learning-rate variable nobody would read.
        super().__init__(learning_rate=_learning_rate_of_the_inner_optimizer, name=name)
        self.inner_optimizer = inner_optimizer
        self.reduction = checked_choice("reduction", reduction, REDUCTIONS)
        self.nonfinite = checked_choice("nonfinite", nonfinite, NONFINITE)
        self.accumulator_dtype = checked_dtype(accumulator_dtype)
        self.shard_accumulators = checked_axis(shard_accumulators)
        self._schedule = accumulation_steps if callable(accumulation_steps) else None
        self._constructed_steps: Any = (
            None if self._schedule else checked_steps("accumulation_steps", accumulation_steps)
        )
        self._steps: Any = self._constructed_steps
        self._window: Any = None  # a `Window`, made in `build`, like its engine
        self._engine: Any = None
        # A model tracks its optimizer: a reference the other way would make a circle.
        self._model = None if model is None else weakref.ref(checked_model(model, self._schedule))
        self._lag_is_known = False
        self._let_batch_norm_follow()

    @classmethod
    def for_batch_size(
        cls, optimizer: Any, effective_batch_size: int, micro_batch_size: int, **kwargs: Any
    ) -> GradientAccumulationOptimizer:
        """Makes the wrapper for a recipe's batch size and the batch size that fits.

        Args:
            optimizer: As in the constructor.
            effective_batch_size: Rows per update, int >= 1.
            micro_batch_size: Rows per micro-batch, int >= 1; must divide `effective_batch_size`.
            **kwargs: Further arguments of the constructor.

        Returns:
            A `GradientAccumulationOptimizer` with
            `accumulation_steps=effective_batch_size // micro_batch_size`.

        Raises:
            ValueError: If the sizes do not divide; the error names the nearest that do.

        Example:

        ```python
        import keras, keras_ga

        optimizer = keras_ga.GradientAccumulationOptimizer.for_batch_size(
            "adam", effective_batch_size=256, micro_batch_size=32
        )
        print(optimizer.accumulation_steps)  # 8
        ```
        """
        effective = checked_rows("effective_batch_size", effective_batch_size)
        micro = checked_rows("micro_batch_size", micro_batch_size)
        if effective % micro:
            divisors = [d for d in range(1, effective + 1) if effective % d == 0]
            micros = {
                max(d for d in divisors if d < micro),
                min((d for d in divisors if d > micro), default=effective),
            }
            effectives = {effective // micro * micro, -(-effective // micro) * micro} - {0}
            raise ValueError(
                "`micro_batch_size` must divide `effective_batch_size`, because an update is made "
                f"of whole micro-batches. Use micro_batch_size={_either(micros)}, or "
                f"effective_batch_size={_either(effectives)}. Received: "
                f"effective_batch_size={effective}, micro_batch_size={micro}"
            )
        return cls(optimizer, effective // micro, **kwargs)

    @classmethod
    def from_builtin(
        cls, optimizer: keras.optimizers.Optimizer, **kwargs: Any
    ) -> GradientAccumulationOptimizer:
        """Makes the wrapper for an optimizer that has Keras's `gradient_accumulation_steps`.

        Takes its state over, the open window included, so that a training that was begun with
        Keras's option goes on. There a learning-rate schedule counts micro-batches; to have the
        same rates it is put into a `keras_ga.schedules.InMicroSteps`.

        Args:
            optimizer: The optimizer, such as `model.optimizer` of a model that was loaded. It
                stays as it is.
            **kwargs: Further arguments of the constructor.

        Returns:
            A `GradientAccumulationOptimizer` with the same N, around a bare optimizer of the same
            kind and arguments.

        Raises:
            TypeError: If `optimizer` is no Keras optimizer.
            ValueError: If it has no `gradient_accumulation_steps`.

        Example:

        ```python
        import keras, keras_ga
        import numpy as np

        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4), loss="mse")
        model.fit(np.ones((48, 4)), np.ones((48, 1)), batch_size=8, verbose=0)  # 6 micro-batches
        optimizer = keras_ga.GradientAccumulationOptimizer.from_builtin(model.optimizer)
        model.compile(optimizer, loss="mse")
        print(int(optimizer.iterations), int(optimizer.pending))  # 1 update, 2 micro-batches
        ```
        """
        steps = checked_builtin(optimizer)
        config = {**optimizer.get_config(), "gradient_accumulation_steps": None}
        if isinstance(config.get("learning_rate"), dict):
            schedule = keras.optimizers.schedules.deserialize(config["learning_rate"])
            config["learning_rate"] = schedules.InMicroSteps(schedule, steps)
        wrapper = cls(type(optimizer).from_config(config), steps, **kwargs)
        for name, value in vars(optimizer).items():
            if name.startswith("_exclude_from_weight_decay"):  # private (Keras 3.15); in no config
                setattr(wrapper.inner_optimizer, name, value)
        if optimizer.built:
            wrapper.build(optimizer._trainable_variables)  # private (Keras 3.15)
            saving.take_over(optimizer, wrapper.inner_optimizer, wrapper._window)
        return wrapper

    # What can be read and set.

    @property
    def accumulation_steps(self) -> int:
        """N, micro-batches per update, as it stands now.

        Setting it takes effect at the next micro-step, compiled steps included, without a
        retrace. What the open window holds is kept: it closes as soon as it holds at least the
        new N, and is divided by what it holds. In a JAX loop of your own, N is in the state that
        you carry: set it before you take the state out of `optimizer.variables`.

        Raises:
            TypeError: On setting, if the value is not an int, or N is given by a schedule.
            ValueError: On setting, if the value is below 1, or above 1 where the wrapper was
                constructed with 1 and built without accumulators.
        """
        if self._schedule is not None:
            return int(checked_schedule_value(self._schedule(number(self.iterations))))
        if self._window is None:
            return self._steps
        try:
            return number(self._window.accumulation_steps)
        except (TypeError, NotImplementedError):  # in a graph, or while JAX's `fit` holds it
            return self._steps

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        if self._schedule is not None:
            raise TypeError(
                "`accumulation_steps` must not be set, because this optimizer was constructed "
                "with a schedule of it. Construct it with an int to set another later. "
                f"Received: accumulation_steps={value!r} (of type {type(value).__name__})"
            )
        steps = checked_steps("accumulation_steps", value)
        if self._window is None:
            # Room for the largest N asked for: a scheduler may set 1 before the first step.
            self._constructed_steps = max(steps, self._constructed_steps)
        elif steps > 1 and not self._window.accumulators:
            raise ValueError(
                "`accumulation_steps` must stay 1, because this optimizer was constructed with 1 "
                "and has no accumulators. Construct it with the largest number it will need (or "
                "with a schedule), then set a smaller one. "
                f"Received: accumulation_steps={steps}"
            )
        else:
            self._window.accumulation_steps.assign(steps)
        self._steps = steps
        self._let_batch_norm_follow()

    @property
    def follows_a_schedule(self) -> bool:
        """Whether N is given by a callable, and so can't be set."""
        return self._schedule is not None

    @property
    def iterations(self) -> Any:
        """Updates made so far: the inner optimizer's `iterations`."""
        return self.inner_optimizer.iterations

    @property
    def micro_steps(self) -> keras.Variable:
        """Micro-steps made so far, whether they closed a window or not: scalar int variable."""
        # The base class's counter of `apply` calls is just that, so it is used as it is.
        return self._iterations

    @property
    def pending(self) -> Any:
        """Micro-batches in the open window, 0 <= pending < N: scalar int variable."""
        return 0 if self._window is None else self._window.pending

    @property
    def has_updated(self) -> Any:
        """Whether the last micro-step (or flush) made an update: scalar bool tensor."""
        return False if self._window is None else self._window.has_updated.value

    @property
    def dropped_micro_steps(self) -> Any:
        """Micro-batches left out by `nonfinite="drop"` so far: scalar int variable."""
        return 0 if self._window is None else self._window.dropped_micro_steps

    @property
    def skipped_updates(self) -> Any:
        """Windows that closed with nothing that counts in them, so without an update."""
        return 0 if self._window is None else self._window.skipped_updates

    learning_rate = _forwarded("learning_rate")
    weight_decay = _forwarded("weight_decay")
    clipnorm = _forwarded("clipnorm")
    clipvalue = _forwarded("clipvalue")
    global_clipnorm = _forwarded("global_clipnorm")
    use_ema = _forwarded("use_ema")
    ema_momentum = _forwarded("ema_momentum")
    ema_overwrite_frequency = _forwarded("ema_overwrite_frequency")
    loss_scale_factor = _forwarded("loss_scale_factor")
    # The name that `keras.callbacks.SwapEMAWeights` reads, when a `LossScaleOptimizer` is outside.
    _model_variables_moving_average = _forwarded("_model_variables_moving_average")

    @property
    def optimizers(self) -> Any:
        """The parts of an inner `MultiOptimizer`."""
        return self.inner_optimizer.optimizers

    @property
    def variables(self) -> list[keras.Variable]:
        """This optimizer's variables, then the inner optimizer's."""
        steps = None if self._window is None else self._window.accumulation_steps
        own = self._variables if steps is None else [*self._variables, steps]
        return [*own, *self.inner_optimizer.variables]

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Scales the loss as the inner optimizer asks for (`loss_scale_factor`)."""
        return self.inner_optimizer.scale_loss(loss)

    def exclude_from_weight_decay(
        self,
        var_list: list[keras.Variable] | None = None,
        var_names: list[str] | None = None,
    ) -> None:
        """Excludes variables from the inner optimizer's weight decay; call it before `build`."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def finalize_variable_values(self, var_list: list[keras.Variable]) -> None:
        """Lets the inner optimizer set the final weights (EMA), as `fit` does at its end."""
        if not _has_value(self.iterations):
            return  # a step has failed on JAX, and its error is what must be seen
        pending = number(self.pending)
        if number(self.iterations) == 0 and pending > 0:
            warnings.warn(
                f"Training ended before its first update: it had {pending} micro-batches "
                f"and accumulation_steps={self.accumulation_steps}. No weight has changed. "
                "Use fewer accumulation steps, more data, or `FlushPartialWindow`.",
                stacklevel=2,
            )
        self._warn_of_lag()
        inner = self.inner_optimizer
        inner.finalize_variable_values(var_list)
        if any(part.use_ema for part in getattr(inner, "optimizers", [inner])):
            # On JAX (Keras 3.15) a weight is now the very buffer of its average, and the next
            # `fit` dies donating it twice.
            for variable in var_list:
                variable.assign(keras.ops.copy(variable.value))

    # Training.

    def build(self, variables: Iterable[keras.Variable]) -> None:
        """Makes the accumulators and counters, and builds the inner optimizer.

        `apply` and `fit` do it on their first call. An inner optimizer that is built already (it
        has been training on its own) goes on from where it is.

        Args:
            variables: The trainable variables.

        Raises:
            ValueError: If the inner optimizer was built on other variables.
        """
        if self.built:
            return
        variables = list(variables)
        self._in_order_of(variables, variables)  # refuses a variable that is given twice
        if self._model is not None:
            self._let_batch_norm_follow()  # layers that the model has made only now, too
            for layer in self._pooling_layers():
                layer.start_window()  # this optimizer's, which is empty
        elif self._constructed_steps != 1:
            batch_norm.advise(variables)
        inner = self.inner_optimizer
        if not inner.built:
            inner.build(variables)
        # What the base class's `build` does (Keras 3.15), less the averages it would make for
        # `use_ema`: those are the inner optimizer's. The list is filled in place, because one
        # assigned anew would be tracked as the optimizer's own variables.
        self._trainable_variables.extend(self._in_order_of(inner._trainable_variables, variables))
        self._window = self._make_window(self._trainable_variables)
        self._engine = engines.create(self._window, inner)
        self.built: bool = True

    def _make_window(self, variables: list[keras.Variable]) -> Window:
        # Counters are "int", 64 bits on TensorFlow as Keras's own: 32 would live on the host, where
        # a step that XLA compiles for a GPU can't reach them.
        def scalar(name: str, dtype: str = "int") -> keras.Variable:
            return self.add_variable((), "zeros", dtype, "only_first_replica", name=name)

        def per_replica(name: str, dtype: str, aggregation: str, **arguments: Any) -> Any:
            with keras.name_scope(self.name):
                variable = keras.Variable(
                    **{"initializer": "zeros", "shape": (), **arguments},
                    dtype=dtype,
                    trainable=False,
                    aggregation=aggregation,
                    synchronization="on_read",
                    name=name,
                )
            # Private (Keras 3.15): `add_variable` can't say when replicas synchronise.
            self._track_variable(variable)
            return variable

        accumulators = []
        if self._constructed_steps != 1:
            names = _unique_names(variables)
            layouts = (
                sharding.in_parts(variables, self.shard_accumulators)
                if self.shard_accumulators
                else map(sharding.layout_of, variables)
            )
            for variable, name, layout in zip(variables, names, layouts, strict=True):
                accumulators.append(
                    per_replica(
                        f"{name}_accumulator",
                        accumulator_dtype(variable, self.accumulator_dtype),
                        "sum",
                        initializer=keras.initializers.Constant(empty_total(variable)),
                        shape=variable.shape,
                        layout=layout,
                    )
                )
        # In float64 the divisor must be as exact as what it divides.
        wide = any(accumulator.dtype == "float64" for accumulator in accumulators)
        steps = None
        if self._schedule is None:
            # Not tracked: a checkpoint must not bring back another N than the constructor's.
            with keras.name_scope(self.name):
                steps = keras.Variable(
                    self._steps, dtype="int", trainable=False, name="accumulation_steps"
                )
        return Window(
            variables=variables,
            accumulators=accumulators,
            micro_steps=self.micro_steps,
            pending=scalar("pending"),
            weight_sum=per_replica("weight_sum", "float64" if wide else "float32", "mean"),
            has_updated=scalar("has_updated", "bool"),
            has_gradient=self.add_variable((len(variables),), "zeros", "bool", name="has_gradient"),
            dropped_micro_steps=per_replica("dropped_micro_steps", "int", "sum"),
            skipped_updates=scalar("skipped_updates"),
            iterations=self.iterations,
            accumulation_steps=steps,
            schedule=self._schedule,
            reduction=self.reduction,
            nonfinite=self.nonfinite,
            sharded=bool(self.shard_accumulators and accumulators),
        )

    def apply(
        self,
        grads: Sequence[Tensor | None],
        trainable_variables: Iterable[keras.Variable] | None = None,
        weight: Tensor | float | None = None,
    ) -> None:
        """Takes one micro-batch's gradients in; the N-th in a window makes the update.

        Args:
            grads: A gradient tensor for each variable, None where there is none: it then counts
                as zero in this window.
            trainable_variables: The variables, in any order, but the same ones on every call.
                Default: those of `build`, in its order.
            weight: What this micro-batch counts for in its window, a number or scalar tensor
                >= 0: its rows, or its valid tokens. The default, 1, is right for micro-batches
                of equal size. With weight 0 it counts for nothing, even if its gradients are NaN.

        Raises:
            ValueError: If gradients and variables do not match, the variables are others than
                before, or no variable has a gradient.
        """
        grads = list(grads)
        if not grads:
            return
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.built:
                self.build(trainable_variables)
        elif not self.built:
            raise ValueError(
                "`trainable_variables` must be given on the first call, because the optimizer is "
                "not built. Pass them, or call `optimizer.build(model.trainable_variables)` "
                "before. Received: trainable_variables=None"
            )
        grads = self._paired(grads, trainable_variables)
        if all(gradient is None for gradient in grads):
            # The bare optimizer refuses this with an error of its own; so it does here.
            self.inner_optimizer.apply(grads, self._window.variables)
            return
        self._engine.micro_step(grads, checked_weight(weight))

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Tensor | None, keras.Variable]],
        weight: Tensor | float | None = None,
    ) -> Any:
        """`apply` for pairs of gradient and variable.

        Args:
            grads_and_vars: Pairs (gradient or None, variable).
            weight: As in `apply`.

        Returns:
            `iterations`, the updates made so far.

        Raises:
            ValueError: As `apply`.
        """
        pairs = list(grads_and_vars)
        self.apply([g for g, _ in pairs], [v for _, v in pairs], weight=weight)
        return self.iterations

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        trainable_variables: Sequence[Tensor],
        weight: Tensor | float | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """`apply` as a function from values to values, for JAX.

        Args:
            optimizer_variables: A value for each of `optimizer.variables`.
            grads: As in `apply`, in the order of `build`.
            trainable_variables: A value for each variable of `build`.
            weight: As in `apply`.

        Returns:
            The new values `(trainable_variables, optimizer_variables)`.

        Raises:
            ValueError: If the optimizer is not built, a list has another length, or the backend
                is TensorFlow.
        """
        return self._stateless(
            optimizer_variables, trainable_variables, lambda: self.apply(grads, weight=weight)
        )

    def _stateless(
        self,
        optimizer_variables: Sequence[Tensor],
        trainable_variables: Sequence[Tensor],
        step: Callable[[], None],
    ) -> tuple[list[Tensor], list[Tensor]]:
        if keras.config.backend() == "tensorflow":
            raise ValueError(
                "`stateless_apply` must not be called on TensorFlow, because its variables can't "
                "be replaced by values under `tf.distribute`. Call `apply`. "
                "Received: backend='tensorflow'"
            )
        if not self.built:
            raise ValueError(
                "`stateless_apply` must be called on a built optimizer, because it makes no "
                "variables. Call `optimizer.build(model.trainable_variables)` before. "
                "Received: optimizer.built=False"
            )
        own, trainable = self.variables, self._window.variables
        check_length("optimizer_variables", optimizer_variables, own, "optimizer.variables")
        if len(trainable_variables) != len(trainable):
            raise ValueError(_other_variables(trainable_variables, trainable))
        # `LossScaleOptimizer` on JAX passes the variables themselves where values are meant.
        mapping = [
            (variable, value.value if isinstance(value, keras.Variable) else value)
            for variable, value in zip(
                [*trainable, *own], [*trainable_variables, *optimizer_variables], strict=True
            )
        ]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            step()
        return (
            [scope.get_current_value(variable) for variable in trainable],
            [scope.get_current_value(variable) for variable in own],
        )

    def flush(self) -> None:
        """Makes the update now, with what the open window holds, divided by just that.

        For the end of the data, when the last window is short. An empty window stays as it is.
        In a JAX callback, call `model.jax_state_sync()` before.
        """
        if self._engine is not None:
            self._engine.close()
        for layer in self._pooling_layers():
            layer.flush()

    def reset_window(self) -> None:
        """Throws away what the open window holds; weights and inner optimizer stay as they are."""
        for layer in self._pooling_layers():
            layer.reset_window()
        if self._window is None:
            return
        window = self._window
        for accumulator, variable in zip(window.accumulators, window.variables, strict=False):
            accumulator.assign(keras.ops.full(variable.shape, empty_total(variable)))
        window.pending.assign(0)
        window.weight_sum.assign(0.0)

    # BatchNormalization.

    def _adjusted_model(self) -> keras.Model | None:
        return None if self._model is None else self._model()

    def _pooling_layers(self) -> list[Any]:
        model = self._adjusted_model()
        return [] if model is None else batch_norm.pooled_layers(model)

    def _let_batch_norm_follow(self) -> None:
        model = self._adjusted_model()
        if model is None:
            return
        batch_norm.adjust_momentum(model, self._steps)
        for layer in batch_norm.pooled_layers(model):
            layer.accumulation_steps = self._steps

    def _warn_of_lag(self) -> None:
        """Says so, once, if a training was too short for the adjusted momenta."""
        model, updates = self._adjusted_model(), number(self.iterations)
        if model is None or self._lag_is_known or updates == 0:
            return
        left = batch_norm.lag_after(model, updates, self.accumulation_steps)
        if left > batch_norm.LAG:
            self._lag_is_known = True
            warnings.warn(
                f"After {updates} updates the running statistics of BatchNormalization still hold "
                f"{left:.0%} of what they were before the training, as the large batch's do. "
                "`keras_ga.batch_norm.recalibrate(model, data)` takes them from the data.",
                stacklevel=3,
            )

    # Pairing.

    def _paired(
        self, grads: list[Tensor | None], variables: list[keras.Variable] | None
    ) -> list[Tensor | None]:
        """The gradients in the order of `build`, paired with their variables by identity."""
        known = self._window.variables
        if variables is None:
            check_length("grads", grads, known, "the variables built on")
            return grads
        check_length("grads", grads, variables, "`trainable_variables`")
        if len(variables) == len(known) and all(map(operator.is_, variables, known)):
            return grads
        by_key = dict(zip(map(self._var_key, variables), grads, strict=True))
        self._in_order_of(known, variables)
        return [by_key[self._var_key(variable)] for variable in known]

    def _in_order_of(
        self, known: list[keras.Variable], variables: list[keras.Variable]
    ) -> list[keras.Variable]:
        """`variables` in the order of `known`, if they are the same ones."""
        # `_var_key` is private (Keras 3.15): it also knows a variable's `tf.Variable` and replicas.
        given = {self._var_key(variable): variable for variable in variables}
        missing = [v for v in known if self._var_key(v) not in given]
        known_keys = {self._var_key(variable) for variable in known}
        unknown = [v for k, v in given.items() if k not in known_keys]
        if missing or unknown or not len(given) == len(variables) == len(known):
            detail = f"; missing: {_names(missing)}; unknown: {_names(unknown)}"
            raise ValueError(_other_variables(variables, known, detail))
        return [given[self._var_key(variable)] for variable in known]

    # Saving.

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets the values of `variables`, the inner optimizer's included.

        Args:
            weights: An array for each of `variables`.

        Raises:
            ValueError: If it is not built, or a value does not fit.
        """
        check_length("weights", weights, self.variables, "`optimizer.variables`")
        for variable, value in zip(self.variables, weights, strict=True):
            variable.assign(value)

    def save_own_variables(self, store: Any) -> None:
        """Writes this optimizer's state; Keras visits the inner optimizer on its own."""
        if self._window is not None:
            saving.write(self._window, store)

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote, or the state of an optimizer without wrapper.

        A file of the bare optimizer, or of a wrapper with N = 1, leaves the window empty. So does
        one whose window is of other variables (an adapter was added, a layer unfrozen); what was
        in it is left out, with a warning. For one of an optimizer with Keras's
        `gradient_accumulation_steps` there is `from_builtin`.

        Raises:
            ValueError: If the file is of a later version; nothing is changed then.
        """
        if not store.keys():
            return
        if not saving.is_of_a_wrapper(store):
            saving.read_of_keras(self.inner_optimizer, store)
        elif self._window is None:
            warnings.warn(
                f"Skipping variable loading for optimizer {self.name!r}, because it is not built "
                "yet. Call `optimizer.build(model.trainable_variables)` before loading.",
                stacklevel=2,
            )
        else:
            saving.read(self, self._window, store)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, as plain JSON.

        An N that was set after construction is in it as well, so that a copy has the same room
        and the same N.
        """
        steps = self._schedule or self._constructed_steps
        config = {
            "optimizer": keras.optimizers.serialize(self.inner_optimizer),
            "accumulation_steps": (
                keras.saving.serialize_keras_object(steps) if callable(steps) else steps
            ),
            "reduction": self.reduction,
            "accumulator_dtype": self.accumulator_dtype,
            "nonfinite": self.nonfinite,
            "shard_accumulators": self.shard_accumulators,
            "name": self.name,
        }
        if self._steps != self._constructed_steps:
            config["accumulation_steps_now"] = self._steps
        return config

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> GradientAccumulationOptimizer:
        """Makes an optimizer from `get_config`'s dict, which it leaves as it is."""
        config = copy.deepcopy(config)  # Keras's own `from_config` writes into nested dicts
        steps_now = config.pop("accumulation_steps_now", None)
        for key, deserialize in (
            # The function for optimizers knows Keras's own by name, on whichever backend they
            # were saved.
            ("optimizer", keras.optimizers.deserialize),
            ("accumulation_steps", keras.saving.deserialize_keras_object),
        ):
            if isinstance(config.get(key), dict):
                config[key] = deserialize(config[key], custom_objects=custom_objects)
        optimizer = cls(**config)
        if steps_now is not None:
            optimizer._steps = steps_now
        return optimizer


def _has_value(variable: keras.Variable) -> bool:
    """Whether a variable can be read; on JAX `fit` takes the values away while it runs."""
    try:
        return variable.value is not None
    except TypeError:
        return False


def _learning_rate_of_the_inner_optimizer() -> float:
    raise AttributeError("The learning rate is the inner optimizer's.")


def _other_variables(given: Sequence[Any], known: Sequence[Any], detail: str = "") -> str:
    return (
        "`trainable_variables` must be the same variables on every call, because a window is "
        "divided by one sum of weights for all of them. Use one `GradientAccumulationOptimizer` "
        "per set of variables (after freezing or unfreezing layers: a new one, and compile "
        f"again). Received: {len(given)} variables where the optimizer was built on {len(known)}"
        f"{detail}"
    )


def _either(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def _names(variables: list[Any]) -> list[str]:
    return [getattr(variable, "path", None) or str(variable.name) for variable in variables]


def _unique_names(variables: list[Any]) -> list[str]:
    """A name for each variable from its path; models may hold several of the same path."""
    names: list[str] = []
    for path in _names(variables):
        name = path = path.replace("/", "_").replace(":", "_")
        repeats = 0
        while name in names:
            repeats += 1
            name = f"{path}__{repeats}"
        names.append(name)
    return names
