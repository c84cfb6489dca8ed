"""BatchNormalization under accumulation: momentum, pooled statistics, recalibration.

Trainable weights never depend on running statistics; evaluation does. N micro-batches at momentum
m make them forget as N updates would, and each is noisier than the large batch's.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras

from keras_ga import layers
from keras_ga.arguments import checked_steps
from keras_ga.window import number

__all__ = [
    "adjust_momentum",
    "convert",
    "recalibrate",
    "replace_with_group_norm",
    "restore_momentum",
    "revert",
]

# What is left of the statistics from before the training that is worth a warning.
LAG = 0.05
# Steps that no window reaches.
_ENDLESS = 2**31 - 1


# Momentum.


@dataclass(eq=False)
class _Adjustment:
    """Stands in for a layer's `get_config`, which must go on telling the momentum as written.

    So that the adjustment is never saved: an adjusted momentum that came back from a file would be
    adjusted once more.
    """

    layer: keras.layers.Layer
    as_written: dict[str, float]
    adjusted: dict[str, float]

    def __call__(self) -> dict[str, Any]:
        config = type(self.layer).get_config(self.layer)
        return config | {name: self.as_written[name] for name in self.in_force()}

    def in_force(self) -> list[str]:
        """The momenta that nobody has set to something else since."""
        return [n for n, value in self.adjusted.items() if getattr(self.layer, n) == value]


class _Row(NamedTuple):
    """What was done to one layer."""

    layer: str
    momentum: float
    adjusted: float
    trainable: bool
    note: str


class _Table(tuple[_Row, ...]):
    """Rows that print as a table."""

    def __str__(self) -> str:
        header = ("layer", "momentum", "adjusted", "trainable", "note")
        rows = [
            (
                r.layer,
                f"{r.momentum:g}",
                f"{r.adjusted:.6g}",
                "yes" if r.trainable else "no",
                r.note,
            )
            for r in self
        ]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (header, *rows)
        )

    __repr__ = __str__


def adjust_momentum(
    model: keras.Model, accumulation_steps: int, updates: int | None = None
) -> Sequence[_Row]:
    """Gives each BatchNormalization layer the momentum that forgets per window as it did per step.

    Running statistics move on every micro-batch. With momentum m^(1/N) they reach back over as
    many updates as those of the large batch, with its noise. What stays different is the variance
    between micro-batches, which is not in any of them: with few rows and no spatial axes the
    running variance is too small (by 24 % for 16 micro-batches of 4); where that matters, use
    `convert`. It takes the large batch's lag as well: with Keras's default momentum of 0.99 and
    some hundred updates, the statistics are still those from before the training; then leave the
    momentum alone, and `recalibrate`.

    The momentum is run-time state: a file, a clone or a copy of the model has the original one,
    so adjust it again after loading. Doing so twice changes nothing. A model that has been
    trained is compiled anew by its next `fit`. Pass the model that you compile, not a part of it.

    Args:
        model: A model of any kind; unbuilt layers that exist are included.
        accumulation_steps: N, int >= 1; with 1, the original momentum.
        updates: Updates that the training will make, if known: then a layer is warned about
            whose statistics will still hold more than 5 % of what they were before it.

    Returns:
        A sequence of rows (layer, momentum, adjusted, trainable, note), which prints as a table.

    Raises:
        TypeError: If `accumulation_steps` or `updates` is no int.
        ValueError: If one of them is below 1.

    Example:

    ```python
    import keras, keras_ga

    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization(momentum=0.9)]
    )
    print(keras_ga.batch_norm.adjust_momentum(model, accumulation_steps=4))
    # layer                momentum  adjusted  trainable  note
    # batch_normalization  0.9       0.974004  yes
    ```
    """
    steps = checked_steps("accumulation_steps", accumulation_steps)
    updates = None if updates is None else checked_steps("updates", updates)
    _Advice.needed = False
    repeated = called_repeatedly(model)
    rows, changed = [], False
    for layer in layers_of(model):
        if isinstance(layer, layers.BatchNormalization):
            row = _Row(_name(layer), layer.momentum, layer.momentum, layer.trainable, "pooled")
        else:
            before = _momenta(layer)
            written = _momenta_as_written(layer)
            adjusted = {name: m ** (1 / steps) if steps > 1 else m for name, m in written.items()}
            _set_momenta(layer, written, adjusted)
            changed |= before != adjusted
            notes = _notes(layer, repeated.get(layer), adjusted["momentum"] ** steps, updates)
            row = _Row(
                _name(layer),
                written["momentum"],
                adjusted["momentum"],
                layer.trainable,
                "; ".join(notes),
            )
        rows.append(row)
    if changed:
        _forget_compiled_steps(model)
    table = _Table(rows)
    _warn_of(table)
    return table


def restore_momentum(model: keras.Model) -> None:
    """Undoes `adjust_momentum`: each BatchNormalization layer has its original momentum again.

    Args:
        model: The model that was given to `adjust_momentum`.
    """
    changed = False
    for layer in layers_of(model):
        before = _momenta(layer)
        written = _momenta_as_written(layer)
        _set_momenta(layer, written, written)
        changed |= before != written
    if changed:
        _forget_compiled_steps(model)


def _momenta(layer: keras.layers.Layer) -> dict[str, float]:
    names = ["momentum", "renorm_momentum"] if getattr(layer, "renorm", False) else ["momentum"]
    return {name: getattr(layer, name) for name in names}


def _momenta_as_written(layer: keras.layers.Layer) -> dict[str, float]:
    """The user's own: what an adjustment has replaced, or what was set since."""
    adjustment = vars(layer).get("get_config")
    if not isinstance(adjustment, _Adjustment):
        return _momenta(layer)
    return _momenta(layer) | {name: adjustment.as_written[name] for name in adjustment.in_force()}


def _set_momenta(
    layer: keras.layers.Layer, written: dict[str, float], adjusted: dict[str, float]
) -> None:
    for name, value in adjusted.items():
        setattr(layer, name, value)
    if adjusted != written:
        layer.get_config = _Adjustment(layer, written, adjusted)
    elif isinstance(vars(layer).get("get_config"), _Adjustment):
        del layer.get_config


def _notes(
    layer: keras.layers.Layer, repeated: str | None, momentum: float, updates: int | None
) -> Iterator[str]:
    """What can hurt; `momentum` is per update."""
    if not layer.trainable:
        yield "frozen: does not move"
        return
    if repeated:
        yield f"{repeated}: moves that often"
    dtype = layer.variable_dtype
    if dtype in ("float16", "bfloat16"):
        yield f"running statistics in {dtype}: small steps are rounded away"
    if updates is not None and (left := momentum**updates) > LAG:
        yield f"lags: {left:.0%} of the initial statistics left after {updates} updates"


def _warn_of(table: Sequence[_Row]) -> None:
    hurt = [row for row in table if row.note.startswith(("called", "running", "lags"))]
    if hurt:
        shown = "; ".join(f"{row.layer} ({row.note})" for row in hurt[:3])
        more = f" and {len(hurt) - 3} more" if len(hurt) > 3 else ""
        warnings.warn(
            f"Running statistics may be off in evaluation: {shown}{more}. After training, "
            "`keras_ga.batch_norm.recalibrate(model, data)` takes them from the data.",
            stacklevel=3,
        )


def lag_after(model: keras.Model, updates: int, accumulation_steps: int) -> float:
    """The largest share of the statistics from before the training that so many updates leave."""
    return max(
        (
            layer.momentum ** (accumulation_steps * updates)
            for layer in layers_of(model)
            if layer.trainable and not isinstance(layer, layers.BatchNormalization)
        ),
        default=0.0,
    )


# Pooled statistics.


def convert(model: keras.Model, accumulation_steps: int) -> int:
    """Turns a model's BatchNormalization layers into `keras_ga.layers.BatchNormalization`.

    In place: the layers, their weights, the model's outputs and the optimizer's state stay what
    they are; only the class changes, and with it how running statistics move in training. A model
    that has been trained is compiled anew by its next `fit`. Layers that are such already get the
    number of steps. All or nothing.

    Args:
        model: A built model of any kind: the model that you compile, not a part of it.
        accumulation_steps: Micro-batches per window, int >= 1: that of the optimizer.

    Returns:
        The number of layers that now pool.

    Raises:
        TypeError: If `accumulation_steps` is no int.
        ValueError: If a layer can't be converted (unbuilt, with `renorm`, of a class derived from
            Keras's, called more than once per step), which is named; nothing is changed then. Also
            if there is none.

    Example:

    ```python
    import keras, keras_ga

    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization()]
    )
    print(keras_ga.batch_norm.convert(model, accumulation_steps=4))  # 1
    model.compile(keras_ga.GradientAccumulationOptimizer("adam", 4), loss="mse")
    ```
    """
    steps = checked_steps("accumulation_steps", accumulation_steps)
    found = list(layers_of(model))
    _refuse(_reasons_not_to_convert(found, called_repeatedly(model)), "convert")
    if not found:
        raise ValueError(
            "`model` must have a BatchNormalization layer, because there is nothing to convert "
            f"otherwise. Received: model={model.name!r}"
        )
    _Advice.needed = False
    restore_momentum(model)  # pooled, it is per update
    pending = _pending(model, steps)
    for layer in found:
        if isinstance(layer, layers.BatchNormalization):
            layer.accumulation_steps = steps
        else:
            _pool(layer, steps, pending)
    _forget_compiled_steps(model)
    return len(found)


def revert(model: keras.Model) -> int:
    """Undoes `convert`: the layers are Keras's again, with the weights that they have now.

    What an open window holds is thrown away; `flush` before to keep it.

    Args:
        model: The model that was given to `convert`.

    Returns:
        The number of layers that pooled.

    Example:

    ```python
    import keras, keras_ga

    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization()]
    )
    keras_ga.batch_norm.convert(model, accumulation_steps=4)
    keras_ga.batch_norm.revert(model)
    model.save("stock.keras")  # needs Keras alone to be loaded
    ```
    """
    pooled = pooled_layers(model)
    for layer in pooled:
        _unpool(layer)
    if pooled:
        _forget_compiled_steps(model)
    return len(pooled)


def pooled_layers(model: keras.Model) -> list[layers.BatchNormalization]:
    """The layers of a model that pool the statistics of a window."""
    return [x for x in layers_of(model) if isinstance(x, layers.BatchNormalization)]


def _reasons_not_to_convert(
    found: Iterable[keras.layers.Layer], repeated: dict[keras.layers.Layer, str]
) -> Iterator[tuple[keras.layers.Layer, str]]:
    for layer in found:
        if isinstance(layer, layers.BatchNormalization):
            continue
        if type(layer) is not keras.layers.BatchNormalization:
            yield layer, f"is of the derived class {type(layer).__name__}"
        elif not layer.built:
            yield layer, "is not built; build the model before"
        elif getattr(layer, "renorm", False):
            yield layer, "has renorm=True, which uses its statistics within the step"
        elif layer in repeated:
            yield layer, f"is {repeated[layer]}"


def _refuse(reasons: Iterable[tuple[keras.layers.Layer, str]], what: str) -> None:
    named = [f"{_name(layer)} {reason}" for layer, reason in reasons]
    if named:
        raise ValueError(
            f"`{what}` must be able to do all BatchNormalization layers, because a model left half "
            "done would not be one thing or the other. Nothing was changed; `adjust_momentum` "
            f"takes any of them. Received: {'; '.join(named)}"
        )


def _pool(layer: keras.layers.Layer, steps: int, micro_batches: int = 0) -> None:
    layer.__class__ = layers.BatchNormalization
    layer._steps = steps
    with _may_change(layer):
        layer._build_window(micro_batches)


def _unpool(layer: layers.BatchNormalization) -> None:
    with _may_change(layer):
        for variable in [*layer._window_variables(), layer.window_length]:
            # Keras's own `__delattr__` (3.15) collects garbage each time: 0.1 s for each of them.
            layer._untrack_variable(variable)
            super(keras.layers.Layer, layer).__delattr__(variable.name)
    del layer._steps
    layer.__class__ = keras.layers.BatchNormalization


@contextlib.contextmanager
def _may_change(layer: keras.layers.Layer) -> Iterator[None]:
    # A built layer's tracker is locked; Keras opens it so itself to add LoRA's weights (3.15).
    layer._tracker.unlock()
    try:
        yield
    finally:
        layer._tracker.lock()


def _pending(model: keras.Model, steps: int) -> int:
    """Micro-batches in the open window of the optimizer that a model is compiled with.

    Warns if that optimizer's windows have another number of steps.
    """
    optimizer = getattr(model, "optimizer", None)
    while optimizer is not None and not hasattr(optimizer, "follows_a_schedule"):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    if optimizer is None:
        return 0
    if optimizer.follows_a_schedule or optimizer.accumulation_steps != steps:
        warnings.warn(
            f"The layers pool over {steps} micro-batches, but the optimizer that the model is "
            f"compiled with accumulates {optimizer.accumulation_steps}"
            f"{' and changes that' if optimizer.follows_a_schedule else ''}. Give both the same "
            "number, or compile anew.",
            stacklevel=3,
        )
    return number(optimizer.pending)


# Recalibration.


def recalibrate(
    model: keras.Model,
    data: Any,
    batch_size: int | None = None,
    steps: int | None = None,
    verbose: str | int = "auto",
) -> None:
    """Takes the running statistics from the data, in one pass forward, whatever they were.

    The cure when they lag or are noisy, after training and before evaluation: one pass over the
    training data (or some thousand rows of it) in training mode. Each batch is normalised by its
    own statistics; their pooled mean and variance become the running ones. Use the largest
    `batch_size` that fits: it need not be that of training. Frozen layers, weights, optimizer,
    dropout's seeds and metrics stay as they are.

    Args:
        model: A built model.
        data: What `model.predict` takes: arrays, a `tf.data.Dataset`, a `PyDataset`, a generator;
            of batches (x, y) only x is used.
        batch_size: Rows per batch, where `data` is arrays. Default: 32.
        steps: Batches to use; default: all.
        verbose: As in `model.predict`: `"auto"` or 1 shows a progress bar, 0 does not.

    Raises:
        ValueError: If the model has no trainable BatchNormalization layer or one of a kind that
            can't be done, which is named. If the data has no valid entries for a layer. Nothing
            is changed then.

    Example:

    ```python
    import keras, keras_ga
    import numpy as np

    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    x = np.random.default_rng(0).normal(3.0, size=(256, 4))
    keras_ga.batch_norm.recalibrate(model, x, batch_size=64, verbose=0)
    print(np.allclose(model.layers[0].moving_mean, x.mean(0), atol=1e-6))  # True
    ```

    References:
        - Izmailov et al., 2018, https://arxiv.org/abs/1803.05407, who end on such a pass
    """
    found = [layer for layer in layers_of(model) if layer.trainable]
    # Pooled over all of its calls, a shared layer is right.
    _refuse(_reasons_not_to_convert(found, {}), "recalibrate")
    if not found:
        raise ValueError(
            "`model` must have a BatchNormalization layer that is not frozen, because there is "
            f"nothing to recalibrate otherwise. Received: model={model.name!r}"
        )
    _Advice.needed = False
    pooled_before = {id(layer): layer.accumulation_steps for layer in pooled_layers(model)}
    # All variables: a forward pass in training mode may change any (SpectralNormalization).
    before = [(variable, keras.ops.convert_to_numpy(variable)) for variable in model.variables]
    synchronized = {id(layer): layer.synchronized for layer in found}
    try:
        for layer in found:
            if id(layer) in pooled_before:
                layer.reset_window()
                layer.accumulation_steps = _ENDLESS
            else:
                _pool(layer, _ENDLESS)
            if getattr(layer.moving_mean.value, "distribute_strategy", None) is not None:
                layer.synchronized = True  # else each replica has the statistics of its own rows
        forward = _InTrainingMode(model)
        try:
            forward.predict(data, batch_size=batch_size, steps=steps, verbose=verbose)
        except (UnboundLocalError, StopIteration) as error:  # what Keras 3.15 makes of no batch
            raise ValueError(
                "`data` must have a batch, because statistics are taken from it. Received: none"
            ) from error
        finally:
            if hasattr(forward, "jax_state_sync"):
                forward.jax_state_sync()  # a step that failed has not given the values back
        # A layer that is not called in training mode keeps its statistics, as in training.
        called = [layer for layer in found if number(layer.window_step) > 0]
        if not called:
            raise ValueError(
                "`model` must call a BatchNormalization layer in training mode, because statistics "
                "are taken from its inputs. Pass `training` on in the model's `call`, which must "
                "not be a `tf.function`. Received: a model that called none of "
                f"{', '.join(map(_name, found))}"
            )
        empty = [_name(layer) for layer in called if number(layer.window_count) == 0]
        if empty:
            raise ValueError(
                "`data` must have valid, finite entries, because statistics are taken from them. "
                f"Received: none for {', '.join(empty)}"
            )
        statistics = [
            (running, keras.ops.convert_to_numpy(pooled))
            for layer in called
            for running, pooled in (
                (layer.moving_mean, layer.window_mean),
                (layer.moving_variance, layer.window_variance),
            )
        ]
    finally:
        for layer in found:
            layer.synchronized = synchronized[id(layer)]
            if id(layer) in pooled_before:
                layer.accumulation_steps = pooled_before[id(layer)]
            elif isinstance(layer, layers.BatchNormalization):
                _unpool(layer)
        for variable, value in before:
            variable.assign(value)
    for running, value in statistics:
        running.assign(value)


class _InTrainingMode(keras.Model):
    """A model whose `predict` runs forward as training does, and returns nothing of size."""

    def __init__(self, model: keras.Model):
        # As Functional models do: each layer casts for itself.
        super().__init__(autocast=False, name="in_training_mode")
        self.model = model

    def call(self, inputs: Any) -> Any:
        self.model(inputs, training=True)
        return keras.ops.zeros((1,))


# Another layer.


def replace_with_group_norm(model: keras.Model, groups: int = 8) -> keras.Model:
    """Makes a copy of a model with GroupNormalization in place of BatchNormalization.

    GroupNormalization normalises each row by itself, so accumulation is exact with it, for any
    micro-batch. It is another network: scale, offset and all other weights are taken over, but a
    trained model must be trained on.

    Args:
        model: A Functional or Sequential model, built; nested ones are included.
        groups: Groups of channels, int >= 1; must divide the channels of each layer.

    Returns:
        A new model, compiled as the given one is, which stays as it is.

    Raises:
        TypeError: If `groups` is no int.
        ValueError: If the model is a subclassed one, a BatchNormalization layer is inside another
            layer, or `groups` does not divide its channels.

    Example:

    ```python
    import keras, keras_ga

    model = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Conv2D(16, 3), keras.layers.BatchNormalization()]
    )
    model = keras_ga.batch_norm.replace_with_group_norm(model, groups=4)
    print(type(model.layers[-1]).__name__)  # GroupNormalization
    ```

    References:
        - Wu and He, 2018, https://arxiv.org/abs/1803.08494
    """
    groups = checked_steps("groups", groups)
    inside = [
        f"{_name(layer)} in {_name(outer)}"
        for outer in _leaves_of(model)
        if not _is_batch_norm(outer)
        for layer in layers_of(outer)
    ]
    if inside:
        raise ValueError(
            "`model` must have its BatchNormalization layers as layers of Functional or Sequential "
            "models, because what a layer of another kind holds can't be replaced from outside. "
            f"Change its code. Received: {'; '.join(inside)}"
        )
    copies: dict[keras.layers.Layer, keras.layers.Layer] = {}

    def copy(layer: keras.layers.Layer) -> keras.layers.Layer:
        if layer not in copies:
            copies[layer] = (
                copy_model(layer)
                if _is_graph(layer)
                else _group_norm(layer, groups)
                if _is_batch_norm(layer)
                else type(layer).from_config(layer.get_config())
            )
        return copies[layer]

    def copy_model(model: keras.Model) -> keras.Model:
        sequential = isinstance(model, keras.Sequential)
        call = {} if sequential else {"call_function": _call_without_mask}
        return keras.models.clone_model(model, clone_function=copy, **call)

    copied = copy_model(model)
    for layer, its_copy in copies.items():
        if _is_batch_norm(layer):
            for name in ("gamma", "beta"):
                if getattr(layer, name) is not None:
                    value = keras.ops.convert_to_numpy(getattr(layer, name))
                    getattr(its_copy, name).assign(value)
        elif isinstance(layer, keras.layers.Layer) and not _is_graph(layer):
            its_copy.set_weights(layer.get_weights())
            if hasattr(its_copy, "finalize_state"):
                its_copy.finalize_state()  # of an adapted `Normalization`
    return copied


def _call_without_mask(layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
    """Calls a copied layer as its original was: BatchNormalization takes a mask."""
    if isinstance(layer, keras.layers.GroupNormalization):
        kwargs.pop("mask", None)
    return layer(*args, **kwargs)


def _group_norm(layer: keras.layers.Layer, groups: int) -> keras.layers.GroupNormalization:
    if not layer.built:
        raise ValueError(
            "`model` must be built, because its weights are taken over. Build it before. "
            f"Received: model with {_name(layer)} not built"
        )
    channels = layer.moving_mean.shape[0]
    if channels % groups:
        raise ValueError(
            "`groups` must divide the channels of each BatchNormalization layer, because they are "
            f"split evenly. Received: groups={groups} for {channels} channels of {_name(layer)}"
        )
    config = layer.get_config()
    shared = ("name", "axis", "epsilon", "center", "scale", "dtype", "trainable")
    of_weights = [f"{weight}_{what}" for weight in ("beta", "gamma") for what in _OF_A_WEIGHT]
    return keras.layers.GroupNormalization.from_config(
        {"groups": groups, **{key: config[key] for key in (*shared, *of_weights)}}
    )


_OF_A_WEIGHT = ("initializer", "regularizer", "constraint")


# Advice.


class _Advice:
    """Whether the user may still have to be told; using any of these tools shows that not."""

    needed = True


def advise(variables: Iterable[Any]) -> None:
    """Warns, once, if trained variables look like those of BatchNormalization."""
    pattern = re.compile(r"batch_?norm|(^|[_/])bn\d*[a-z]?([_/]|$)", re.IGNORECASE)
    paths = [str(getattr(variable, "path", "")) for variable in variables]
    found = [p for p in paths if p.endswith(("gamma", "beta")) and pattern.search(p)]
    if found and _Advice.needed:
        _Advice.needed = False
        warnings.warn(
            f"The model has BatchNormalization ({found[0]}, ...), whose running statistics move on "
            "every micro-batch. Weights are not affected; evaluation may be. After training, "
            "`keras_ga.batch_norm.recalibrate(model, data)` sets them right; `convert` and "
            "`adjust_momentum` there make them move as the large batch's do.",
            stacklevel=4,
        )


# Models.


def _is_batch_norm(layer: keras.layers.Layer) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization)


def layers_of(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """A model's BatchNormalization layers, each once."""
    # Private (Keras 3.15): `model.layers` does not reach into lists, dicts and wrappers.
    return [layer for layer in model._flatten_layers() if _is_batch_norm(layer)]


def _is_graph(layer: keras.layers.Layer) -> bool:
    """Whether it is a Functional or Sequential model, whose layers are all that there is to it."""
    return isinstance(layer, keras.Sequential) or hasattr(layer, "operations")


def _leaves_of(model: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    """The layers of a Functional or Sequential model, nested ones opened; else the model."""
    if not _is_graph(model):
        yield model
        return
    for layer in model.layers:
        yield from _leaves_of(layer)


def called_repeatedly(model: keras.Model) -> dict[keras.layers.Layer, str]:
    """The BatchNormalization layers that a step calls more than once, as far as can be seen."""
    times = {
        layer: f"called {number} times per step"
        for layer, number in _calls_in_graph(model).items()
        if number > 1
    }
    loops = (keras.layers.TimeDistributed, keras.layers.RNN)
    for loop in (layer for layer in model._flatten_layers() if isinstance(layer, loops)):
        times |= dict.fromkeys(layers_of(loop), "called at each time step")
    return times


def _calls_in_graph(layer: keras.layers.Layer) -> Counter[keras.layers.Layer]:
    """How often a Functional graph calls each BatchNormalization layer; any other layer: once."""
    # Private (Keras 3.15). A layer's own list of nodes also has its calls in other models.
    graph = getattr(layer, "_functional", None) or layer
    nodes = [node for depth in getattr(graph, "_nodes_by_depth", {}).values() for node in depth]
    called = [node.operation for node in nodes if not node.is_input]
    if not nodes:
        return Counter(layers_of(layer))
    calls: Counter[keras.layers.Layer] = Counter()
    for operation in called:
        if isinstance(operation, keras.layers.Layer):
            calls.update(_calls_in_graph(operation))
    return calls


def _name(layer: keras.layers.Layer) -> str:
    return layer.path or layer.name


def _forget_compiled_steps(model: keras.Model) -> None:
    """Lets the next step be traced anew: TensorFlow and JAX bake a layer's momentum into it."""
    if getattr(model, "train_function", None) is not None:
        model.make_train_function(force=True)
