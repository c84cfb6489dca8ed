"""Counting in updates: schedules of N, totals, scaled learning rates."""

import itertools

import keras
import numpy as np
import pytest
from support import accumulating, fitted

import keras_ga
from keras_ga.schedules import InMicroSteps, PiecewiseConstantSteps, ScaledSchedule

pytestmark = pytest.mark.quick


def test_piecewise_constant_steps_change_from_the_boundary_on():
    steps = PiecewiseConstantSteps([2, 5], [4, 2, 8])
    expected = [4, 4, 2, 2, 2, 8, 8]
    assert [steps(update) for update in range(7)] == expected
    tensors = [steps(keras.ops.convert_to_tensor(update)) for update in range(7)]
    assert [int(tensor) for tensor in tensors] == expected


def test_piecewise_constant_steps_in_fit():
    optimizer = accumulating(keras.optimizers.SGD(0.1), PiecewiseConstantSteps([1, 3], [1, 2, 3]))
    fitted(optimizer, 3, epochs=1)  # 12 micro-steps: 1, 2, 2, 3, 3, and one pending
    assert int(optimizer.iterations) == 5
    assert int(optimizer.pending) == 1
    assert optimizer.accumulation_steps == 3


def test_piecewise_constant_steps_round_trip():
    steps = PiecewiseConstantSteps([1, 3], [1, 2, 3])
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(steps))
    assert again.get_config() == steps.get_config() == {"boundaries": [1, 3], "values": [1, 2, 3]}
    optimizer = accumulating("sgd", steps)
    copy = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert [copy._schedule(update) for update in range(4)] == [1, 2, 2, 3]


@pytest.mark.parametrize(
    ("boundaries", "values", "error", "message"),
    [
        ([1], [1], ValueError, "must be one more than `boundaries`"),
        ([3, 1], [1, 2, 3], ValueError, "`boundaries` must increase"),
        ([2, 2], [1, 2, 3], ValueError, "`boundaries` must increase"),
        ([1], [1, 0], ValueError, "`values` must be an int >= 1"),
        ([0], [1, 2], ValueError, "`boundaries` must be an int >= 1"),
        ([1.5], [1, 2], TypeError, "`boundaries` must be an int >= 1"),
    ],
)
def test_piecewise_constant_steps_refuse(boundaries, values, error, message):
    with pytest.raises(error, match=message):
        PiecewiseConstantSteps(boundaries, values)


def counted(micro_steps, epochs, steps, partial_window):
    """The updates that an optimizer really makes."""
    optimizer = accumulating(keras.optimizers.SGD(0.0), steps)
    variable = keras.Variable(np.zeros(1, "float32"))
    one = keras.ops.ones((1,))
    for _ in range(epochs):
        for _ in range(micro_steps):
            optimizer.apply([one], [variable])
        if partial_window == "flush":
            optimizer.flush()
    return int(optimizer.iterations)


@pytest.mark.parametrize("partial_window", ["carry", "flush"])
def test_total_updates_agree_with_the_optimizer(partial_window):
    for micro_steps, steps, epochs in itertools.product(range(1, 8), range(1, 5), range(1, 4)):
        expected = counted(micro_steps, epochs, steps, partial_window)
        found = keras_ga.total_updates(micro_steps, epochs, steps, partial_window)
        assert found == expected, (micro_steps, steps, epochs)
        as_schedule = keras_ga.total_updates(
            micro_steps, epochs, lambda _, n=steps: n, partial_window
        )
        assert as_schedule == expected


@pytest.mark.parametrize("partial_window", ["carry", "flush"])
def test_total_updates_of_a_schedule(partial_window):
    steps = PiecewiseConstantSteps([1, 3], [1, 2, 3])
    found = keras_ga.total_updates(7, 3, steps, partial_window)
    assert found == counted(7, 3, steps, partial_window)


def test_total_updates_refuses():
    with pytest.raises(ValueError, match="`partial_window` must be 'carry' or 'flush'"):
        keras_ga.total_updates(1, 1, 1, "drop")
    with pytest.raises(TypeError, match="`epochs` must be an int >= 1"):
        keras_ga.total_updates(1, 1.5, 1)


def test_scale_learning_rate():
    assert keras_ga.scale_learning_rate(0.1, 4) == pytest.approx(0.4)
    assert keras_ga.scale_learning_rate(0.1, 4, "sqrt") == pytest.approx(0.2)
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    scaled = keras_ga.scale_learning_rate(decay, 4)
    assert float(scaled(2)) == pytest.approx(0.1)
    config = keras.optimizers.schedules.serialize(scaled)
    before = str(config)
    again = keras.optimizers.schedules.deserialize(config)
    assert isinstance(again, ScaledSchedule)
    assert str(config) == before
    assert float(again(2)) == pytest.approx(0.1)
    fitted(accumulating(keras.optimizers.SGD(scaled)), 3, epochs=1)


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf")])
def test_scale_learning_rate_refuses_factors_out_of_range(factor):
    with pytest.raises(ValueError, match="`factor` must be a number > 0"):
        keras_ga.scale_learning_rate(0.1, factor)


def test_scale_learning_rate_refuses_what_it_can_not_multiply():
    with pytest.raises(TypeError, match="`factor` must be a number > 0"):
        keras_ga.scale_learning_rate(0.1, "2")
    with pytest.raises(TypeError, match="`learning_rate` must be a float or a"):
        keras_ga.scale_learning_rate(lambda: 0.1, 2)
    with pytest.raises(ValueError, match="`rule` must be 'linear' or 'sqrt'"):
        keras_ga.scale_learning_rate(0.1, 2, "cubic")


def test_a_schedule_in_micro_steps():
    """Against what Keras's option asks its schedule with, read off as the way a weight goes."""
    decay = keras.optimizers.schedules.PolynomialDecay(1.0, 40, 0.0)
    schedule = InMicroSteps(decay, 8)
    rates = [float(schedule(update)) for update in range(5)]
    variable = keras.Variable(np.zeros(1, "float32"))
    builtin = keras.optimizers.SGD(decay, gradient_accumulation_steps=8)
    went = []
    for _ in range(5):
        before = keras.ops.convert_to_numpy(variable)[0]
        for _ in range(8):
            builtin.apply([keras.ops.ones((1,))], [variable])
        went.append(before - keras.ops.convert_to_numpy(variable)[0])
    np.testing.assert_allclose(rates, went, rtol=1e-5)
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert again.get_config() == schedule.get_config()
    with pytest.raises(ValueError, match="must be an int >= 1"):
        InMicroSteps(decay, 0)
