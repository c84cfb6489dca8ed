"""What many tests need: small models, data, the bare optimizer on the large batch, comparison."""

import keras
import numpy as np

import keras_ga

BACKEND = keras.config.backend()
N = 4
MICRO_BATCH = 3
LARGE_BATCH = N * MICRO_BATCH
ROWS = 3 * LARGE_BATCH


def rows(count=ROWS, features=5, targets=3, seed=0):
    """Inputs and targets of a regression, `count` rows."""
    rng = np.random.default_rng(seed)
    dtype = keras.config.floatx()
    x = rng.normal(size=(count, features)).astype(dtype)
    y = rng.normal(size=(count, targets)).astype(dtype)
    return x, y


def dense_model(features=5, targets=3, seed=0, **dense_arguments):
    """Two layers; `dense_arguments` go to both (constraints, regularisers, dtype)."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.Dense(7, activation="tanh", **dense_arguments),
            keras.layers.Dense(targets, **dense_arguments),
        ]
    )


def fitted(
    optimizer, batch_size, *, make_model=dense_model, data=None, epochs=3, callbacks=(), **compile_
):
    """A model trained by `fit` in the order of the rows, and its history."""
    x, y = rows() if data is None else data
    model = make_model()
    model.compile(optimizer=optimizer, loss=compile_.pop("loss", "mse"), **compile_)
    history = model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return model, history.history


def accumulating(optimizer, accumulation_steps=N, **arguments):
    return keras_ga.GradientAccumulationOptimizer(optimizer, accumulation_steps, **arguments)


def values(variables):
    """NumPy copies of variables."""
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def held(optimizer):
    """What a wrapper's window holds, as a checkpoint would have it."""
    store = {}
    optimizer.save_own_variables(store)
    return [value for key, value in store.items() if key.startswith("accumulator_")]


def assert_equal(actual, expected):
    """Bit for bit: for what must not have changed."""
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


def assert_close(actual, expected, tolerance=1e-6):
    """To float rounding: the order of an addition differs, nothing else."""
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(
            a.astype("float64"), e.astype("float64"), rtol=tolerance, atol=tolerance
        )


def assert_differ(actual, expected, by=1e-4):
    """Guards a comparison: what is compared must be able to differ."""
    difference = max(np.abs(a - e).max() for a, e in zip(actual, expected, strict=True))
    assert difference > by, f"only {difference} apart"


# For loops of one's own.

INNER = {
    "adamw": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1, global_clipnorm=0.2),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1),
}


def micro_batches(x, y, size=MICRO_BATCH):
    for start in range(0, len(x), size):
        yield x[start : start + size], y[start : start + size]


def gradients_of(model, x, y, loss=keras.losses.mean_squared_error, reduce=keras.ops.mean):
    """The gradients of one micro-batch, computed eagerly on any backend."""
    x, y = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = reduce(loss(y, model(x, training=True)))
        return tape.gradient(value, model.trainable_variables)
    if BACKEND == "jax":
        import jax

        def of(trainable):
            out, _ = model.stateless_call(trainable, values_of(model.non_trainable_variables), x)
            return reduce(loss(y, out))

        return jax.grad(of)(values_of(model.trainable_variables))
    model.zero_grad()
    reduce(loss(y, model(x, training=True))).backward()
    return [variable.value.grad for variable in model.trainable_variables]


def values_of(variables):
    return [variable.value for variable in variables]
