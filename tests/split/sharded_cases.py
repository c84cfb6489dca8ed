"""Split batches under `keras.distribution`: run by `test_devices.py`, in a process of its own."""

import keras
import numpy as np
import pytest
from support import assert_close, values

import keras_ga

ROWS, BATCH, MICRO = 48, 24, 4  # 6 rows of a batch on each of 4 devices: 4 and 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 6)).astype("float32")
Y = RNG.normal(size=(ROWS, 4)).astype("float32")
WEIGHTS = RNG.uniform(0, 2, ROWS).astype("float32")


def data_parallel():
    return keras.distribution.DataParallel(auto_shard_dataset=False)


def model_parallel():
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"])
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*wide/kernel"] = (None, "model")
    return keras.distribution.ModelParallel(
        layout_map=layout, batch_dim_name="batch", auto_shard_dataset=False
    )


DISTRIBUTIONS = {"none": lambda: None, "data": data_parallel, "model": model_parallel}


@pytest.fixture(autouse=True)
def _no_distribution_afterwards():
    yield
    keras.distribution.set_distribution(None)


def trained(distribution, micro):
    keras.distribution.set_distribution(DISTRIBUTIONS[distribution]())
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", name="wide"),
            keras.layers.BatchNormalization(momentum=0.9, trainable=micro != "frozen"),
            keras.layers.Dense(4),
        ]
    )
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.1)
    model.layers[1].trainable = False  # what it normalises by is another thing
    model.compile(optimizer=optimizer, loss=loss, metrics=["mae"])
    if micro:
        keras_ga.split_batches(model, micro)
    arguments = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    return model, model.fit(X, Y, sample_weight=WEIGHTS, **arguments).history


@pytest.mark.parametrize("micro", [MICRO, "auto"])
@pytest.mark.parametrize("distribution", ["data", "model"])
def test_equals_one_device_and_the_whole_batch(distribution, micro):
    whole, expected = trained("none", None)
    before = values(whole.trainable_variables)
    model, logs = trained(distribution, micro)
    assert_close(values(model.trainable_variables), before, 2e-6)
    for name, log in expected.items():
        np.testing.assert_allclose(logs[name], log, rtol=2e-6)
    layouts = " ".join(str(v.value.sharding.spec) for v in model.trainable_variables)
    assert ("model" in layouts) == (distribution == "model")


def test_rows_stay_on_their_devices():
    """A micro-batch is cut out of what each device has: nothing is gathered."""
    import jax

    keras.distribution.set_distribution(data_parallel())
    x = keras.distribution.distribute_tensor(
        X, keras.distribution.distribution().get_data_layout(X.shape)
    )
    from keras_ga.split import jax as split_jax

    cut = jax.jit(
        lambda x, start: split_jax._rows_from(x, start, size=2, shards=4),
        out_shardings=x.sharding,
    )
    text = cut.lower(x, 2).compile().as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text
    expected = X.reshape(4, 12, 6)[:, 2:4].reshape(8, 6)
    np.testing.assert_array_equal(np.asarray(cut(x, 2)), expected)
