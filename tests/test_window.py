"""The contract of a window, against a twin in NumPy, over random sequences of everything."""

import warnings

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import BACKEND, accumulating, held, values
from twin import Twin

from keras_ga.window import accumulator_dtype, admit, weighted

SHAPES = [(2, 3), (4,), ()]


@st.composite
def gradients(draw):
    """A gradient for each variable, or None; sometimes with a NaN or inf in it."""
    special = draw(st.sampled_from([None] * 6 + [np.nan, np.inf]))
    result = []
    for shape in SHAPES:
        if draw(st.integers(0, 4)) == 0:
            result.append(None)
            continue
        numbers = st.integers(-8, 8).map(lambda n: n / 4)
        size = int(np.prod(shape))
        flat = np.array(draw(st.lists(numbers, min_size=size, max_size=size)), "float32")
        if special is not None:
            flat[0] = special
        result.append(flat.reshape(shape))
    if all(gradient is None for gradient in result):
        result[0] = np.ones(SHAPES[0], "float32")
    return result


weights = st.sampled_from([None, None, 0, 0.0, 1, 2.5, 7])
actions = st.one_of(
    st.tuples(st.just("apply"), gradients(), weights),
    st.tuples(st.just("apply"), gradients(), weights),
    st.tuples(st.just("apply"), gradients(), weights),
    st.tuples(st.sampled_from(["flush", "reset", "save and load"])),
    st.tuples(st.just("set"), st.integers(1, 4)),
)


def fresh(steps, **arguments):
    optimizer = accumulating(keras.optimizers.SGD(0.5, momentum=0.5), steps, **arguments)
    variables = [keras.Variable(np.ones(shape, "float32")) for shape in SHAPES]
    optimizer.build(variables)
    return optimizer, variables


def moved(optimizer, variables, steps, **arguments):
    """The same state in new objects, through what a checkpoint stores."""
    saved = {}, {}
    optimizer.save_own_variables(saved[0])
    optimizer.inner_optimizer.save_own_variables(saved[1])
    again, new_variables = fresh(steps, **arguments)
    # What a file's keys look like: arrays that know their shape.
    again.load_own_variables({name: np.asarray(value) for name, value in saved[0].items()})
    again.inner_optimizer.load_own_variables(saved[1])
    for new, old in zip(new_variables, values(variables), strict=True):
        new.assign(old)
    return again, new_variables


@pytest.mark.quick
@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    sequence=st.lists(actions, min_size=1, max_size=12),
    steps=st.integers(2, 4),
    reduction=st.sampled_from(["mean", "sum"]),
    nonfinite=st.sampled_from(["propagate", "drop"]),
)
@example(
    sequence=[("apply", [np.ones(s, "float32") for s in SHAPES], None)] * 5,
    steps=2,
    reduction="mean",
    nonfinite="propagate",
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.filterwarnings("ignore:invalid value|overflow:RuntimeWarning")
def test_any_sequence_does_what_the_twin_does(sequence, steps, reduction, nonfinite):
    arguments = {"reduction": reduction, "nonfinite": nonfinite}
    optimizer, variables = fresh(steps, **arguments)
    twin = Twin([np.ones(shape) for shape in SHAPES], steps, **arguments)
    for action, *operands in sequence:
        if action == "apply":
            grads, weight = operands
            tensors = [None if g is None else keras.ops.convert_to_tensor(g) for g in grads]
            optimizer.apply(tensors, variables, weight=weight)
            with np.errstate(all="ignore"):
                twin.apply(grads, weight)
        elif action == "flush":
            optimizer.flush()
            with np.errstate(all="ignore"):
                twin.close()
        elif action == "reset":
            optimizer.reset_window()
            twin.reset()
        elif action == "set":
            optimizer.accumulation_steps = twin.steps = operands[0]
        else:
            optimizer, variables = moved(optimizer, variables, steps, **arguments)
            optimizer.accumulation_steps = twin.steps
        assert int(optimizer.pending) == twin.pending
        assert int(optimizer.iterations) == twin.updates
        assert int(optimizer.micro_steps) == twin.micro_steps
        assert int(optimizer.dropped_micro_steps) == twin.dropped
        assert int(optimizer.skipped_updates) == twin.skipped
        if action == "apply":
            assert bool(optimizer.has_updated) == twin.has_updated
        for value, expected in zip(values(variables), twin.weights, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


def test_512_ones_in_bfloat16_are_512():
    optimizer = accumulating(keras.optimizers.SGD(1.0), 512, reduction="sum")
    variable = keras.Variable(np.zeros(3), dtype="bfloat16")
    one = keras.ops.ones((3,), dtype="bfloat16")
    for _ in range(512):
        optimizer.apply([one], [variable])
    np.testing.assert_array_equal(np.array(values([variable])[0], "float32"), [-512] * 3)


@pytest.mark.parametrize(
    ("dtype", "requested", "expected"),
    [
        ("float16", None, "float32"),
        ("bfloat16", None, "float32"),
        ("float32", None, "float32"),
        ("float64", None, "float64"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "float16", "float16"),
    ],
)
def test_accumulator_dtype(dtype, requested, expected):
    if BACKEND == "jax" and dtype == "float64":
        pytest.skip("JAX has float64 only where it is switched on")
    variable = keras.Variable(np.zeros(2), dtype=dtype)
    assert accumulator_dtype(variable, requested) == expected
    optimizer = accumulating(keras.optimizers.SGD(1.0), accumulator_dtype=requested)
    optimizer.build([variable])
    assert optimizer._window.accumulators[0].dtype == expected


def test_the_plain_case_looks_at_nothing():
    optimizer, _ = fresh(2)
    admission = admit([keras.ops.ones((2,))], None, optimizer._window)
    assert admission == (None, None, None)
    gradient = keras.ops.ones((2,))
    assert weighted(gradient, admission, "float32") is gradient


def test_a_weightless_nan_leaves_nothing_behind():
    optimizer, variables = fresh(2)
    bad = [keras.ops.full(shape, float("nan")) for shape in SHAPES]
    good = [keras.ops.ones(shape) for shape in SHAPES]
    optimizer.apply(bad, variables, weight=0.0)
    optimizer.apply(good, variables, weight=3.0)
    for value in values(variables):
        np.testing.assert_allclose(value, 0.5)


def test_the_window_after_a_nan_is_clean():
    optimizer, variables = fresh(2)
    bad = [keras.ops.full(shape, float("nan")) for shape in SHAPES]
    good = [keras.ops.ones(shape) for shape in SHAPES]
    for gradients_ in (good, bad):
        optimizer.apply(gradients_, variables)
    assert all(np.isnan(value).all() for value in values(variables))
    assert not any(np.isnan(total).any() for total in held(optimizer))
    optimizer.apply(good, variables)
    assert not any(np.isnan(total).any() for total in values(optimizer._window.accumulators))


def test_a_variable_without_gradients_is_left_to_the_inner_optimizer_as_none():
    # With weight decay a zero gradient would shrink it; None must not.
    optimizer = accumulating(keras.optimizers.SGD(0.5, weight_decay=0.5), 2)
    used, unused = keras.Variable(np.ones(2)), keras.Variable(np.ones(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.apply([keras.ops.ones((2,)), None], [used, unused])
    assert any("Gradients do not exist" in str(w.message) for w in caught)
    np.testing.assert_array_equal(values([unused])[0], [1, 1])
    assert values([used])[0][0] < 0.6
