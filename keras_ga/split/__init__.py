"""Way 2: the batch you ask for, each train step worked through in micro-batches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_ga import batch_norm as norms
from keras_ga import engines
from keras_ga.arguments import (
    checked_bytes,
    checked_choice,
    checked_divisor,
    checked_micro_batch_size,
    checked_rows,
)
from keras_ga.split import check, memory
from keras_ga.split.check import SplitCheck
from keras_ga.split.memory import MicroBatchSize, Trial
from keras_ga.split.step import Options, TrainStep, check_batch, refuse_layers

__all__ = [
    "MicroBatchSize",
    "SplitCheck",
    "Trial",
    "check_split",
    "find_micro_batch_size",
    "split_batches",
    "unsplit_batches",
]

# The method of a model that makes what `fit` calls for each step; an attribute of the instance
# takes its place. `train_step` would do less well: JAX compiles and keeps it by identity, so that
# after a new `compile` the old loss would be trained on.
_HOOK = "make_train_function"


def split_batches(
    model: keras.Model,
    micro_batch_size: int | str,
    *,
    batch_norm: str = "pooled",
    divisor: Callable[[Any], Any] | dict[str, Callable[[Any], Any]] | None = None,
    add_loss: str = "mean",
    memory_limit: int | None = None,
) -> keras.Model:
    """Works each batch of `fit` through in micro-batches that fit, and makes one update with it.

    `fit(batch_size=64)` stays as it is, and so does all that counts batches: progress bar,
    callbacks, schedules, `steps_per_epoch`. Within a step, the batch is cut into micro-batches, one
    forward and backward pass each; their gradients add up to the batch's, and the optimizer makes
    one update. Peak memory is that of a micro-batch. Weights, losses and metrics are those of the
    unsplit model, to float rounding, for every loss that Keras divides by rows, unmasked entries or
    sample weights, each output's by its own divisor.

    To be used when the batch should stay the unit of everything. With
    `GradientAccumulationOptimizer` as the optimizer, windows are made of whole batches.

    Not exact: BatchNormalization's forward pass, which sees a micro-batch (its running statistics
    are the batch's in the first such layer); dropout, which draws other masks; losses that compare
    rows with each other (Circle, contrastive ones; Dice and Tversky with `axis=None`).
    `check_split` tells for a model and a batch. Refused: stateful RNNs, `SpectralNormalization`,
    and on TensorFlow and torch, in the first step, layers that set a trainable variable.

    It is an attribute of this model object: files, clones and pickles have nothing of it. Call it
    before or after `compile`; it holds through later ones.

    Args:
        model: Any `keras.Model` that trains with Keras's own `train_step`.
        micro_batch_size: Rows per forward and backward pass on each device, int >= 1; a batch's
            last micro-batch has what is left. Or `"auto"`: the largest that fits is found for each
            shape of input, among the batch and its halvings. On JAX it is planned from what the
            compiler says that a step needs; on TensorFlow and torch it is tried, and halved when
            memory runs out, which changes nothing but the size. Each choice is logged.
        batch_norm: What running statistics of BatchNormalization move by: `"pooled"` (default),
            once per batch by the statistics of all of it; `"micro"`, by each micro-batch's.
        divisor: For a loss that averages by itself, other than over rows: a function of `y_true`
            that returns what it divides by, such as `lambda y: keras.ops.sum(y != -1)`. With
            several outputs a dict from names of losses (the outputs') to functions.
        add_loss: Whether what the model gives to `add_loss` is a `"mean"` (default) or a `"sum"`
            over rows.
        memory_limit: JAX, with `"auto"`: bytes of a device's memory to plan for. Default: what
            the device says that it has.

    Returns:
        The same model.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument's value is out of range; if the model has a `train_step` of its
            own, pooling layers of `keras_ga.layers`, or layers that can't be split.

    Example:

    ```python
    import keras, keras_ga
    import numpy as np

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    keras_ga.split_batches(model, micro_batch_size=8)
    model.fit(np.ones((128, 4)), np.ones((128, 1)), batch_size=64, verbose=0)
    print(int(model.optimizer.iterations))  # 2: one per batch
    ```
    """
    size = checked_micro_batch_size(micro_batch_size)
    options = Options(
        batch_norm=checked_choice("batch_norm", batch_norm, ("pooled", "micro")),
        divisor=checked_divisor(divisor),
        add_loss=checked_choice("add_loss", add_loss, ("mean", "sum")),
        memory_limit=None if memory_limit is None else checked_bytes("memory_limit", memory_limit),
    )
    _check_model(model)
    setattr(model, _HOOK, _Split(model, size, options))
    model.train_function = None
    return model


def unsplit_batches(model: keras.Model) -> None:
    """Undoes `split_batches`: batches are worked through as a whole again.

    Args:
        model: The model; one that is not split stays as it is.
    """
    # Not by `del`, for which Keras (3.15) collects garbage.
    if model.__dict__.pop(_HOOK, None) is not None:
        model.train_function = None


def check_split(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    micro_batch_size: int | None = None,
) -> SplitCheck:
    """Compares loss and gradient of one batch, whole and split, and prints what differs.

    The honest answer for a custom loss or layer, in a second. Both are computed from the same
    weights, in inference mode, so that dropout and BatchNormalization do not hide the rest; layers
    that see their micro-batch in training are named, and one that normalises by it makes the
    answer "not exact in training". The model stays as it is.

    Args:
        model: A compiled model; if it is split, its options are used.
        x: Inputs of one batch, which must fit as a whole.
        y: Its targets.
        sample_weight: Its sample weights.
        micro_batch_size: Rows per micro-batch. Default: the split model's, else half of the batch.

    Returns:
        A `SplitCheck`: `exact`, relative differences of losses and gradients; prints as a table.

    Raises:
        ValueError: If the model is not compiled, or as `split_batches`.

    Example:

    ```python
    import keras, keras_ga
    import numpy as np


    def centred(y, prediction):  # compares rows with each other
        return keras.ops.mean((y - prediction - keras.ops.mean(prediction, axis=0)) ** 2)


    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss=centred)
    x, y = np.random.rand(8, 4), np.random.rand(8, 1)
    print(keras_ga.check_split(model, x, y).exact)  # False
    ```
    """
    split = _split_of(model)
    step, batch = _prepared(model, (x, y, sample_weight), split.options)
    rows = step.backend.rows(batch)
    size = checked_micro_batch_size(micro_batch_size or split.size or (rows + 1) // 2)
    result = check.compared(step, batch, rows, min(size or rows, rows))
    print(result)
    return result


def find_micro_batch_size(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    memory_limit: int | None = None,
) -> MicroBatchSize:
    """Finds the largest micro-batch that fits, as `"auto"` would; prints what was looked at.

    Looks at the batch and its halvings. On JAX nothing is run: the compiler's plan is compared with
    the device's memory. On TensorFlow and torch one micro-batch of each size is run until one fits.
    The model stays as it is.

    Args:
        model: A compiled model; if it is split, its options are used.
        x: Inputs, of at least `batch_size` rows; the longest ones that will come.
        y: Targets.
        sample_weight: Sample weights.
        batch_size: Rows per batch. Default: all rows of `x`.
        memory_limit: As in `split_batches`.

    Returns:
        A `MicroBatchSize`: `micro_batch_size`, and the `plan` of what was looked at.

    Raises:
        MemoryError: If one row does not fit.
        ValueError: If the model is not compiled, `x` has fewer rows than `batch_size`, or as
            `split_batches`.

    Example:

    ```python
    import keras, keras_ga
    import numpy as np

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    x, y = np.ones((256, 4)), np.ones((256, 1))
    print(keras_ga.find_micro_batch_size(model, x, y, batch_size=64).micro_batch_size)  # 64
    ```
    """
    options = _split_of(model).options
    if memory_limit is not None:
        options = options._replace(memory_limit=checked_bytes("memory_limit", memory_limit))
    data = (x, y, sample_weight)
    if batch_size is not None:
        count = checked_rows("batch_size", batch_size)
        data = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[:count], data)
    step, batch = _prepared(model, data, options)
    rows = step.backend.rows(batch)
    if batch_size is not None and rows < batch_size:
        raise ValueError(
            "`x` must have at least `batch_size` rows, because one batch is looked at. Pass more "
            f"rows. Received: batch_size={batch_size} for {rows} rows"
        )
    result = step.largest_that_fits(batch, rows)
    print(result)
    return result


class _Split:
    """What takes the place of a split model's `make_train_function`."""

    def __init__(self, model: keras.Model, size: int | None, options: Options):
        self._model = model
        self.size, self.options = size, options
        self._sizes = memory.Sizes(size)

    def __call__(self, force: bool = False) -> Any:
        model = self._model
        if model.train_function is None or force:
            # Made anew, divisors and all: the model may have been compiled with another loss.
            model.train_function = _of_backend().train_function(
                TrainStep(model, self.options, self._sizes, _of_backend().Backend)
            )
        return model.train_function


def _of_backend() -> Any:
    """The module with the micro-steps of the current Keras backend."""
    return importlib.import_module(f"keras_ga.split.{engines.backend()}")


def _split_of(model: keras.Model) -> _Split:
    """How a model is split, or would be by default."""
    split = model.__dict__.get(_HOOK)
    if isinstance(split, _Split):
        return split
    _check_model(model)
    return _Split(model, None, Options("pooled", None, "mean", None))


def _prepared(model: keras.Model, data: Any, options: Options) -> tuple[TrainStep, Any]:
    """A step outside of `fit`, and a batch for it."""
    if not model.compiled:
        raise ValueError(
            "`model` must be compiled, because its loss is looked at. Call `model.compile(...)` "
            f"before. Received: model={model.name!r}, not compiled"
        )
    data = keras.tree.map_structure(lambda leaf: None if leaf is None else np.asarray(leaf), data)
    check_batch(data)
    of_backend = _of_backend()
    step = TrainStep(model, options, memory.Sizes(None), of_backend.Backend, advise=False)
    return step, of_backend.prepare(step, data)


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a `keras.Model`, because its train step is split. Pass the model that "
            f"you compile. Received: model={model!r} (of type {type(model).__name__})"
        )
    own = [
        name
        for name in ("train_step", _HOOK)
        if getattr(type(model), name) is not getattr(keras.Model, name)
        or (name in model.__dict__ and not isinstance(model.__dict__[name], _Split))
    ]
    if own:
        raise ValueError(
            f"`model` must not have a `{own[0]}` of its own, because what is in it can't be split "
            "from outside. Use `keras_ga.GradientAccumulationOptimizer`, with smaller batches. "
            f"Received: model={model.name!r} (of type {type(model).__name__})"
        )
    if getattr(keras.config, "is_nnx_enabled", bool)():
        raise ValueError(
            "NNX must be off, because split steps have not been tried with it. Leave out "
            "`keras.config.enable_nnx()`. Received: is_nnx_enabled=True"
        )
    if norms.pooled_layers(model):
        raise ValueError(
            "`model` must have Keras's own BatchNormalization layers, because pooling layers count "
            "calls, and micro-batches within a step are pooled anyway. Call "
            f"`keras_ga.batch_norm.revert(model)` before. Received: model={model.name!r}"
        )
    refuse_layers(model)
