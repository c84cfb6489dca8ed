"""Training loops of one's own: weights, sparse gradients, missing gradients, on each backend."""

import keras
import numpy as np
import pytest
from support import (
    INNER,
    LARGE_BATCH,
    accumulating,
    assert_close,
    assert_differ,
    dense_model,
    fitted,
    gradients_of,
    micro_batches,
    rows,
    values,
)


@pytest.mark.parametrize("inner", INNER)
def test_eager_loop(inner):
    large, _ = fitted(INNER[inner](), LARGE_BATCH, epochs=1)
    model, optimizer = dense_model(), accumulating(INNER[inner]())
    for x, y in micro_batches(*rows()):
        optimizer.apply(gradients_of(model, x, y), model.trainable_variables)
    assert_close(model.get_weights(), large.get_weights())


@pytest.mark.parametrize("inner", INNER)
def test_unequal_micro_batches_weighted_by_their_rows(inner):
    sizes = [1, 5, 2, 4]
    x, y = rows(LARGE_BATCH)
    large, _ = fitted(INNER[inner](), LARGE_BATCH, data=(x, y), epochs=2)
    results = []
    for weighted in (True, False):
        model, optimizer = dense_model(), accumulating(INNER[inner]())
        for _ in range(2):
            start = 0
            for size in sizes:
                at = slice(start, start := start + size)
                gradients = gradients_of(model, x[at], y[at])
                weight = keras.ops.convert_to_tensor(float(size)) if weighted else None
                optimizer.apply(gradients, model.trainable_variables, weight=weight)
        results.append(model.get_weights())
    assert_close(results[0], large.get_weights())
    assert_differ(results[1], large.get_weights())


def test_sums_with_the_weight_one_are_sums():
    x, y = rows(LARGE_BATCH)
    large = dense_model()
    bare = keras.optimizers.SGD(0.01, momentum=0.9)
    bare.apply(gradients_of(large, x, y, reduce=keras.ops.sum), large.trainable_variables)
    model = dense_model()
    optimizer = accumulating(keras.optimizers.SGD(0.01, momentum=0.9), reduction="sum")
    for part in micro_batches(x, y):
        gradients = gradients_of(model, *part, reduce=keras.ops.sum)
        optimizer.apply(gradients, model.trainable_variables)
    assert_close(model.get_weights(), large.get_weights())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_at_one_accumulation_step(reduction):
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = accumulating(keras.optimizers.SGD(1.0), 1, reduction=reduction, nonfinite="drop")
    optimizer.apply([keras.ops.full((2,), 3.0)], [variable], weight=2.0)
    expected = -3.0 if reduction == "mean" else -6.0
    np.testing.assert_array_equal(values([variable])[0], expected)
    optimizer.apply([keras.ops.full((2,), 3.0)], [variable], weight=0.0)
    optimizer.apply([keras.ops.full((2,), float("inf"))], [variable])
    np.testing.assert_array_equal(values([variable])[0], expected)
    assert (int(optimizer.iterations), int(optimizer.skipped_updates)) == (1, 2)
    assert (int(optimizer.micro_steps), int(optimizer.dropped_micro_steps)) == (3, 1)
    assert not bool(optimizer.has_updated)


def test_two_models_with_a_wrapper_each():
    # As a GAN's two sides, in one loop.
    x, y = rows()
    models = [dense_model(seed=1), dense_model(seed=2)]
    wrappers = [accumulating(keras.optimizers.SGD(0.1), steps) for steps in (2, 3)]
    for batch in micro_batches(x, y):
        for model, optimizer in zip(models, wrappers, strict=True):
            optimizer.apply(gradients_of(model, *batch), model.trainable_variables)
    assert [int(optimizer.iterations) for optimizer in wrappers] == [6, 4]
    with pytest.raises(ValueError, match="per set of variables"):
        wrappers[0].apply(gradients_of(models[1], x, y), models[1].trainable_variables)


def test_variables_with_overwrite_with_gradient_take_the_largest():
    scale = keras.Variable(np.full(3, 7.0, "float32"))
    scale.overwrite_with_gradient = True
    weight = keras.Variable(np.zeros(2, "float32"))
    optimizer = accumulating(keras.optimizers.SGD(1.0), 2)
    seen = []
    for step in ([-3.0, -2.0, 1.0], [-4.0, 0.0, -1.0], [2.0, 2.0, 2.0], [1.0, 3.0, 2.0]):
        scales = keras.ops.convert_to_tensor(np.array(step, "float32"))
        optimizer.apply([scales, keras.ops.ones((2,))], [scale, weight])
        seen.append(values([scale])[0].tolist())
    assert seen == [[7, 7, 7], [-3, 0, 1], [-3, 0, 1], [2, 3, 2]]
    # A window in which none came leaves the variable as it is.
    for _ in range(2):
        optimizer.apply([None, keras.ops.ones((2,))], [scale, weight])
    assert values([scale])[0].tolist() == [2, 3, 2]
