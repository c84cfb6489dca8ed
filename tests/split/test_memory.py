"""`micro_batch_size="auto"`: sizes that are planned or tried, and nothing lost on the way."""

import logging

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, assert_equal, values
from support_split import BATCH, data

import keras_ga
from keras_ga.split import memory

X, Y = data(2 * BATCH)


class Hungry(keras.layers.Layer):
    """Asks for more memory than any machine has if it gets more than `limit` numbers."""

    limit = None

    def call(self, inputs):
        if self.limit is None:
            return inputs
        if BACKEND == "tensorflow":  # where a trace may serve several lengths
            import tensorflow as tf

            count = tf.where(tf.size(inputs) > self.limit, tf.constant(2**46, "int64"), 1)
            return inputs + 0 * tf.reduce_max(tf.fill([count], tf.reduce_max(inputs)))
        if ops.size(inputs) <= self.limit:
            return inputs
        numbers = ops.arange(2**23, dtype="float32")
        waves = ops.sin(numbers[None] * numbers[:, None] + ops.stop_gradient(ops.max(inputs)))
        # 2**46 numbers, in an order that no compiler can see through.
        return inputs + 0 * ops.max(ops.sort(waves, axis=0))


def model(limit=None):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((6,)), keras.layers.Dense(7), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dropout(0.3, seed=7), keras.layers.Dense(3)]
    layers += [] if limit is None else [Hungry(name="hungry")]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.Adam(0.02)
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    # Makes losses and metrics, which torch does with numbers.
    model.evaluate(X[:BATCH], Y[:BATCH], verbose=0)
    if limit is not None:
        model.get_layer("hungry").limit = limit
    return model


def everything(model):
    return values([*model.variables, *model.optimizer.variables, *model.metrics_variables])


def fit(model, **arguments):
    arguments = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **arguments}
    history = model.fit(X, Y, **arguments)
    return history.history


def logged(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "keras_ga"]


def step_of(model):
    """The backend's part of a split model's train step."""
    for cell in model.train_function.__closure__:
        if hasattr(cell.cell_contents, "backend"):
            return cell.cell_contents
    raise AssertionError


OUT_OF_MEMORY = {
    "tensorflow": lambda: __import__("tensorflow").errors.ResourceExhaustedError(
        None, None, "OOM when allocating tensor with shape[1]"
    ),
    "jax": lambda: RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes."),
    "torch": lambda: __import__("torch").OutOfMemoryError("CUDA out of memory."),
}[BACKEND]


def fail_at(model, monkeypatch, *calls, error=OUT_OF_MEMORY):
    """Lets the micro-steps of these numbers run and then fail."""
    backend = step_of(model).backend
    count, micro_step = iter(range(10**6)), backend.micro_step

    def failing(*arguments):
        carry = micro_step(*arguments)
        if next(count) in calls:
            raise error()
        return carry

    monkeypatch.setattr(backend, "micro_step", failing)


@pytest.mark.parametrize("at", range(4))
def test_a_step_that_fails_has_changed_nothing(at, monkeypatch):
    trained = model()
    keras_ga.split_batches(trained, 2)
    fit(trained)
    before = everything(trained)
    fail_at(trained, monkeypatch, at)
    with pytest.raises(Exception, match=r"(?i)out of memory|OOM"):
        trained.fit(X[:BATCH], Y[:BATCH], batch_size=BATCH, verbose=0)
    # `fit` has reset the metrics before the step, as it does.
    trained.reset_metrics()
    unbroken = model()
    keras_ga.split_batches(unbroken, 2)
    fit(unbroken)
    unbroken.reset_metrics()
    assert_equal(everything(trained), everything(unbroken))
    assert len(before) == len(everything(trained))
    monkeypatch.undo()
    fit(trained)
    fit(unbroken)
    assert_equal(everything(trained), everything(unbroken))


@pytest.mark.parametrize("at", [(0,), (1,), (0, 2)])
def test_halved_and_made_again_is_the_run_of_that_size(at, monkeypatch, caplog):
    """The first step at 8, then failing at these micro-steps: 8, 4 (and 2) rows."""
    size = {1: 4, 2: 2}[len(at)]
    if at == (1,):
        at = (0, 2)  # at 4 rows: the second of two fails
        size = 2
    found = model()
    keras_ga.split_batches(found, "auto")
    with caplog.at_level(logging.WARNING, "keras_ga"):
        found.train_on_batch(X[:BATCH], Y[:BATCH])
    given = model()
    keras_ga.split_batches(given, BATCH)
    given.train_on_batch(X[:BATCH], Y[:BATCH])
    assert_equal(everything(found), everything(given))
    fail_at(found, monkeypatch, *at)
    with caplog.at_level(logging.WARNING, "keras_ga"):
        history = fit(found)
    keras_ga.split_batches(given, size)
    assert fit(given) == history
    assert_equal(everything(found), everything(given))
    lines = logged(caplog)
    assert lines[0] == "micro_batch_size 8 -> 4: out of memory; the batch stays 8"
    assert len(lines) == len(at)
    assert int(found.optimizer.iterations) == 5


def test_real_out_of_memory_errors(caplog):
    """At 8 rows no machine has the memory; the run is that of 4."""
    found, given = model(limit=4 * 3), model(limit=4 * 3)
    keras_ga.split_batches(given, 4)
    keras_ga.split_batches(found, "auto")
    with caplog.at_level(logging.WARNING, "keras_ga"):
        history = fit(found)
    assert history == fit(given)
    assert_equal(everything(found), everything(given))
    assert logged(caplog)
    before = everything(found)
    keras_ga.split_batches(found, 8)
    with pytest.raises(Exception, match=r"(?i)memory|OOM") as error:
        found.train_on_batch(X[:BATCH], Y[:BATCH])
    assert memory.is_out_of_memory(error.value)
    found.reset_metrics()
    after = everything(found)
    given.reset_metrics()
    assert_equal(after[: len(before)], everything(given))


def test_one_row_that_does_not_fit_says_what_to_try():
    hopeless = model(limit=0)
    keras_ga.split_batches(hopeless, "auto")
    before = values(hopeless.trainable_variables)
    with pytest.raises(MemoryError, match=r"one row must fit.*mixed_bfloat16.*RematScope.*LoRA"):
        hopeless.train_on_batch(X[:1], Y[:1])
    assert_equal(values(hopeless.trainable_variables), before)


def test_other_errors_are_not_taken_for_it(monkeypatch):
    trained = model()
    keras_ga.split_batches(trained, "auto")
    fit(trained)
    fail_at(trained, monkeypatch, 0, error=lambda: ValueError("not that"))
    with pytest.raises(ValueError, match="not that"):
        fit(trained)


def test_a_longer_sequence_has_a_size_of_its_own(caplog):
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(BATCH, time, 2)).astype("float32") for time in (4, 16, 4)]

    def sequences(limit):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((None, 2))
        hungry = Hungry()
        x = hungry(keras.layers.Dense(3)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(x))
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
        model.evaluate(batches[0], batches[0][..., :1], verbose=0)
        hungry.limit = limit
        return model

    found, whole = sequences(8 * 3 * BATCH), sequences(None)
    keras_ga.split_batches(found, "auto")
    with caplog.at_level(logging.WARNING, "keras_ga"):
        for x in batches:
            for trained in (found, whole):
                trained.train_on_batch(x, x[..., :1])
    step = step_of(found)
    assert sorted(step.sizes._found.values()) == [4, 8]
    assert len(logged(caplog)) == 1
    for a, b in zip(
        values(found.trainable_variables), values(whole.trainable_variables), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def wide():
    keras.utils.set_random_seed(0)
    wide = keras.Sequential(
        [
            keras.Input((8,)),
            *(keras.layers.Dense(512, "tanh") for _ in range(4)),
            keras.layers.Dense(1),
        ]
    )
    wide.compile(optimizer="adam", loss="mse")
    return wide


def test_find_micro_batch_size(capsys):
    x, y = np.ones((4096, 8), "float32"), np.ones((4096, 1), "float32")
    planned = wide()
    before = values([*planned.variables])
    found = keras_ga.find_micro_batch_size(planned, x, y, batch_size=2048)
    assert found.micro_batch_size == 2048
    assert capsys.readouterr().out == f"{found}\n"
    assert_equal(values(planned.variables), before)
    if BACKEND != "jax":
        assert found.limit is None
        assert found.plan == ((2048, True, None),)
        return
    assert found.limit == memory.of_this_machine()
    (whole,) = found.plan
    # Weights, gradients and optimizer are 16 MiB; activations of 2048 rows are 16 MiB and more.
    limited = keras_ga.find_micro_batch_size(
        planned, x, y, batch_size=2048, memory_limit=2**24 + whole.bytes // 3
    )
    sizes = [trial.micro_batch_size for trial in limited.plan]
    assert sizes == [2048 >> i for i in range(len(sizes))]
    assert [trial.fits for trial in limited.plan] == [False] * (len(sizes) - 1) + [True]
    assert 1 < len(sizes) < 6
    needs = [trial.bytes for trial in limited.plan]
    assert needs == sorted(needs, reverse=True)
    assert planned.train_function is None


def test_find_by_trial_and_its_refusals():
    trained = model(limit=4 * 3)
    found = keras_ga.find_micro_batch_size(trained, X, Y, batch_size=BATCH)
    assert found.micro_batch_size == 4
    assert [trial.fits for trial in found.plan] == [False, True]
    with pytest.raises(ValueError, match="must have at least `batch_size` rows"):
        keras_ga.find_micro_batch_size(trained, X, Y, batch_size=10**6)
    with pytest.raises(ValueError, match="must be compiled"):
        keras_ga.find_micro_batch_size(keras.Sequential([keras.layers.Dense(1)]), X, Y)
    if BACKEND != "tensorflow":  # which waits for ten seconds on each failure
        with pytest.raises(MemoryError, match="one row must fit"):
            keras_ga.find_micro_batch_size(model(limit=0), X, Y, batch_size=1)


@pytest.mark.skipif(BACKEND != "torch", reason="elsewhere random numbers are a variable's")
def test_random_numbers_of_torch_itself_are_put_back(monkeypatch):
    def unseeded():
        keras.utils.set_random_seed(0)
        dropout = keras.layers.Dropout(0.5)
        model = keras.Sequential([keras.Input((6,)), dropout, keras.layers.Dense(3)])
        model.compile(optimizer="sgd", loss="mse")
        return model

    found, given = unseeded(), unseeded()
    keras_ga.split_batches(given, 4)
    keras_ga.split_batches(found, "auto")
    found.train_on_batch(X[:BATCH], Y[:BATCH])
    fail_at(found, monkeypatch, 0)
    results = []
    for model in (found, given):
        keras.utils.set_random_seed(1)
        model.set_weights(unseeded().get_weights())
        keras.utils.set_random_seed(1)
        results.append((model.train_on_batch(X[:BATCH], Y[:BATCH]), values(model.weights)))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


@pytest.mark.skipif(BACKEND != "jax", reason="only JAX tells what a step will take")
def test_planned_memory_falls_with_the_micro_batch():
    x, y = np.ones((2048, 8), "float32"), np.ones((2048, 1), "float32")
    planned = wide()
    needs = {}
    for size in (2048, 512, 128):
        # A limit nothing fits into shows what each size needs.
        found = keras_ga.find_micro_batch_size(planned, x, y, batch_size=size)
        needs[size] = found.plan[0].bytes
    # Beside the gradients, which are as large for any micro-batch (3.2 MiB).
    gradients = sum(int(np.prod(v.shape)) for v in planned.trainable_variables) * 4
    activations = {size: needed - gradients for size, needed in needs.items()}
    assert activations[512] < 0.4 * activations[2048]
    assert activations[128] < 0.2 * activations[2048]


@pytest.mark.skipif(BACKEND != "jax", reason="only JAX has processes that run one program")
def test_processes_must_not_find_sizes_each(monkeypatch):
    import jax

    split = model()
    keras_ga.split_batches(split, "auto")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="must be an int with several processes"):
        split.train_on_batch(X[:BATCH], Y[:BATCH])


def test_words_of_the_backends():
    for text in (
        "RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.",
        "INTERNAL: Error dispatching computation: Out of memory allocating 1 bytes",
        "OOM when allocating tensor with shape[1099511627776]",
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
    ):
        assert memory.is_out_of_memory(RuntimeError(text))
    assert memory.is_out_of_memory(MemoryError())
    assert not memory.is_out_of_memory(ValueError("Dimensions must be equal"))
    assert list(memory.halvings(20)) == [20, 10, 5, 3, 2, 1]
    assert list(memory.halvings(1)) == [1]
