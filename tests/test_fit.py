"""`model.compile` and `model.fit` work unchanged, in every mode and for every kind of model."""

import functools

import keras
import numpy as np
import pytest
from support import (
    BACKEND,
    LARGE_BATCH,
    MICRO_BATCH,
    ROWS,
    N,
    accumulating,
    assert_close,
    assert_equal,
    dense_model,
    fitted,
    rows,
    values,
)

MODES = {
    "default": {},
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "steps_per_execution_3": {"steps_per_execution": 3},
    "steps_per_execution_4": {"steps_per_execution": 4},
    "steps_per_execution_5": {"steps_per_execution": 5},
    "xla_steps_per_execution_4": {"jit_compile": True, "steps_per_execution": 4},
}
if BACKEND == "torch":  # Keras refuses steps_per_execution there
    MODES = {name: mode for name, mode in MODES.items() if "steps_per_execution" not in mode}


def adam():
    return keras.optimizers.AdamW(0.02, weight_decay=0.1, global_clipnorm=0.2, use_ema=True)


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1)


def data_with_a_short_window():
    # 39 rows: the last window is short, and is carried into the next epoch.
    x, y = rows(ROWS + MICRO_BATCH + 1)
    return x[: ROWS + MICRO_BATCH], y[: ROWS + MICRO_BATCH]


@functools.cache  # the same for all modes
def weights_of_the_large_batch(make):
    x, y = data_with_a_short_window()
    stream = np.tile(np.arange(len(x)), 4)[: 4 * ROWS + LARGE_BATCH]
    large, _ = fitted(make(), LARGE_BATCH, data=(x[stream], y[stream]), epochs=1)
    return large.get_weights()


@pytest.mark.quick
@pytest.mark.parametrize("make", [adam, sgd])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_the_large_batch(mode, make):
    x, y = data_with_a_short_window()
    accumulated, _ = fitted(accumulating(make()), MICRO_BATCH, data=(x, y), epochs=4, **MODES[mode])
    optimizer = accumulated.optimizer
    assert int(optimizer.micro_steps) == 4 * 13
    assert int(optimizer.iterations) == 13
    assert int(optimizer.pending) == 0
    # XLA orders sums differently from the graph that the large batch ran in.
    assert_close(accumulated.get_weights(), weights_of_the_large_batch(make))


def nested_functional(seed=0):
    keras.utils.set_random_seed(seed)
    left, right = keras.Input((5,), name="left"), keras.Input((5,), name="right")
    shared = keras.layers.Dense(6, activation="tanh", name="shared")
    tower = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, activation="tanh")])
    merged = keras.layers.add([tower(shared(left)), tower(shared(right))])
    outputs = {
        "first": keras.layers.Dense(3, name="first")(merged),
        "second": keras.layers.Dense(1, name="second")(merged),
    }
    return keras.Model({"left": left, "right": right}, outputs)


class Subclassed(keras.Model):
    """Layers in lists and dicts, one of them called twice, with losses of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = [keras.layers.Dense(5, activation="tanh") for _ in range(2)]
        self.heads = {"out": keras.layers.Dense(3, activity_regularizer="l2")}

    def call(self, inputs):
        x = self.blocks[0](inputs)
        x = self.blocks[1](x) + self.blocks[1](inputs)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return self.heads["out"](x)


def subclassed():
    keras.utils.set_random_seed(0)
    return Subclassed()


def test_functional_with_several_inputs_and_outputs():
    x, y = rows()
    inputs = {"left": x, "right": x[::-1].copy()}
    targets = {"first": y, "second": y[:, :1]}
    results = []
    for optimizer, size in ((adam(), LARGE_BATCH), (accumulating(adam()), MICRO_BATCH)):
        model, _ = fitted(
            optimizer,
            size,
            make_model=nested_functional,
            data=(inputs, targets),
            loss={"first": "mse", "second": "mae"},
            loss_weights={"first": 1.0, "second": 0.3},
        )
        results.append(model.get_weights())
    assert_close(results[1], results[0])


def test_subclassed_with_shared_layers_and_added_losses():
    large, _ = fitted(sgd(), LARGE_BATCH, make_model=subclassed)
    accumulated, _ = fitted(accumulating(sgd()), MICRO_BATCH, make_model=subclassed)
    assert_close(accumulated.get_weights(), large.get_weights())


def test_frozen_layers_get_no_accumulator_and_do_not_move():
    def half_frozen():
        model = dense_model()
        model.layers[0].trainable = False
        return model

    large, _ = fitted(adam(), LARGE_BATCH, make_model=half_frozen)
    accumulated, _ = fitted(accumulating(adam()), MICRO_BATCH, make_model=half_frozen)
    assert_close(accumulated.get_weights(), large.get_weights())
    assert_equal(accumulated.layers[0].get_weights(), half_frozen().layers[0].get_weights())
    names = [v.name for v in accumulated.optimizer.variables if "accumulator" in v.name]
    assert len(names) == 2


def test_train_on_batch():
    x, y = rows()
    large, _ = fitted(sgd(), LARGE_BATCH, epochs=1)
    model = dense_model()
    model.compile(optimizer=accumulating(sgd()), loss="mse")
    for start in range(0, ROWS, MICRO_BATCH):
        model.train_on_batch(x[start : start + MICRO_BATCH], y[start : start + MICRO_BATCH])
    assert_close(model.get_weights(), large.get_weights())


def test_held_micro_steps_change_nothing_else():
    x, y = rows()
    model = dense_model()
    inner = keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9),
        weight_decay=0.3,
        use_ema=True,
        ema_overwrite_frequency=1,
    )
    optimizer = accumulating(inner)
    model.compile(optimizer=optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    updates = []
    for step in range(2 * N + 1):
        before = model.get_weights() + values(inner.variables)
        rows_of_step = slice(step * MICRO_BATCH, (step + 1) * MICRO_BATCH)
        model.train_on_batch(x[rows_of_step], y[rows_of_step])
        after = model.get_weights() + values(inner.variables)
        same = all(np.array_equal(a, b) for a, b in zip(after, before, strict=True))
        updates.append(not same)
        assert bool(optimizer.has_updated) == (not same)
    assert updates == [False, False, False, True, False, False, False, True, False]
    assert int(optimizer.micro_steps) == 9
    assert int(optimizer.pending) == 1


def test_no_variable_is_made_after_build():
    model, _ = fitted(accumulating(adam()), MICRO_BATCH, epochs=1)
    before = [id(variable) for variable in model.optimizer.variables]
    model.fit(*rows(), batch_size=MICRO_BATCH, epochs=2, verbose=0)
    assert [id(variable) for variable in model.optimizer.variables] == before


def test_a_second_fit_with_averages():
    # Bare Keras 3.15 dies here on JAX: "Attempt to donate the same buffer twice".
    model, _ = fitted(accumulating(adam()), MICRO_BATCH, epochs=1)
    model.fit(*rows(), batch_size=MICRO_BATCH, epochs=2, verbose=0)
    averages = values(model.optimizer.inner_optimizer._model_variables_moving_average)
    assert_equal(model.get_weights(), averages)


def test_variables_have_paths_of_their_own():
    class Twins(keras.Model):
        def __init__(self):
            super().__init__(name="twins")
            self.a = keras.layers.Dense(3, name="same")
            self.b = keras.layers.Dense(3, name="same")

        def call(self, inputs):
            return self.a(inputs) + self.b(inputs)

    model = Twins()
    model.compile(optimizer=accumulating(keras.optimizers.SGD(0.1)), loss="mse")
    model.fit(*rows(), batch_size=MICRO_BATCH, epochs=1, verbose=0)
    paths = [variable.path for variable in model.optimizer._variables]
    assert len(set(paths)) == len(paths)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="traces are TensorFlow's")
def test_one_trace_for_a_whole_fit():
    model = dense_model()
    traces = []

    class Traced(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            traces.append(1)
            super().apply(grads, trainable_variables)

    model.compile(optimizer=accumulating(Traced(0.1)), loss="mse")
    optimizer = model.optimizer
    for steps in (4, 2, 3):
        optimizer.accumulation_steps = steps
        model.fit(*rows(), batch_size=MICRO_BATCH, epochs=3, verbose=0)
    # Keras's own first call of the step traces twice where variables are made in it.
    assert len(traces) <= 2
    assert int(optimizer.iterations) == 9 + 18 + 12


def test_after_an_interrupt_the_open_window_goes_on():
    """As after pressing stop in a notebook."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                raise KeyboardInterrupt

    x, y = rows()
    model = dense_model()
    model.compile(optimizer=accumulating(sgd()), loss="mse")
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=MICRO_BATCH, shuffle=False, verbose=0, callbacks=[Stop()])
    done = 5 * MICRO_BATCH
    model.fit(x[done:], y[done:], batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    large, _ = fitted(sgd(), LARGE_BATCH, epochs=1)
    assert_close(model.get_weights(), large.get_weights())


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.skipif(BACKEND != "tensorflow", reason="tf.data of unknown size ends in a failed step")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_counters_do_not_slip_at_the_end_of_a_dataset_of_unknown_size(jit_compile):
    # Bare Keras counts 39 iterations here: one too many per epoch.
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(rows()).batch(MICRO_BATCH)
    dataset = dataset.filter(lambda x, y: True)
    model = dense_model()
    model.compile(optimizer=accumulating(sgd()), loss="mse", jit_compile=jit_compile)
    model.fit(dataset, epochs=3, shuffle=False, verbose=0)
    optimizer = model.optimizer
    assert (int(optimizer.micro_steps), int(optimizer.iterations)) == (36, 9)
    assert int(optimizer.pending) == 0
    large, _ = fitted(sgd(), LARGE_BATCH)
    assert_close(model.get_weights(), large.get_weights())


@pytest.mark.skipif(BACKEND != "jax", reason="compilations are JAX's")
def test_one_compilation_for_a_whole_fit():
    model = dense_model()
    model.compile(optimizer=accumulating(adam()), loss="mse")
    model.fit(*rows(), batch_size=MICRO_BATCH, epochs=1, verbose=0)
    compiled = model.train_function
    jitted = [
        c.cell_contents
        for c in compiled.__closure__ or ()
        if hasattr(c.cell_contents, "_cache_size")
    ]
    before = [f._cache_size() for f in jitted]
    assert before
    for steps in (2, 3, 4):
        model.optimizer.accumulation_steps = steps
        model.fit(*rows(), batch_size=MICRO_BATCH, epochs=2, verbose=0)
    assert [f._cache_size() for f in jitted] == before
