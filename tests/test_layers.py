"""`layers.BatchNormalization`: the running statistics of the large batch, from micro-batches."""

import functools

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
    rows,
    values,
)

import keras_ga

Stock = keras.layers.BatchNormalization
Pooled = keras_ga.layers.BatchNormalization


def statistics(layer):
    return values([layer.moving_mean, layer.moving_variance])


def batch_norm_model(batch_norm, seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(6),
            batch_norm,
            keras.layers.Activation("tanh"),
            keras.layers.Dense(3),
        ]
    )


def trained(batch_norm, optimizer, batch_size, *, data=None, epochs=2, callbacks=(), **compile_):
    model = batch_norm_model(batch_norm)
    model.compile(optimizer=optimizer, loss="mse", **compile_)
    x, y = rows() if data is None else data
    model.fit(
        x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
    )
    return model


def sgd():
    # Of no effect: only then do the large batch and its micro-batches, which are normalised each
    # by itself, go on to see the same inputs of the layer.
    return keras.optimizers.SGD(0.0)


def run(layer, batches, **arguments):
    for batch in batches:
        layer(keras.ops.convert_to_tensor(batch), training=True, **arguments)


def images(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(1.0, 2.0, size=(count, 4, 4, 3)).astype("float32")


# Exact.


@pytest.mark.parametrize("shape", [(6,), (4, 4, 3)], ids=["dense", "conv"])
@pytest.mark.parametrize("micro_batch", [2, 4, 8, 32])
@pytest.mark.parametrize("steps", [4, 16])
def test_statistics_are_those_of_the_large_batch(shape, micro_batch, steps):
    rng = np.random.default_rng(0)
    updates = 5
    x = rng.normal(1.0, 2.0, size=(updates, steps, micro_batch, *shape)).astype("float32")
    stock, pooled = Stock(momentum=0.9), Pooled(momentum=0.9, accumulation_steps=steps)
    run(stock, x.reshape(updates, steps * micro_batch, *shape))
    run(pooled, x.reshape(updates * steps, micro_batch, *shape))
    (mean, variance), (expected_mean, expected_variance) = statistics(pooled), statistics(stock)
    np.testing.assert_allclose(variance, expected_variance, rtol=1e-6)
    assert (np.abs(mean - expected_mean) / np.sqrt(expected_variance)).max() < 1e-6


MODES = {
    "default": {},
    "eager": {"run_eagerly": True},
    "several_steps": {"steps_per_execution": 3},
}
if BACKEND == "tensorflow":
    MODES |= {"graph": {"jit_compile": False}, "xla": {"jit_compile": True}}


@functools.cache  # the same for all modes
def statistics_of_the_large_batch_and_of_small_ones():
    large = trained(Stock(momentum=0.9), sgd(), LARGE_BATCH)
    alone = trained(Stock(momentum=0.9), accumulating(sgd()), MICRO_BATCH)
    return statistics(large.layers[1]), statistics(alone.layers[1])


@pytest.mark.parametrize("mode", MODES)
def test_fit_has_the_large_batchs_statistics(mode):
    if BACKEND == "torch" and mode == "several_steps":
        pytest.skip("Keras has no steps_per_execution on torch")
    large, alone = statistics_of_the_large_batch_and_of_small_ones()
    small = trained(
        Pooled(momentum=0.9, accumulation_steps=N), accumulating(sgd()), MICRO_BATCH, **MODES[mode]
    )
    assert_close(statistics(small.layers[1]), large)
    assert_differ(alone, large, by=1e-2)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_16_bit_policies_pool_in_float32(policy):
    x = images(24)
    stock, pooled = (
        Stock(momentum=0.9, dtype=policy),
        Pooled(momentum=0.9, dtype=policy, accumulation_steps=4),
    )
    run(stock, x.reshape(2, 12, 4, 4, 3))
    run(pooled, x.reshape(8, 3, 4, 4, 3))
    tolerance = 1e-2 if policy == "bfloat16" else 1e-6  # its running statistics have 8 bits
    assert_close(statistics(pooled), statistics(stock), tolerance)
    assert pooled.window_mean.dtype == "float32"
    assert pooled.moving_mean.dtype == stock.moving_mean.dtype


@pytest.mark.usefixtures("float64")
def test_float64_pools_in_float64():
    x = images(24).astype("float64")
    stock, pooled = Stock(momentum=0.9), Pooled(momentum=0.9, accumulation_steps=4)
    run(stock, x.reshape(2, 12, 4, 4, 3))
    run(pooled, x.reshape(8, 3, 4, 4, 3))
    # Keras computes the moments in float32 on the others, whatever the policy (3.15).
    assert_close(statistics(pooled), statistics(stock), 1e-13 if BACKEND == "tensorflow" else 1e-6)
    assert pooled.window_mean.dtype == "float64"


def test_trained_weights_are_those_of_the_stock_layer():
    x, _ = rows()
    models = [
        trained(layer, accumulating(keras.optimizers.Adam(0.01)), MICRO_BATCH, epochs=10)
        for layer in (Stock(momentum=0.9), Pooled(momentum=0.9, accumulation_steps=N))
    ]
    stock, pooled = (values(model.trainable_variables) for model in models)
    assert int(models[0].optimizer.iterations) == 30
    assert_equal(pooled, stock)
    assert_differ(models[1].predict(x, verbose=0), models[0].predict(x, verbose=0))


def test_one_step_is_the_stock_layer():
    stock, pooled = Stock(momentum=0.9), Pooled(momentum=0.9, accumulation_steps=1)
    for layer in (stock, pooled):
        run(layer, images(12).reshape(4, 3, 4, 4, 3))
    assert_equal(statistics(pooled), statistics(stock))


def test_held_micro_steps_leave_the_statistics_alone():
    layer = Pooled(momentum=0.9, accumulation_steps=3)
    x = images(12).reshape(6, 2, 4, 4, 3)
    layer.build((None, 4, 4, 3))
    for step, batch in enumerate(x):
        before = statistics(layer)
        run(layer, [batch])
        if step % 3 < 2:
            assert_equal(statistics(layer), before)
        else:
            assert_differ(statistics(layer), before, by=0)


def test_unequal_micro_batches_count_by_their_rows():
    x = images(32)
    stock, pooled = Stock(momentum=0.9), Pooled(momentum=0.9, accumulation_steps=4)
    run(stock, [x[:16], x[16:]])
    run(pooled, np.split(x, [1, 3, 8, 16, 24, 29, 31]))
    assert_close(statistics(pooled), statistics(stock))


def test_axis_scale_and_center():
    x = images(12)
    arguments = {"axis": 1, "momentum": 0.9, "scale": False, "center": False}
    stock, pooled = Stock(**arguments), Pooled(accumulation_steps=4, **arguments)
    run(stock, [x])
    run(pooled, np.split(x, 4))
    assert_close(statistics(pooled), statistics(stock))
    assert not pooled.trainable_variables
    # In evaluation it is Keras's layer.
    stock.set_weights(pooled.get_weights()[:2])
    assert_equal(values([pooled(x)]), values([stock(x)]))


# Masks and values that are not finite.


@pytest.mark.parametrize("channels", [1, 3])
def test_masked_entries_do_not_enter(channels):
    rng = np.random.default_rng(0)
    x = rng.normal(1.0, 2.0, size=(8, 6, channels)).astype("float32")
    mask = rng.random((8, 6)) < 0.6
    mask[2:4] = False  # a micro-batch that is wholly masked
    layer = Pooled(momentum=0.9, accumulation_steps=4)
    for start in range(0, 8, 2):
        at = slice(start, start + 2)
        layer(keras.ops.convert_to_tensor(x[at]), training=True, mask=mask[at])
    valid = x[mask]
    expected = [0.1 * valid.mean(0), 0.9 + 0.1 * valid.var(0)]
    assert_close(statistics(layer), expected)


def test_a_masked_batch_is_normalised_as_by_the_stock_layer():
    rng = np.random.default_rng(0)
    x = rng.normal(1.0, 2.0, size=(4, 6, 3)).astype("float32")
    mask = rng.random((4, 6)) < 0.6
    outputs = [layer(x, training=True, mask=mask) for layer in (Stock(), Pooled())]
    assert_close(*(values([out]) for out in outputs))


def test_a_window_of_nothing_valid_changes_nothing():
    layer = Pooled(momentum=0.9, accumulation_steps=2)
    x = rows(4)[0].reshape(2, 2, 5)
    layer.build((None, 2, 5))
    before = statistics(layer)
    for _ in range(2):
        layer(x, training=True, mask=np.zeros((2, 2), bool))
    assert_equal(statistics(layer), before)
    assert int(layer.window_step) == 0


def test_a_mask_of_another_rank_is_refused():
    layer = Pooled()
    with pytest.raises(ValueError, match="`mask` must have one axis less than `inputs`"):
        layer(np.zeros((2, 3, 4), "float32"), training=True, mask=np.zeros((2,), bool))


@pytest.mark.parametrize(("position", "bad"), [*enumerate([np.nan, np.inf, np.inf, np.nan])])
def test_a_micro_batch_that_is_not_finite_is_left_out(bad, position):
    x = images(16)
    spoilt = x.copy()
    spoilt[2 * position, 0, 0, 0] = bad
    layer, clean = Pooled(momentum=0.9, accumulation_steps=4), Stock(momentum=0.9)
    run(layer, np.split(spoilt, 8))
    run(clean, [np.delete(x[:8], [2 * position, 2 * position + 1], axis=0), x[8:]])
    assert_close(statistics(layer), statistics(clean))


def test_means_whose_square_overflows_are_left_out():
    layer = Pooled(momentum=0.9, accumulation_steps=2)
    run(layer, [np.full((4, 3), 1e30, "float32"), np.ones((4, 3), "float32")])
    assert_close(statistics(layer), [np.full(3, 0.1), np.full(3, 0.9)])


# Windows.


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_the_end_of_data_of_unknown_length_is_no_micro_step():
    if BACKEND == "torch":
        pytest.skip("the same on torch as any other data")

    x, y = rows(6 * MICRO_BATCH)

    def batches():
        for start in range(0, len(x), MICRO_BATCH):
            yield x[start : start + MICRO_BATCH], y[start : start + MICRO_BATCH]

    data = batches
    if BACKEND == "tensorflow":
        import tensorflow as tf

        signature = [tf.TensorSpec((MICRO_BATCH, 5)), tf.TensorSpec((MICRO_BATCH, 3))]
        dataset = tf.data.Dataset.from_generator(batches, output_signature=tuple(signature))
        data = lambda: dataset  # noqa: E731
    model = batch_norm_model(Pooled(momentum=0.9, accumulation_steps=4))
    model.compile(accumulating(sgd()), loss="mse")
    for _ in range(3):
        model.fit(data(), verbose=0, shuffle=False)
    assert int(model.optimizer.pending) == int(model.layers[1].window_step) == 2


def test_flushing_closes_the_windows_of_optimizer_and_layers_together():
    data = rows(6 * MICRO_BATCH)
    callbacks = [keras_ga.callbacks.FlushPartialWindow()]
    small = trained(
        Pooled(momentum=0.9, accumulation_steps=N),
        accumulating(sgd()),
        MICRO_BATCH,
        data=data,
        epochs=3,
        callbacks=callbacks,
    )
    large = trained(Stock(momentum=0.9), sgd(), LARGE_BATCH, data=data, epochs=3)
    assert int(large.optimizer.iterations) == int(small.optimizer.iterations) == 6
    assert_close(statistics(small.layers[1]), statistics(large.layers[1]))


def test_validation_within_fit_sees_the_flushed_statistics():
    data = rows(6 * MICRO_BATCH)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            seen.append(logs["loss"])

    def run_(layer, optimizer, batch_size, *callbacks):
        model = batch_norm_model(layer)
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(
            *data,
            batch_size=batch_size,
            epochs=2,
            shuffle=False,
            verbose=0,
            validation_data=data,
            callbacks=[*callbacks, Look()],
        )

    run_(
        Pooled(momentum=0.9, accumulation_steps=N),
        accumulating(sgd()),
        MICRO_BATCH,
        keras_ga.callbacks.FlushPartialWindow(),
    )
    run_(Stock(momentum=0.9), sgd(), LARGE_BATCH)
    assert seen[:2] == pytest.approx(seen[2:], rel=1e-5)


def test_an_empty_window_is_not_flushed():
    layer = Pooled(momentum=0.9, accumulation_steps=2)
    layer.flush()  # not built: nothing to do
    run(layer, np.split(images(4), 2))
    before = statistics(layer)
    layer.flush()
    assert_equal(statistics(layer), before)


def test_resetting_throws_the_window_away():
    x = images(12)
    layer, other = (
        Pooled(momentum=0.9, accumulation_steps=2),
        Pooled(momentum=0.9, accumulation_steps=2),
    )
    run(layer, [x[:4]])
    layer.reset_window()
    run(layer, [x[4:8], x[8:]])
    run(other, [x[4:8], x[8:]])
    assert_equal(statistics(layer), statistics(other))


def test_another_number_of_steps_takes_effect_after_a_fit():
    """Also on backends that compile: the number is a variable."""
    data = rows(8 * MICRO_BATCH)
    layer = Pooled(momentum=0.9, accumulation_steps=4)
    model = trained(layer, accumulating(sgd()), MICRO_BATCH, data=data, epochs=1)
    model.optimizer.accumulation_steps = 2
    layer.accumulation_steps = 2
    model.fit(*data, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    stock = Stock(momentum=0.9)
    large = trained(stock, sgd(), 4 * MICRO_BATCH, data=data, epochs=1)
    large.fit(*data, batch_size=2 * MICRO_BATCH, shuffle=False, verbose=0)
    assert_close(statistics(layer), statistics(stock))


def test_a_scheduler_by_epoch_leads_the_layers_too():
    data = rows(8 * MICRO_BATCH)
    layer, stock = Pooled(momentum=0.9, accumulation_steps=4), Stock(momentum=0.9)
    scheduler = keras_ga.callbacks.AccumulationStepsScheduler({0: 4, 1: 2})
    trained(layer, accumulating(sgd()), MICRO_BATCH, data=data, callbacks=[scheduler])
    large = trained(stock, sgd(), 4 * MICRO_BATCH, data=data, epochs=1)
    large.fit(*data, batch_size=2 * MICRO_BATCH, shuffle=False, verbose=0)
    assert_close(statistics(layer), statistics(stock))
    assert layer.accumulation_steps == 2


def test_a_frozen_layer_stays_as_it_is():
    layer = Pooled(momentum=0.9, accumulation_steps=2, trainable=False)
    layer.build((None, 4, 4, 3))
    before = values(layer.variables)
    run(layer, np.split(images(4), 2))
    assert_equal(values(layer.variables), before)


# Files.


def saved(layer, path, epochs=1, data=None):
    model = trained(layer, accumulating(sgd()), MICRO_BATCH, data=data, epochs=epochs)
    model.save_weights(path)
    return model


@pytest.mark.parametrize("back", [False, True])
def test_weight_files_are_the_stock_layers_where_no_window_is_open(tmp_path, back):
    path = tmp_path / "m.weights.h5"
    layers = [Pooled(momentum=0.9, accumulation_steps=N), Stock(momentum=0.9)]
    source, target = layers[::-1] if back else layers
    model = saved(source, path)
    other = batch_norm_model(target, seed=1)
    other.load_weights(path)
    assert_equal(statistics(target), statistics(source))
    x, _ = rows()
    assert_equal([other.predict(x, verbose=0)], [model.predict(x, verbose=0)])


def test_loading_a_stock_file_empties_the_window(tmp_path):
    path = tmp_path / "m.weights.h5"
    saved(Stock(momentum=0.9), path)
    layer = Pooled(momentum=0.9, accumulation_steps=N)
    model = trained(layer, accumulating(sgd()), MICRO_BATCH, data=rows(6 * MICRO_BATCH), epochs=1)
    assert int(layer.window_step) == 2
    model.load_weights(path, skip_mismatch=False)
    assert int(layer.window_step) == 0
    assert_equal(values([layer.window_count]), [np.zeros(())])


def test_training_goes_on_from_an_open_window(tmp_path):
    first, second = rows(6 * MICRO_BATCH), rows(6 * MICRO_BATCH, seed=1)
    layer = Pooled(momentum=0.9, accumulation_steps=N)
    model = trained(layer, accumulating(sgd()), MICRO_BATCH, data=first, epochs=1)
    assert int(layer.window_step) == 2
    model.save(tmp_path / "m.keras")
    model.fit(*second, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    loaded.fit(*second, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    assert loaded.layers[1].accumulation_steps == N
    assert_equal(values(loaded.layers[1].variables), values(layer.variables))


def test_a_file_with_an_open_window_is_not_the_stock_layers(tmp_path):
    path = tmp_path / "m.weights.h5"
    saved(Pooled(momentum=0.9, accumulation_steps=N), path, data=rows(6 * MICRO_BATCH))
    with pytest.raises(ValueError, match=r"expected 4 variables, but received 8|8 .*variables"):
        batch_norm_model(Stock(momentum=0.9)).load_weights(path)


def test_a_file_of_a_layer_without_scale_is_refused(tmp_path):
    path = tmp_path / "m.weights.h5"
    saved(Stock(momentum=0.9, scale=False), path)
    model = batch_norm_model(Pooled(momentum=0.9, accumulation_steps=N))
    with pytest.raises(ValueError, match="must be of a `BatchNormalization` layer with the 4"):
        model.load_weights(path)


def test_an_unbuilt_layer_loads_nothing():
    with pytest.raises(ValueError, match="was never built"):
        Pooled().load_own_variables({"0": np.zeros(3)})


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"accumulation_steps": 0}, ValueError, "`accumulation_steps` must be an int >= 1"),
        ({"accumulation_steps": 2.5}, TypeError, "`accumulation_steps` must be an int >= 1"),
        ({"renorm": True}, ValueError, "`renorm` must be left out"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        Pooled(**arguments)


def test_setting_bad_steps_is_refused():
    layer = Pooled(accumulation_steps=2)
    with pytest.raises(TypeError, match="`accumulation_steps` must be an int >= 1"):
        layer.accumulation_steps = True
    assert layer.accumulation_steps == 2


def test_config_has_the_steps_as_they_are_now():
    layer = Pooled(axis=1, momentum=0.7, accumulation_steps=2)
    layer.accumulation_steps = 5
    copy = Pooled.from_config(layer.get_config())
    assert (copy.axis, copy.momentum, copy.accumulation_steps) == (1, 0.7, 5)
