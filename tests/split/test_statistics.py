"""Running statistics and random numbers within a split batch."""

import keras
import numpy as np
import pytest
from support import BACKEND, assert_close, assert_differ, assert_equal, values
from support_split import data

import keras_ga

X, Y = data(32)
IMAGES = np.random.default_rng(0).normal(2.0, 3.0, (32, 5, 5, 2)).astype("float32")
MODES = {"default": {}, "eager": {"run_eagerly": True}}
if BACKEND == "tensorflow":
    MODES["xla"] = {"jit_compile": True}


def normalised(kind="dense", **arguments):
    norm = keras.layers.BatchNormalization(**arguments)
    if kind == "dense":
        layers = [keras.Input((6,)), keras.layers.Dense(5), norm, keras.layers.Dense(3)]
    else:
        layers = [keras.Input((5, 5, 2)), keras.layers.Conv2D(3, 2), norm]
        layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(3)]
    return keras.Sequential(layers), norm


def trained(micro, *, kind="dense", batch=16, split=None, compiled=None, rate=0.0, **arguments):
    keras.utils.set_random_seed(0)
    model, norm = normalised(kind, **arguments)
    model.compile(optimizer=keras.optimizers.SGD(rate), loss="mse", **(compiled or {}))
    if micro:
        keras_ga.split_batches(model, micro, **(split or {}))
    x = X if kind == "dense" else IMAGES
    model.fit(x, Y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return norm, model


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_the_first_layer_has_the_batchs_statistics(kind, mode):
    arguments = {"kind": kind, "momentum": 0.9, "compiled": MODES[mode]}
    whole, split = (trained(micro, **arguments)[0] for micro in (None, 5))
    statistics = [(n.moving_mean, n.moving_variance) for n in (split, whole)]
    assert_close(values(statistics[0]), values(statistics[1]))
    assert split.momentum == 0.9
    micro = trained(5, **arguments, split={"batch_norm": "micro"})[0]
    assert_differ(values([micro.moving_variance]), values([whole.moving_variance]), 1e-2)


def test_micro_is_a_small_batch():
    """At learning rate 0, statistics and seeds are bit for bit those of fit(batch_size=4)."""
    results = []
    for micro, batch in ((4, 16), (None, 4)):
        keras.utils.set_random_seed(0)
        model, _ = normalised(momentum=0.9)
        model.add(keras.layers.Dropout(0.5))
        model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
        if micro:
            keras_ga.split_batches(model, micro, batch_norm="micro")
        history = model.fit(X, Y, batch_size=batch, shuffle=False, verbose=0)
        results.append((values(model.non_trainable_variables), history.history["loss"]))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        # XLA fuses what comes after the statistics differently.
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-6)


def test_momentum_is_read_at_each_compile_and_left_as_it_was():
    norm, model = trained(5, momentum=0.9)
    before = values([norm.moving_mean])
    norm.momentum = 1.0
    model.compile(optimizer="sgd", loss="mse")
    model.fit(X, Y, verbose=0)
    assert_equal(values([norm.moving_mean]), before)
    assert norm.momentum == 1.0


def test_frozen_layers_stay():
    norm, _ = trained(5, momentum=0.9, trainable=False)
    assert_equal(values([norm.moving_mean, norm.moving_variance]), [np.zeros(5), np.ones(5)])


def test_a_layer_that_is_called_twice_moves_with_each_micro_batch():
    def model():
        keras.utils.set_random_seed(0)
        inputs, norm = keras.Input((6,)), keras.layers.BatchNormalization(momentum=0.9)
        outputs = keras.layers.Dense(3)(norm(norm(inputs)))
        model = keras.Model(inputs, outputs)
        model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
        return model, norm

    split, pooled = model()
    keras_ga.split_batches(split, 4)
    small, stock = model()
    for each, batch in ((split, 16), (small, 4)):
        each.fit(X, Y, batch_size=batch, shuffle=False, verbose=0)
    assert_close(values(pooled.non_trainable_variables), values(stock.non_trainable_variables))


def test_dropout_draws_new_masks_for_each_micro_batch():
    keras.utils.set_random_seed(0)
    dropout = keras.layers.Dropout(0.5, seed=3)
    model = keras.Sequential([keras.Input((6,)), dropout, keras.layers.Dense(3)])
    model.compile(optimizer="sgd", loss="mse")
    keras_ga.split_batches(model, 4)
    before = values([dropout.seed_generator.state])[0]
    model.fit(X[:16], Y[:16], batch_size=16, verbose=0)
    after = values([dropout.seed_generator.state])[0]
    assert (after - before).tolist() == [0, 4]
