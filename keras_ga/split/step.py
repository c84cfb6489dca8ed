"""One train step, worked through in micro-batches: what is the same on every backend.

A micro-batch is a function from values to values: it reads the model's variables and changes none.
Gradients, statistics and metrics are carried from one to the next, and set after the last. So a
step that fails on the way has changed nothing and can be made again in smaller parts.

The loop runs on the host, one compiled micro-step after another. Unrolled into one compiled step,
micro-batches save no memory (0.97 of the whole batch's, XLA on CPU); in a loop within it they do,
but XLA runs convolutions inside a loop 15 to 60 times slower on CPU, and a step that fails takes
the donated weights with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import keras
from keras import ops

from keras_ga.optimizer import GradientAccumulationOptimizer
from keras_ga.split import memory
from keras_ga.split.divisors import Divisors
from keras_ga.split.statistics import Pooling, Statistics
from keras_ga.window import Tensor, overwrites


class Options(NamedTuple):
    """What `split_batches` was told."""

    batch_norm: str
    divisor: Any
    add_loss: str
    memory_limit: int | None


class Carry(NamedTuple):
    """What micro-batches hand on, one to the next. A variable is known by its number."""

    gradients: Any
    """Sums so far; a micro-batch's loss is multiplied by its share of the rows."""
    state: dict[int, Tensor]
    """The variables that a forward pass or a metric may change."""
    statistics: Statistics
    """Of BatchNormalization, pooled over the rows so far."""
    logs: Any


class Place(NamedTuple):
    """Where in its batch a micro-batch is, in rows."""

    before: int | Tensor
    rows: int | Tensor
    of_rows: int | Tensor


class Backend(Protocol):
    """A model's micro-steps on one backend. Rows are those of one device."""

    def local(self, batch: Any) -> Any:
        """What one device has of a batch."""

    def ready(self, batch: Any) -> Any:
        """The batch as the backend wants it."""

    def rows(self, batch: Any) -> int:
        """Rows of a batch on the device that has most."""

    def part(self, batch: Any, start: int, size: int) -> Any:
        """`size` rows of a batch on each device, from `start` on."""

    def start(self, batch: Any) -> Carry:
        """No gradients yet, and the model's values."""

    def divisors(self, totals: Any, carry: Carry, part: Any) -> Any:
        """The losses' divisors on a micro-batch, added to the totals."""

    def micro_step(self, carry: Carry, totals: Any, part: Any, place: Place) -> Carry:
        """Takes one micro-batch in."""

    def wait(self, carry: Carry) -> None:
        """Returns when all that is carried has really been computed, or raises."""

    def finish(self, carry: Carry, totals: Any, rows: int) -> Any:
        """Sets what was carried, makes the update, returns the logs."""

    def undo(self) -> None:
        """Puts back what micro-steps have changed beside what is carried."""

    def gradients(self, carry: Carry) -> list[Any]:
        """What is carried of gradients, as arrays; zeros where there are none."""

    def plan(self, carry: Carry, totals: Any, batch: Any, part: Any) -> memory.Plan | None:
        """What a micro-batch of the batch will take, and may; None: the backend can't tell."""


class TrainStep:
    """Works batches through, in micro-batches of a size that is given or found.

    Args:
        model: A compiled model, which need not be built yet.
        options: What `split_batches` was told.
        sizes: The size of micro-batches.
        make_backend: Makes the backend's part, when the model is built.
        advise: Whether to warn about losses that can't be exact.
    """

    def __init__(
        self,
        model: keras.Model,
        options: Options,
        sizes: memory.Sizes,
        make_backend: Callable[[TrainStep], Any],
        advise: bool = True,
    ):
        self.model = model
        self.options = options
        self.sizes = sizes
        self._make_backend = make_backend
        self.training = True
        self._advise = advise
        self.backend: Any = None
        self._depends_on_data: dict[Hashable, bool] = {}

    def build(self, batch: Any, in_fit: bool = False) -> Any:
        """Makes what depends on the model's variables and losses; returns the backend's part.

        Args:
            batch: A batch as one device has it.
            in_fit: Whether Keras has just made losses and metrics itself, as far as it can.
        """
        if self.backend is not None:
            return self.backend
        model, options = self.model, self.options
        if not in_fit:
            # Private (Keras 3.15): makes losses and metrics, which else are made in the trace.
            model._symbolic_build(data_batch=batch)
        refuse_layers(model)  # those that the model has made only now, too
        self.divisors = Divisors(model, options.divisor, options.add_loss, self._advise)
        self.variables = [*model.non_trainable_variables, *model.metrics_variables]
        # As they were when the step was made, so that sums of gradients keep their variables if a
        # layer is frozen without compiling anew.
        self.trainable = list(model.trainable_variables)
        numbers = {id(variable): number for number, variable in enumerate(self.variables)}
        self.pooling = Pooling(model, numbers) if options.batch_norm == "pooled" else None
        self._accumulates = isinstance(model.optimizer, GradientAccumulationOptimizer)
        self.backend = self._make_backend(self)
        return self.backend

    def __call__(self, batch: Any) -> Any:
        """One update with a batch; returns its logs."""
        backend = self.backend
        local = backend.local(batch)
        check_batch(local)
        batch = backend.ready(batch)
        rows, shape = backend.rows(batch), _shape(local)
        size = self.sizes.known(shape) or self._size_to_begin_with(batch, rows)
        while True:
            size = max(1, min(size, rows))
            try:
                with self.in_place():
                    carry, totals = self._worked_through(batch, rows, size)
                break
            except BaseException as error:  # an interrupt in a notebook as well
                backend.undo()
                if not (self.sizes.automatic and memory.is_out_of_memory(error)):
                    raise
                failed = error.with_traceback(None)
            # Outside of the handler: a traceback would keep the activations alive.
            size = memory.halved(size, rows, failed)
            self.sizes.remember(shape, size)
        if self.sizes.automatic and self.sizes.known(shape) is None:
            self.sizes.remember(shape, size)
        return backend.finish(carry, totals, rows)

    def _worked_through(self, batch: Any, rows: int, size: int) -> tuple[Carry, Any]:
        backend = self.backend
        carry = backend.start(batch)
        totals = self.totals(carry, batch, rows, size)
        for place, part in self.parts(batch, rows, size):
            carry = backend.micro_step(carry, totals, part, place)
        backend.wait(carry)
        return carry, totals

    def totals(self, carry: Carry, batch: Any, rows: int, size: int) -> Any:
        """The losses' divisors on the whole batch.

        They are in each loss before its gradient is taken, so they are wanted beforehand. Compiled,
        all that is left of the pass that finds them is masks and sample weights; only on torch and
        in eager mode it is a forward pass. Most models need none: then one micro-batch shows it.
        """
        totals = self.divisors.no_totals()
        # Whether there are sample weights is all that can change it; it is seen while tracing.
        kind = tuple(leaf is None for leaf in keras.tree.flatten(batch))
        self.divisors.depend_on_data = self._depends_on_data.get(kind, False)
        if self._depends_on_data.get(kind, True):
            for _, part in self.parts(batch, rows, size):
                totals = self.backend.divisors(totals, carry, part)
                self._depends_on_data[kind] = self.divisors.depend_on_data
                if not self.divisors.depend_on_data:
                    break
        return totals

    def parts(self, batch: Any, rows: int, size: int) -> Iterator[tuple[Place, Any]]:
        """The micro-batches of a batch, and where in it they are."""
        # No rows are a part too: regularisers count on a replica that got none.
        for start in range(0, max(rows, 1), size):
            part_rows = min(size, rows - start)
            yield Place(start, part_rows, rows), self.backend.part(batch, start, part_rows)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Corrected losses and pooled statistics in the places of the model's own."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.divisors.in_place())
            if self.pooling:
                stack.enter_context(self.pooling.in_place())
            yield

    # For the backends.

    def scope(self, state: Mapping[int, Tensor]) -> keras.StatelessScope:
        """Where variables have the values of `state`, and are not set."""
        # A regulariser looks for its variable in the scope (Keras 3.15).
        regularised = [v for v in self.model.trainable_variables if v.regularizer is not None]
        scope = keras.StatelessScope(
            [(variable, variable.value) for variable in regularised]
            + [(self.variables[number], value) for number, value in state.items()],
            collect_losses=True,
        )
        scope.given = dict(scope.state_mapping)
        return scope

    def check_not_set(self, scope: keras.StatelessScope) -> None:
        """Refuses a forward pass that sets a variable which the optimizer trains.

        Raises:
            ValueError: If one was set: it would be lost.
        """
        for variable in self.model.trainable_variables:
            if scope.get_current_value(variable) is not scope.given.get(id(variable)):
                raise ValueError(
                    "A layer's `call` must not set a trainable variable, because micro-batches are "
                    "worked through without setting any. Make it non-trainable, or use "
                    f"`GradientAccumulationOptimizer`. Received: {variable.path} set in training"
                )

    def predictions(self, x: Any) -> Any:
        """The model's output."""
        # Private (Keras 3.15), here and below, as its own train step has it.
        training = {"training": self.training} if self.model._call_has_training_arg else {}
        return self.model(x, **training)

    def loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Tensor:
        """The model's total loss."""
        return self.model._compute_loss(x, y, y_pred, sample_weight, training=True)

    def statistics(self, state: Mapping[int, Tensor]) -> Statistics:
        """The running statistics, which are also where pooling begins."""
        return self.pooling.start(state) if self.pooling else {}

    def changed(
        self,
        statistics: Statistics,
        new: Mapping[int, Any],
        before: Mapping[int, Any],
        place: Place,
    ) -> tuple[Statistics, dict[int, Tensor]]:
        """What a micro-batch has changed: statistics to be pooled, and all else."""
        changed = {
            number: value
            for number, value in new.items()
            if value is not None and value is not before.get(number)
        }
        if self.pooling:
            statistics = self.pooling.merged(statistics, changed, place.before, place.rows)
        return statistics, changed

    def moved(self, before: Statistics, statistics: Statistics) -> dict[int, Tensor]:
        """Running statistics, moved once by those of the batch. Not to be called `in_place`."""
        return self.pooling.moved(before, statistics) if self.pooling else {}

    def weighted(self, totals: Any, rows: Any) -> dict[str, Any]:
        """The argument that tells a `GradientAccumulationOptimizer` what the batch counts for."""
        if not self._accumulates:
            return {}
        return {"weight": totals[0] if self.divisors.has_one else ops.cast(rows, "float32")}

    # Outside of training.

    def gradients(self, batch: Any, rows: int, size: int) -> list[Any]:
        """The gradients of a batch that is worked through in micro-batches; nothing is set."""
        with self.in_place():
            carry, _ = self._worked_through(batch, rows, size)
            gradients: list[Any] = self.backend.gradients(carry)
        self.backend.undo()
        return gradients

    def largest_that_fits(self, batch: Any, rows: int) -> memory.MicroBatchSize:
        """Looks at the batch and its halvings, down to the first that fits; nothing is set."""
        trials, limit = self._planned(batch, rows)
        if not trials:
            trials = list(self._tried(batch, rows))
        if not trials[-1].fits:
            raise memory.too_large(f"what was looked at: {trials}")
        return memory.MicroBatchSize(trials[-1].micro_batch_size, tuple(trials), limit)

    def _tried(self, batch: Any, rows: int) -> Iterator[memory.Trial]:
        for size in memory.halvings(rows):
            try:
                with self.in_place():
                    part = self.backend.part(batch, 0, size)
                    self._worked_through(part, size, size)
                fits = True
            except Exception as error:
                if not memory.is_out_of_memory(error):
                    raise
                fits = False
            self.backend.undo()
            yield memory.Trial(size, fits, None)
            if fits:
                return

    # Finding a size.

    def _size_to_begin_with(self, batch: Any, rows: int) -> int:
        trials, _ = self._planned(batch, rows)
        if not trials:
            return self.sizes.guess(rows)
        chosen = trials[-1]
        if chosen.micro_batch_size < rows:
            memory.LOGGER.warning(
                "micro_batch_size %d: planned with %.0f MiB; the batch stays %d",
                chosen.micro_batch_size,
                (chosen.bytes or 0) / 2**20,
                rows,
            )
        return chosen.micro_batch_size

    def _planned(self, batch: Any, rows: int) -> tuple[list[memory.Trial], int | None]:
        """Sizes from the whole batch down to the first that fits, and the memory planned for.

        No sizes where the backend can't tell.
        """
        trials: list[memory.Trial] = []
        limit = None
        with self.in_place():
            backend = self.backend
            carry, totals = backend.start(batch), self.divisors.no_totals()
            for size in memory.halvings(rows):
                plan = backend.plan(carry, totals, batch, backend.part(batch, 0, size))
                if plan is None:
                    break
                limit = plan.limit
                trials.append(memory.Trial(size, plan.needed <= plan.free, plan.needed))
                if trials[-1].fits:
                    break
        return trials, limit


def refuse_layers(model: keras.Model) -> None:
    """Refuses layers that can't be worked through in micro-batches.

    Raises:
        ValueError: If there is one; it is named.
    """
    # Private (Keras 3.15): reaches layers in lists and wrappers as well.
    for layer in model._flatten_layers():
        spectral = isinstance(layer, keras.layers.SpectralNormalization)
        if spectral or getattr(layer, "stateful", False):
            reason = (
                "it sets its kernel in every forward pass"
                if spectral
                else "its state has a row for each row of the batch"
            )
            raise ValueError(
                "`model` must not have a stateful RNN or SpectralNormalization if its batches are "
                f"split, because {reason}. Use `GradientAccumulationOptimizer`. Received: "
                f"{layer.name} (of type {type(layer).__name__})"
            )


def share_of(place: Place) -> Any:
    """What a micro-batch counts for: its rows, as a share of the batch's."""
    rows, of_rows = place.rows, place.of_rows
    if isinstance(rows, int) and isinstance(of_rows, int):
        return rows / of_rows if of_rows else 1.0
    share = ops.divide(ops.cast(rows, "float32"), ops.cast(ops.maximum(of_rows, 1), "float32"))
    # A replica without rows has its regularisers still.
    return ops.where(ops.equal(of_rows, 0), ops.ones_like(share), share)


def added(total: Tensor, gradient: Tensor | None, variable: keras.Variable) -> Tensor:
    """A micro-batch's gradient added to the sum."""
    if gradient is None:
        return total
    gradient = ops.cast(gradient, total.dtype)
    return ops.maximum(total, gradient) if overwrites(variable) else ops.add(total, gradient)


def check_batch(batch: Any) -> None:
    """Refuses data that can't be cut along its first axis.

    Raises:
        ValueError: If a part of it is sparse or ragged, or has no rows or another number of them.
    """
    rows: dict[int, None] = {}
    for leaf in keras.tree.flatten(batch):
        if leaf is None:
            continue
        kind, shape = type(leaf).__name__, getattr(leaf, "shape", None)
        if kind in ("SparseTensor", "RaggedTensor", "BCOO") or not shape:
            raise ValueError(
                "Each part of a batch must be a dense tensor with rows on its first axis, because "
                "it is cut there. Use dense tensors (not lists of numbers, which count as several "
                "parts), or `GradientAccumulationOptimizer`. Received: "
                f"{kind} of shape {shape}"
            )
        rows[shape[0]] = None
    if len(rows) > 1:
        raise ValueError(
            "All parts of a batch must have the same number of rows, because it is cut into "
            "micro-batches of rows. Give each input, target and weight one entry per row. "
            f"Received: {' and '.join(map(str, rows))} rows"
        )


def _shape(batch: Any) -> Hashable:
    """What a batch is like but for its rows."""
    return tuple(
        None if leaf is None else (tuple(leaf.shape[1:]), str(leaf.dtype))
        for leaf in keras.tree.flatten(batch)
    )
