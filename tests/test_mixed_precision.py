"""16-bit policies: a loss scale outside, accumulators in float32, the large batch's weights."""

import keras
import numpy as np
import pytest
from support import (
    LARGE_BATCH,
    MICRO_BATCH,
    N,
    accumulating,
    assert_close,
    assert_equal,
    dense_model,
    rows,
    values,
)

import keras_ga

OUTSIDE = {
    "compile": None,
    "keras": keras.optimizers.LossScaleOptimizer,
    "keras_ga": keras_ga.LossScaleOptimizer,
}


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)


def trained(optimizer, batch_size, data=None, epochs=2):
    model = dense_model()
    model.compile(optimizer=optimizer, loss="mse")
    x, y = rows() if data is None else data
    model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    return model


@pytest.mark.usefixtures("mixed_float16")
@pytest.mark.parametrize("scale", [1.0, 2.0**10])
@pytest.mark.parametrize("outside", ["keras", "keras_ga"])
def test_the_large_batch_whatever_the_scale(outside, scale):
    large = trained(OUTSIDE["keras"](momentum(), initial_scale=scale), LARGE_BATCH)
    optimizer = OUTSIDE[outside](accumulating(momentum()), initial_scale=scale)
    model = trained(optimizer, MICRO_BATCH)
    # The forward pass is in float16, 10 bits.
    assert_close(model.get_weights(), large.get_weights(), 1e-3)
    assert int(optimizer.iterations) == 6
    assert float(optimizer.dynamic_scale) == scale


@pytest.mark.usefixtures("mixed_float16")
def test_a_scale_that_changes_in_mid_window_weights_nothing():
    """It doubles on every second micro-step; what is accumulated is unscaled."""
    growing = keras.optimizers.LossScaleOptimizer(
        accumulating(momentum()), initial_scale=1.0, dynamic_growth_steps=2
    )
    model = trained(growing, MICRO_BATCH, epochs=1)
    constant = keras.optimizers.LossScaleOptimizer(accumulating(momentum()), initial_scale=1.0)
    other = trained(constant, MICRO_BATCH, epochs=1)
    assert float(growing.dynamic_scale) == 2.0**6
    assert_close(model.get_weights(), other.get_weights(), 1e-3)


@pytest.mark.usefixtures("mixed_float16")
@pytest.mark.parametrize(
    ("outside", "position"), [("compile", 0), ("keras", 2), ("keras_ga", 0), ("keras_ga", 2)]
)
def test_an_overflow_skips_its_micro_step_and_the_window_waits(outside, position):
    x, y = rows((2 * N + 1) * MICRO_BATCH)
    x = x.copy()
    x[position * MICRO_BATCH] = np.inf
    wrapper = accumulating(momentum())
    outer = OUTSIDE[outside]
    optimizer = wrapper if outer is None else outer(wrapper)
    model = trained(optimizer, MICRO_BATCH, data=(x, y), epochs=1)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert int(wrapper.micro_steps) == 2 * N
    assert (int(wrapper.iterations), int(wrapper.pending)) == (2, 0)
    assert float(model.optimizer.dynamic_scale) == 2.0**14
    kept = np.delete(
        np.arange(len(x)), np.s_[position * MICRO_BATCH : (position + 1) * MICRO_BATCH]
    )
    large = trained(
        keras.optimizers.LossScaleOptimizer(momentum()), LARGE_BATCH, (x[kept], y[kept]), epochs=1
    )
    assert_close(model.get_weights(), large.get_weights(), 1e-3)


@pytest.mark.usefixtures("mixed_float16")
def test_callbacks_and_files_reach_through_both(tmp_path):
    inner = keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.5)
    model = dense_model()
    model.compile(optimizer=accumulating(inner), loss="mse")
    x, y = rows(5 * MICRO_BATCH)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=False)
    fit = {"batch_size": MICRO_BATCH, "shuffle": False, "verbose": 0}
    model.fit(x, y, epochs=3, callbacks=[plateau, swap], **fit)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.005)
    assert int(model.optimizer.inner_optimizer.pending) == 3
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    assert_equal(values(loaded.optimizer.variables), values(model.optimizer.variables))
    for each in (model, loaded):
        each.fit(x, y, **fit)
    assert_equal(loaded.get_weights(), model.get_weights())


def test_our_loss_scale_survives_its_config():
    optimizer = keras_ga.LossScaleOptimizer(
        accumulating("sgd", 3), initial_scale=8.0, dynamic_growth_steps=5
    )
    copy = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(copy) is keras_ga.LossScaleOptimizer
    assert (copy.initial_scale, copy.dynamic_growth_steps) == (8.0, 5)
    assert copy.inner_optimizer.accumulation_steps == 3


@pytest.mark.parametrize(("policy", "tolerance"), [("mixed_bfloat16", 5e-3), ("bfloat16", 3e-2)])
def test_bfloat16(policy, tolerance):
    keras.config.set_dtype_policy(policy)
    try:
        large = trained(momentum(), LARGE_BATCH)
        model = trained(accumulating(momentum()), MICRO_BATCH)
    finally:
        keras.config.set_dtype_policy("float32")
    as_floats = [[w.astype("float32") for w in m.get_weights()] for m in (model, large)]
    assert_close(*as_floats, tolerance)
