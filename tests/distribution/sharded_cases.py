"""`keras.distribution` on JAX host devices: run by `test_strategies.py`, in its own process."""

import collections
import functools
import re

import jax
import keras
import numpy as np
import pytest
from support import accumulating, assert_close, assert_differ, assert_equal, held, rows, values

import keras_ga

N, MICRO_BATCH = 3, 8
LARGE_BATCH = N * MICRO_BATCH
ROWS = 3 * LARGE_BATCH


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(16, activation="tanh", name="wide"),
            keras.layers.Dense(4, name="narrow"),
        ]
    )


def data():
    return rows(ROWS, targets=4)


def data_parallel():
    return keras.distribution.DataParallel(auto_shard_dataset=False)


def model_parallel():
    mesh = keras.distribution.DeviceMesh((4, 2), ["batch", "model"])
    layout = keras.distribution.LayoutMap(mesh)
    # Patterns match whole paths: without the `.*` they match nothing, in silence.
    layout[".*wide/kernel"] = (None, "model")
    layout[".*wide/bias"] = ("model",)
    layout[".*narrow/kernel"] = ("model",)  # the last ones may be left out
    return keras.distribution.ModelParallel(
        layout_map=layout, batch_dim_name="batch", auto_shard_dataset=False
    )


DISTRIBUTIONS = {"data": data_parallel, "model": model_parallel}
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1),
    "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "ema": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.5),
}


@pytest.fixture(autouse=True)
def _no_distribution_afterwards():
    assert jax.device_count() == 8
    yield
    keras.distribution.set_distribution(None)


def trained(make_optimizer, batch_size, *, distribution=None, steps=None, **arguments):
    keras.distribution.set_distribution(distribution and DISTRIBUTIONS[distribution]())
    model = make_model()
    optimizer = make_optimizer()
    if steps:
        optimizer = accumulating(optimizer, steps)
    model.compile(optimizer, loss="mse", **arguments)
    model.fit(*data(), batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return model, optimizer


@functools.cache  # the same for all distributions
def weights_on_one_device(name, batch_size):
    return trained(OPTIMIZERS[name], batch_size)[0].get_weights()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_equals_the_large_batch_on_one_device(distribution, name):
    large = weights_on_one_device(name, LARGE_BATCH)
    model, optimizer = trained(OPTIMIZERS[name], MICRO_BATCH, distribution=distribution, steps=N)
    assert_close(model.get_weights(), large, 2e-6)
    assert int(optimizer.iterations) == 6
    assert_differ(weights_on_one_device(name, MICRO_BATCH), large, by=1e-3)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_accumulators_are_sharded_as_their_variables(distribution):
    model, optimizer = trained(OPTIMIZERS["adam"], MICRO_BATCH, distribution=distribution, steps=N)
    window = optimizer._window
    for accumulator, variable in zip(window.accumulators, window.variables, strict=True):
        ours, its = accumulator.value.sharding, variable.value.sharding
        assert ours.is_equivalent_to(its, accumulator.value.ndim), variable.path
    kernel = model.get_layer("wide").kernel.value
    parts = {"data": (5, 16), "model": (5, 8)}
    assert kernel.addressable_shards[0].data.shape == parts[distribution]


def collectives(compiled_text):
    """Of a compiled step: how many collectives by kind, at the top and inside called functions."""
    where, found = None, {"top": collections.Counter(), "inside": collections.Counter()}
    for line in compiled_text.splitlines():
        if re.match(r"^(ENTRY )?%?\S+ \(.*\) -> .* \{$", line):
            where = "top" if line.startswith("ENTRY") else "inside"
        operation = re.search(r"= \S+ (all-reduce|all-gather|reduce-scatter|all-to-all)", line)
        operation = operation or re.search(r"\) (all-reduce|all-gather|reduce-scatter)\(", line)
        if operation:
            found[where][operation.group(1)] += 1
    return found


def compiled_step(distribution, steps):
    keras.distribution.set_distribution(DISTRIBUTIONS[distribution]())
    model = make_model()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    if steps:
        optimizer = accumulating(optimizer, steps)
    model.compile(optimizer, loss="mse", metrics=[])
    x, y = (array[:MICRO_BATCH] for array in data())
    model.fit(x, y, batch_size=MICRO_BATCH, verbose=0)
    optimizer.build(model.trainable_variables)
    state = (
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
        [v.value for v in optimizer.variables],
        [v.value for v in model.metrics_variables],
    )
    layout = keras.distribution.distribution().get_data_layout(x.shape)
    batch = tuple(keras.distribution.distribute_tensor(array, layout) for array in (x, y))
    return jax.jit(model.train_step).lower(state, batch).compile().as_text()


@pytest.mark.filterwarnings("ignore:Training ended before its first update")
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_compiled_step_has_the_bare_steps_collectives(distribution):
    bare, ours = (collectives(compiled_step(distribution, steps)) for steps in (None, N))
    assert bare["top"]
    assert ours == bare


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("to", [None, *DISTRIBUTIONS])
def test_an_open_window_travels_between_distributions(tmp_path, distribution, to):
    keras.distribution.set_distribution(DISTRIBUTIONS[distribution]())
    model = make_model()
    optimizer = accumulating(OPTIMIZERS["adam"](), N)
    model.compile(optimizer, loss="mse")
    x, y = data()
    first = slice(0, (N + 2) * MICRO_BATCH)
    model.fit(x[first], y[first], batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    model.save(tmp_path / "m.keras")
    before = held(optimizer)
    keras.distribution.set_distribution(to and DISTRIBUTIONS[to]())
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert_equal(held(loaded.optimizer), before)
    keras.distribution.set_distribution(DISTRIBUTIONS[distribution]())
    model.fit(x, y, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    keras.distribution.set_distribution(to and DISTRIBUTIONS[to]())
    loaded.fit(x, y, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    assert_close(loaded.get_weights(), model.get_weights(), 2e-6)
    assert int(loaded.optimizer.pending) == int(optimizer.pending) == 2


def test_flushing_and_another_number_of_steps():
    keras.distribution.set_distribution(data_parallel())
    model = make_model()
    optimizer = accumulating(OPTIMIZERS["momentum"](), N)
    model.compile(optimizer, loss="mse")
    x, y = data()
    part = slice(0, 4 * MICRO_BATCH)
    flush = keras_ga.callbacks.FlushPartialWindow()
    model.fit(x[part], y[part], batch_size=MICRO_BATCH, shuffle=False, verbose=0, callbacks=[flush])
    assert (int(optimizer.iterations), int(optimizer.pending)) == (2, 0)
    optimizer.accumulation_steps = 2
    model.fit(x[part], y[part], batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    assert int(optimizer.iterations) == 4
    assert np.isfinite(values(model.trainable_variables)[0]).all()


# Accumulators in parts.


def in_parts(make_optimizer, axis="batch"):
    def make():
        return keras_ga.GradientAccumulationOptimizer(make_optimizer(), N, shard_accumulators=axis)

    return make


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_accumulators_in_parts_give_the_same_weights(distribution, name):
    large = weights_on_one_device(name, LARGE_BATCH)
    model, optimizer = trained(in_parts(OPTIMIZERS[name]), MICRO_BATCH, distribution=distribution)
    assert_close(model.get_weights(), large, 2e-6)
    shapes = {
        a.path.split("/")[-1]: a.value.addressable_shards[0].data.shape
        for a in optimizer._window.accumulators
    }
    wide, narrow = (next(s for k, s in shapes.items() if n in k) for n in ("wide_k", "narrow_k"))
    expected = {"data": ((5, 2), (2, 4)), "model": ((5, 8), (8, 1))}
    assert (wide, narrow) == expected[distribution]


def step_of(distribution, optimizer, width):
    keras.distribution.set_distribution(DISTRIBUTIONS[distribution]())
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(width, name="wide"), keras.layers.Dense(4)]
    )
    model.compile(optimizer(), loss="mse")
    x, y = (array[:MICRO_BATCH] for array in data())
    model.fit(x, y, batch_size=MICRO_BATCH, verbose=0)
    state = (
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
        [v.value for v in model.optimizer.variables],
        [v.value for v in model.metrics_variables],
    )
    layout = keras.distribution.distribution().get_data_layout(x.shape)
    batch = tuple(keras.distribution.distribute_tensor(array, layout) for array in (x, y))
    return jax.jit(model.train_step, donate_argnums=0).lower(state, batch).compile()


@pytest.mark.filterwarnings("ignore:Training ended before its first update")
def test_parts_save_memory_and_are_gathered_within_the_loop():
    width = 1 << 16
    whole = step_of("data", lambda: accumulating(keras.optimizers.Adam(), N), width)
    parts = step_of("data", in_parts(keras.optimizers.Adam), width)
    top, inside = (collectives(parts.as_text())[where] for where in ("top", "inside"))
    assert collectives(whole.as_text())["top"] == top
    assert not top["all-gather"]
    assert inside["all-gather"]
    sizes = [each.memory_analysis().argument_size_in_bytes for each in (whole, parts)]
    weights = 4 * (5 + 1 + 4) * width
    assert sizes[0] - sizes[1] == pytest.approx(weights * 7 / 8, rel=0.01)


def test_parts_are_saved_whole(tmp_path):
    keras.distribution.set_distribution(data_parallel())
    model = make_model()
    optimizer = in_parts(OPTIMIZERS["adam"])()
    model.compile(optimizer, loss="mse")
    x, y = data()
    model.fit(x[: 5 * MICRO_BATCH], y[: 5 * MICRO_BATCH], batch_size=MICRO_BATCH, verbose=0)
    assert int(optimizer.pending) == 2
    model.save_weights(tmp_path / "m.weights.h5")
    before = held(optimizer)
    keras.distribution.set_distribution(None)
    other = make_model()
    its = accumulating(OPTIMIZERS["adam"](), N)
    other.compile(its, loss="mse")
    its.build(other.trainable_variables)
    other.load_weights(tmp_path / "m.weights.h5")
    assert_equal(held(its), before)


def test_an_axis_that_is_not_there_is_refused():
    keras.distribution.set_distribution(data_parallel())
    optimizer = in_parts(OPTIMIZERS["adam"], "rows")()
    with pytest.raises(ValueError, match="must be an axis of the distribution's device mesh"):
        optimizer.build(make_model().trainable_variables)
