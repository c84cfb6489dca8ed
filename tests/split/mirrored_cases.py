"""Split batches on two replicas: run by `test_devices.py`, in a process of its own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)

from support import accumulating, assert_close, values  # noqa: E402

import keras_ga  # noqa: E402

STRATEGY = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
ROWS, BATCH, MICRO = 32, 16, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 6)).astype("float32")
Y = RNG.normal(size=(ROWS, 3)).astype("float32")
TOKENS = RNG.integers(1, 9, (ROWS, 5)) * (np.arange(5) < RNG.integers(1, 6, (ROWS, 1)))


def mlp():
    regularizer = keras.regularizers.L2(0.05)
    hidden = keras.layers.Dense(7, activation="tanh", kernel_regularizer=regularizer)
    return keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(3)])


def tagger():
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
    tags = keras.layers.Dense(9, name="tags")(keras.layers.Dense(6, activation="tanh")(x))
    score = keras.layers.Dense(1, name="score")(keras.layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, [tags, score])


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


class Dense(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        super().apply([tf.convert_to_tensor(g) for g in grads], trainable_variables)


def trained(micro, *, make_model=mlp, data=(X, Y), optimizer=momentum, strategy=STRATEGY, **more):
    keras.utils.set_random_seed(0)
    loss = more.pop("loss", "mse")
    batch_size = more.pop("batch_size", BATCH)
    with strategy.scope():
        model = make_model()
        model.compile(optimizer=optimizer(), loss=loss, **more)
    if micro:
        keras_ga.split_batches(model, micro)
    fit = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
    return model, model.fit(*data, **fit).history


def assert_same(split, whole):
    (model, logs), (other, expected) = split, whole
    assert_close(values(model.trainable_variables), values(other.trainable_variables))
    assert int(model.optimizer.iterations.numpy()) == int(other.optimizer.iterations.numpy())
    for name, log in expected.items():
        np.testing.assert_allclose(logs[name], log, rtol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    "optimizer", [momentum, lambda: keras.optimizers.AdamW(0.02, global_clipnorm=0.1)]
)
def test_equals_the_whole_batch(optimizer):
    arguments = {"optimizer": optimizer, "metrics": ["mae"]}
    assert_same(trained(MICRO, **arguments), trained(None, **arguments))


def test_each_replica_has_its_own_divisors():
    loss = {"tags": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "score": "mse"}
    arguments = {"make_model": tagger, "data": (TOKENS, [TOKENS, Y[:, :1]])}
    arguments |= {"loss": list(loss.values()), "optimizer": lambda: Dense(0.05)}
    assert_same(trained(MICRO, **arguments), trained(None, **arguments))


@pytest.mark.parametrize("rows", [ROWS + 1, ROWS + 7])
def test_a_last_batch_that_replicas_share_unequally(rows):
    """Of one row a replica gets none; its regularisers count all the same."""
    x, y = np.resize(X, (rows, 6)), np.resize(Y, (rows, 3))
    assert_same(trained(MICRO, data=(x, y)), trained(None, data=(x, y)))


def test_reduces_once_per_batch():
    class Counting(tf.distribute.CrossDeviceOps):
        def __init__(self):
            super().__init__()
            self._ops = tf.distribute.ReductionToOneDevice()
            self.reduced = 0

        def reduce_implementation(self, *arguments, **named):
            return self._ops.reduce_implementation(*arguments, **named)

        def batch_reduce_implementation(self, reduce_op, pairs, options):
            self.reduced += 1
            return self._ops.batch_reduce_implementation(reduce_op, pairs, options)

        def broadcast_implementation(self, tensor, destinations):
            return self._ops.broadcast_implementation(tensor, destinations)

    counting = Counting()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=counting)
    trained(MICRO, strategy=strategy)
    # In the two traces that TensorFlow makes of the update; none in those of micro-steps.
    assert counting.reduced == 2


def test_windows_of_split_batches():
    large = trained(None, batch_size=ROWS, strategy=tf.distribute.get_strategy())[0]
    windows = trained(MICRO, optimizer=lambda: accumulating(momentum(), 2))[0]
    assert_close(values(windows.trainable_variables), values(large.trainable_variables))
    assert int(windows.optimizer.iterations.numpy()) == 2


def test_a_size_is_found():
    model, _ = trained("auto")
    assert_close(values(model.trainable_variables), values(trained(None)[0].trainable_variables))
