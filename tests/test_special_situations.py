"""Micro-batches with NaN, float8 scales, frozen layers, checkpoints made with another N."""

import keras
import numpy as np
import pytest
from support import (
    BACKEND,
    LARGE_BATCH,
    MICRO_BATCH,
    N,
    accumulating,
    assert_close,
    assert_differ,
    assert_equal,
    dense_model,
    fitted,
    gradients_of,
    held,
    rows,
    values,
)


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1)


@pytest.mark.parametrize(("position", "bad"), [*enumerate([np.nan, np.inf, np.inf, np.nan])])
def test_dropping_equals_the_large_batch_without_those_rows(position, bad):
    x, y = rows(2 * LARGE_BATCH)
    spoilt = x.copy()
    at = slice(position * MICRO_BATCH, (position + 1) * MICRO_BATCH)
    spoilt[at.start, 0] = bad
    optimizer = accumulating(momentum(), nonfinite="drop")
    accumulated, _ = fitted(optimizer, MICRO_BATCH, data=(spoilt, y), epochs=1)
    large = dense_model()
    large.compile(optimizer=momentum(), loss="mse")
    kept = np.setdiff1d(np.arange(LARGE_BATCH), np.arange(at.start, at.stop))
    large.train_on_batch(x[kept], y[kept])
    large.train_on_batch(x[LARGE_BATCH:], y[LARGE_BATCH:])
    assert_close(accumulated.get_weights(), large.get_weights())
    assert int(optimizer.dropped_micro_steps) == 1
    assert (int(optimizer.micro_steps), int(optimizer.iterations)) == (2 * N, 2)


def test_a_window_of_nothing_but_nan_makes_no_update():
    x, y = rows(2 * LARGE_BATCH)
    x[:LARGE_BATCH] = np.nan
    inner = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer = accumulating(inner, nonfinite="drop")
    accumulated, _ = fitted(optimizer, MICRO_BATCH, data=(x, y), epochs=1)
    large, _ = fitted(
        keras.optimizers.AdamW(0.1, weight_decay=0.5),
        LARGE_BATCH,
        data=(x[LARGE_BATCH:], y[LARGE_BATCH:]),
        epochs=1,
    )
    assert_close(accumulated.get_weights(), large.get_weights())
    assert (int(optimizer.iterations), int(optimizer.skipped_updates)) == (1, 1)
    assert int(optimizer.dropped_micro_steps) == N


@pytest.mark.parametrize("position", [0, N - 1])
def test_propagating_reaches_the_weights_and_no_further(position):
    x, y = rows(2 * LARGE_BATCH)
    x[position * MICRO_BATCH, 0] = np.nan
    optimizer = accumulating(keras.optimizers.SGD(0.1))
    model, _ = fitted(optimizer, MICRO_BATCH, data=(x[:LARGE_BATCH], y[:LARGE_BATCH]), epochs=1)
    assert np.isnan(model.get_weights()[0]).any()
    assert not any(np.isnan(total).any() for total in held(optimizer))


def float8_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16), keras.layers.Dense(16)])
    model.layers[0].quantize("float8")
    return model


def scales(model):
    return [v for v in model.trainable_variables if v.overwrite_with_gradient]


def test_float8_training_sets_its_scales_once_per_window():
    x, y = rows(2 * LARGE_BATCH, features=16, targets=16)
    large = float8_model()
    large.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    model = float8_model()
    optimizer = accumulating(keras.optimizers.SGD(0.01))
    model.compile(optimizer=optimizer, loss="mse")
    assert len(scales(model)) == 6
    for window in range(2):
        before = values(scales(model))
        for step in range(N):
            assert_equal(values(scales(model)), before)
            at = slice((window * N + step) * MICRO_BATCH, (window * N + step + 1) * MICRO_BATCH)
            model.train_on_batch(x[at], y[at])
        at = slice(window * LARGE_BATCH, (window + 1) * LARGE_BATCH)
        large.train_on_batch(x[at], y[at])
        # The scales of inputs and kernel are the large batch's. That of the output's gradient is
        # not: a micro-batch's mean loss has N times its gradient per row.
        for mine, its in zip(scales(model), scales(large), strict=True):
            if "outputs" not in mine.name:
                assert_close(values([mine]), values([its]), 1e-5)
    assert_differ(values(scales(model)), before, by=0)


def test_a_layer_frozen_after_build_is_refused_with_the_way_out():
    model, _ = fitted(accumulating(momentum()), MICRO_BATCH, epochs=1)
    optimizer = model.optimizer
    model.layers[0].trainable = False
    model.compile(optimizer=optimizer, loss="mse")
    with pytest.raises(ValueError, match="after freezing or unfreezing layers: a new one"):
        model.fit(*rows(), batch_size=MICRO_BATCH, verbose=0)
    # A model of its own: on JAX, a step that fails takes the weights with it (Keras 3.15).
    model, _ = fitted(accumulating(momentum()), MICRO_BATCH, epochs=1)
    model.layers[0].trainable = False
    model.compile(optimizer=accumulating(momentum()), loss="mse")
    frozen = model.layers[0].get_weights()
    model.fit(*rows(), batch_size=MICRO_BATCH, verbose=0)
    assert_equal(model.layers[0].get_weights(), frozen)


def test_recompiling_with_the_same_wrapper_keeps_the_window():
    data = rows(6 * MICRO_BATCH)
    model, _ = fitted(accumulating(momentum()), MICRO_BATCH, data=data, epochs=1)
    assert int(model.optimizer.pending) == 2
    model.compile(optimizer=model.optimizer, loss="mse")
    model.fit(*data, batch_size=MICRO_BATCH, epochs=1, shuffle=False, verbose=0)
    straight, _ = fitted(accumulating(momentum()), MICRO_BATCH, data=data, epochs=2)
    assert_equal(model.get_weights(), straight.get_weights())


@pytest.mark.filterwarnings("ignore:Training ended before its first update")
def test_weights_saved_with_another_n_go_on_from_the_same_window(tmp_path):
    data = rows(3 * MICRO_BATCH)
    saved, _ = fitted(accumulating(momentum(), 4), MICRO_BATCH, data=data, epochs=1)
    saved.save_weights(tmp_path / "m.weights.h5")
    model = dense_model()
    optimizer = accumulating(momentum(), 5)
    model.compile(optimizer=optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "m.weights.h5")
    assert (optimizer.accumulation_steps, int(optimizer.pending)) == (5, 3)
    model.fit(*rows(2 * MICRO_BATCH, seed=1), batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    assert (int(optimizer.iterations), int(optimizer.pending)) == (1, 0)
    both = [
        np.concatenate(parts) for parts in zip(data, rows(2 * MICRO_BATCH, seed=1), strict=True)
    ]
    large, _ = fitted(momentum(), 5 * MICRO_BATCH, data=tuple(both), epochs=1)
    assert_close(model.get_weights(), large.get_weights())


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_16_bit_models_accumulate_in_float32(policy):
    def make_model():
        return dense_model(dtype=policy)

    optimizer = accumulating(keras.optimizers.SGD(0.1), reduction="sum")
    model, _ = fitted(optimizer, MICRO_BATCH, make_model=make_model, epochs=1)
    assert {a.dtype for a in optimizer._window.accumulators} == {"float32"}
    # The sum in the window is that of the micro-gradients, in float32.
    optimizer.reset_window()
    x, y = rows(3 * MICRO_BATCH)
    expected = None
    for start in range(0, len(x), MICRO_BATCH):
        at = slice(start, start + MICRO_BATCH)
        found = gradients_of(model, x[at], y[at])
        optimizer.apply(found, model.trainable_variables)
        found = [keras.ops.convert_to_numpy(keras.ops.cast(g, "float32")) for g in found]
        expected = (
            found if expected is None else [e + g for e, g in zip(expected, found, strict=True)]
        )
    assert_close(values(optimizer._window.accumulators), expected)


@pytest.mark.skipif(BACKEND == "jax", reason="Keras's loss scale can't be applied eagerly on JAX")
def test_the_loss_scale_skips_a_micro_step_without_losing_the_window():
    # An overflow under `LossScaleOptimizer` never reaches the window: it stays aligned by updates.
    optimizer = keras.optimizers.LossScaleOptimizer(accumulating(momentum(), 2), initial_scale=4.0)
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer.build([variable])
    for gradient in (4.0, np.inf, 4.0):
        optimizer.apply([keras.ops.full((2,), gradient)], [variable])
    inner = optimizer.inner_optimizer
    assert (int(inner.micro_steps), int(inner.iterations)) == (2, 1)
    assert np.isfinite(values([variable])[0]).all()


def saved_after(steps, micro_steps, path):
    """Weights saved by a model trained for so many micro-steps; its optimizer."""
    optimizer = momentum() if steps is None else accumulating(momentum(), steps)
    data = rows(micro_steps * MICRO_BATCH)
    model, _ = fitted(optimizer, MICRO_BATCH, data=data, epochs=1)
    model.save_weights(path)
    return optimizer


def loaded_into(steps, path):
    model, optimizer = dense_model(), accumulating(momentum(), steps)
    model.compile(optimizer=optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    model.load_weights(path)
    return optimizer


# Keras looks for the inner optimizer a second time, where the bare one's file has nothing.
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.parametrize("steps", [None, 1])
def test_a_file_without_a_window_goes_on_with_an_empty_one(steps, tmp_path):
    before = saved_after(steps, 3, tmp_path / "m.weights.h5")
    optimizer = loaded_into(4, tmp_path / "m.weights.h5")
    assert (int(optimizer.iterations), int(optimizer.pending)) == (3, 0)
    inner = before if steps is None else before.inner_optimizer
    assert_equal(values(optimizer.inner_optimizer.variables), values(inner.variables))


def test_a_window_that_finds_no_accumulators_is_left_out_with_a_warning(tmp_path):
    saved_after(2, 3, tmp_path / "m.weights.h5")
    with pytest.warns(UserWarning, match="holds a window of 1 micro-batches, which is left out"):
        optimizer = loaded_into(1, tmp_path / "m.weights.h5")
    assert (int(optimizer.iterations), int(optimizer.pending)) == (1, 0)


# The inner optimizer has other slots, too, and says so itself.
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer 'sgd")
def test_a_window_of_other_variables_is_left_out_with_a_warning(tmp_path):
    """As after an adapter was added: weights that fit are loaded, and training goes on."""
    saved_after(4, 7, tmp_path / "m.weights.h5")
    model = dense_model()
    model.layers[0].trainable = False
    optimizer = accumulating(momentum(), 4)
    model.compile(optimizer=optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    its = "accumulator_0, accumulator_1, accumulator_2, accumulator_3, has_gradient do not fit"
    with pytest.warns(UserWarning, match=f"holds a window of 3 micro-batches.*{its}"):
        model.load_weights(tmp_path / "m.weights.h5")
    assert (int(optimizer.micro_steps), int(optimizer.pending)) == (7, 0)
    assert not any(total.any() for total in held(optimizer))


def test_a_window_that_is_empty_need_not_fit(tmp_path):
    store = {}
    other = accumulating(momentum())
    other.build([keras.Variable(np.zeros(3, "float32"))])
    other.save_own_variables(store)
    optimizer = accumulating(momentum())
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer.apply([keras.ops.ones((2,))], [variable])
    optimizer.load_own_variables({key: np.asarray(value) for key, value in store.items()})
    assert int(optimizer.pending) == 0


def test_loading_before_it_is_built_warns():
    built = accumulating(momentum())
    built.build([keras.Variable(np.zeros(2, "float32"))])
    store = {}
    built.save_own_variables(store)
    with pytest.warns(UserWarning, match=r"Skipping variable loading.*not built yet"):
        accumulating(momentum()).load_own_variables(store)


def test_a_16_bit_accumulator_is_divided_in_float32():
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = accumulating(keras.optimizers.SGD(1.0), 2, accumulator_dtype="float16")
    for _ in range(2):
        optimizer.apply([keras.ops.full((2,), 0.5)], [variable], weight=40_000.0)
    np.testing.assert_allclose(values([variable])[0], -0.5)
