"""What others get wrong, each as a table of what must be seen, update by update."""

import keras
import numpy as np
import pytest
from support import N, accumulating, values

pytestmark = pytest.mark.quick


def run(inner, gradients, *, start=1.0, steps=N, constraint=None):
    """The variable after every micro-step, from the given gradients in turn."""
    variable = keras.Variable(np.full(2, start, "float32"))
    variable.constraint = constraint
    optimizer = accumulating(inner, steps)
    seen = []
    for gradient in gradients:
        optimizer.apply([keras.ops.full((2,), float(gradient))], [variable])
        seen.append(float(values([variable])[0][0]))
    return seen


class Recording(keras.optimizers.schedules.LearningRateSchedule):
    """Remembers the steps it is asked for."""

    def __init__(self):
        self.steps = []

    def __call__(self, step):
        self.steps.append(int(step))
        return 0.0


def test_schedules_count_updates():
    # keras#20062 and others: the built-in counts micro-steps.
    schedule = Recording()
    run(keras.optimizers.SGD(schedule), [1.0] * (3 * N))
    assert sorted(set(schedule.steps)) == [0, 1, 2]


def test_weight_decay_happens_once_per_update():
    seen = run(keras.optimizers.SGD(0.5, weight_decay=0.5), [0.0] * (2 * N))
    np.testing.assert_allclose(seen, [1, 1, 1, 0.75, 0.75, 0.75, 0.75, 0.5625])


def test_averages_move_once_per_update():
    inner = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    run(inner, [1.0] * (2 * N), start=0.0)
    # The first update sets the average to the weight (-1), the second moves it half-way to -2.
    np.testing.assert_allclose(values(inner._model_variables_moving_average)[0], [-1.5, -1.5])


def test_the_average_replaces_the_weights_at_updates_only():
    inner = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
    seen = run(inner, [1.0] * (2 * N), start=0.0)
    np.testing.assert_allclose(seen, [0, 0, 0, -1, -1, -1, -1, -1.5])


def test_constraints_act_once_per_update():
    class Halving(keras.constraints.Constraint):
        def __call__(self, w):
            return w / 2

    seen = run(keras.optimizers.SGD(0.0), [1.0] * (2 * N), constraint=Halving())
    np.testing.assert_allclose(seen, [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25])


def test_momentum_with_a_constant_gradient():
    seen = run(keras.optimizers.SGD(1.0, momentum=0.5), [1.0] * (2 * N), start=0.0)
    np.testing.assert_allclose(seen, [0, 0, 0, -1, -1, -1, -1, -2.5])


def test_bias_correction_counts_updates():
    # Adam's first two updates with a constant gradient are one learning rate each.
    seen = run(keras.optimizers.Adam(0.1, epsilon=1e-12), [3.0] * (2 * N), start=0.0)
    np.testing.assert_allclose(seen, [0, 0, 0, -0.1, -0.1, -0.1, -0.1, -0.2], rtol=1e-5)


def test_clipping_acts_on_the_window():
    norm = np.sqrt(2.0)
    seen = run(keras.optimizers.SGD(1.0, clipnorm=norm), [8.0, 0, 0, 0], start=0.0)
    np.testing.assert_allclose(seen[-1], -1.0, rtol=1e-6)  # mean 2, norm 2 sqrt(2), clipped to 1
    seen = run(keras.optimizers.SGD(1.0, clipnorm=norm), [8.0, -8.0, 1.0, 1.0], start=0.0)
    np.testing.assert_allclose(seen[-1], -0.5, rtol=1e-6)  # mean 0.5: nothing to clip


@pytest.mark.parametrize("order", [[1, 2, 4, 8], [8, 4, 2, 1], [2, 8, 1, 4]])
def test_the_order_of_micro_batches_does_not_matter(order):
    assert run(keras.optimizers.SGD(1.0), order, start=0.0)[-1] == -3.75


@pytest.mark.parametrize("zeroed", range(N))
def test_every_micro_batch_counts(zeroed):
    gradients = [1.0, 2.0, 4.0, 8.0]
    gradients[zeroed] = 0.0
    assert run(keras.optimizers.SGD(1.0), gradients, start=0.0)[-1] != -3.75


def test_a_learning_rate_set_in_mid_window_holds_for_its_update():
    inner = keras.optimizers.SGD(1.0)
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = accumulating(inner)
    for step in range(N):
        if step == 2:
            optimizer.learning_rate = 0.5
        optimizer.apply([keras.ops.ones((2,))], [variable])
    np.testing.assert_allclose(values([variable])[0], -0.5)
