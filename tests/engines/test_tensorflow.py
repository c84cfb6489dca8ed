"""The TensorFlow engine: tapes, functions, XLA, sparse gradients."""

import keras
import numpy as np
import pytest
from support import (
    BACKEND,
    INNER,
    LARGE_BATCH,
    accumulating,
    assert_close,
    dense_model,
    fitted,
    micro_batches,
    rows,
    values,
)

if BACKEND != "tensorflow":
    pytest.skip("needs the TensorFlow backend", allow_module_level=True)

import tensorflow as tf


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("inner", INNER)
def test_gradient_tape_inside_a_function(inner, jit_compile):
    large, _ = fitted(INNER[inner](), LARGE_BATCH, epochs=1)
    model, optimizer = dense_model(), accumulating(INNER[inner]())
    traces = []

    @tf.function(jit_compile=jit_compile)
    def step(x, y):
        traces.append(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.mean_squared_error(y, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return optimizer.has_updated

    optimizer.build(model.trainable_variables)
    updated = [bool(step(tf.constant(x), tf.constant(y))) for x, y in micro_batches(*rows())]
    assert updated == [False, False, False, True] * 3
    assert len(traces) == 1
    assert_close(model.get_weights(), large.get_weights())


@pytest.mark.parametrize("mode", ["graph", "xla", "eager"])
@pytest.mark.parametrize(("inner", "nonfinite"), [("sgd", "drop"), ("adam", "propagate")])
def test_sparse_gradients_sum_repeated_rows(mode, inner, nonfinite):
    def make_inner():
        return keras.optimizers.get({"class_name": inner, "config": {"learning_rate": 0.1}})

    ids = np.array([[1, 1, 2], [2, 2, 2], [0, 1, 5], [5, 5, 1]], "int32")

    def make_model():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(6, 4)])

    def gradients(model, ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(ids) - 1.0))
        return tape.gradient(loss, model.trainable_variables)

    model, optimizer = make_model(), accumulating(make_inner(), nonfinite=nonfinite)
    optimizer.build(model.trainable_variables)

    def step(ids):
        found = gradients(model, ids)
        assert isinstance(found[0], tf.IndexedSlices)
        optimizer.apply(found, model.trainable_variables, weight=2.0)

    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "xla")
    for _ in range(3):
        for row in ids:
            step(tf.constant(row[None]))
    # Keras squares repeated rows one by one in Adam's sparse path; the dense gradient is the truth.
    large, bare = make_model(), make_inner()
    for _ in range(3):
        dense = [tf.convert_to_tensor(g) for g in gradients(large, tf.constant(ids))]
        bare.apply(dense, large.trainable_variables)
    assert_close(model.get_weights(), large.get_weights())


@pytest.mark.parametrize("jit_compile", [False, True])
def test_flush_inside_a_function(jit_compile):
    variables = [keras.Variable(np.zeros(2, "float32")) for _ in range(2)]
    optimizer = accumulating(keras.optimizers.SGD(1.0))
    optimizer.build(variables)
    flush = tf.function(optimizer.flush, jit_compile=jit_compile)
    for gradient in (1.0, 3.0):
        optimizer.apply([tf.fill((2,), gradient)] * 2, variables)
    flush()
    flush()  # an empty window stays as it is
    assert values(variables)[0].tolist() == [-2.0, -2.0]
    assert (int(optimizer.iterations), int(optimizer.pending)) == (1, 0)


def test_a_weight_of_unknown_rank():
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = accumulating(keras.optimizers.SGD(1.0), 2)
    optimizer.build([variable])

    @tf.function(input_signature=[tf.TensorSpec(None, "float32")])
    def step(weight):
        optimizer.apply([tf.ones(2) * weight], [variable], weight=weight)

    step(1.0)
    step(3.0)
    assert values([variable])[0].tolist() == [-2.5, -2.5]


def test_a_strategy_that_it_was_not_built_under_is_refused():
    optimizer = accumulating(keras.optimizers.SGD(0.1))
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer.build([variable])
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    with strategy.scope(), pytest.raises(ValueError, match="must be built under the strategy"):
        optimizer.apply([tf.ones(2)], [variable])


def test_stateless_apply_is_refused_on_tensorflow():
    optimizer = accumulating(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="`stateless_apply` must not be called on TensorFlow"):
        optimizer.stateless_apply([], [], [])


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_gradient_that_only_another_trace_has_is_not_lost(jit_compile):
    def run(step, optimizer, variables):
        for flags in ([True, False], [False, False], [False, True], [False, False]):
            for both in flags:
                step(both)
        return values(variables)

    def made(compiled):
        variables = [keras.Variable(np.ones(2, "float32")) for _ in range(3)]
        optimizer = accumulating(keras.optimizers.SGD(0.5, momentum=0.5, weight_decay=0.1), 2)
        optimizer.build(variables)

        def step(both):
            second = tf.fill((2,), 3.0) if both else None
            optimizer.apply([tf.ones(2), second, None], variables)

        if compiled:
            step = tf.function(step, jit_compile=jit_compile)
        return run(step, optimizer, variables)

    assert_close(made(compiled=True), made(compiled=False))
