"""Arguments, properties and refusals of the wrapper."""

import keras
import numpy as np
import pytest
from support import (
    LARGE_BATCH,
    MICRO_BATCH,
    N,
    accumulating,
    assert_close,
    assert_equal,
    dense_model,
    fitted,
    rows,
    values,
)

import keras_ga

pytestmark = pytest.mark.quick
Wrapper = keras_ga.GradientAccumulationOptimizer


def built(steps=N, shapes=((2,), (3,)), inner=None, **arguments):
    optimizer = Wrapper(inner or keras.optimizers.SGD(1.0), steps, **arguments)
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
    optimizer.build(variables)
    return optimizer, variables


def ones(variables):
    return [keras.ops.ones(variable.shape, variable.dtype) for variable in variables]


# What it takes.


@pytest.mark.parametrize(
    "optimizer",
    ["adam", {"class_name": "Adam", "config": {"learning_rate": 0.1}}, keras.optimizers.Adam(0.1)],
    ids=["name", "config", "instance"],
)
def test_wraps_an_instance_a_name_or_a_config(optimizer):
    assert isinstance(Wrapper(optimizer, 2).inner_optimizer, keras.optimizers.Adam)


@pytest.mark.parametrize("steps", [3, np.int64(3), np.int8(3)])
def test_takes_numpy_ints(steps):
    optimizer = Wrapper("sgd", steps)
    assert optimizer.accumulation_steps == 3
    assert type(optimizer.accumulation_steps) is int


@pytest.mark.parametrize("steps", [True, 2.5, 4.0, "4", None, [4], np.float32(4)])
def test_refuses_steps_that_are_no_int(steps):
    with pytest.raises(TypeError, match=r"`accumulation_steps` must be an int >= 1, because"):
        Wrapper("sgd", steps)
    with pytest.raises(TypeError, match=r"Received: accumulation_steps="):
        Wrapper("sgd", 2).accumulation_steps = steps


def test_refuses_steps_that_no_counter_holds():
    with pytest.raises(ValueError, match=r"must be below 2\*\*31"):
        Wrapper("sgd", 2**31)


@pytest.mark.parametrize(("steps", "error"), [(2.5, TypeError), (0, ValueError), (None, TypeError)])
def test_refuses_a_schedule_that_returns_no_steps(steps, error):
    optimizer, variables = built(lambda update: steps)
    with pytest.raises(error, match="`accumulation_steps` must be an int >= 1"):
        optimizer.apply(ones(variables), variables)
    with pytest.raises(error, match="`accumulation_steps` must be an int >= 1"):
        _ = optimizer.accumulation_steps


@pytest.mark.parametrize("steps", [0, -1])
def test_refuses_steps_below_one(steps):
    with pytest.raises(ValueError, match=r"must be an int >= 1, because an update needs"):
        Wrapper("sgd", steps)


@pytest.mark.parametrize("optimizer", [None, keras.optimizers.Adam, 4])
def test_refuses_no_optimizer(optimizer):
    with pytest.raises(TypeError, match=r"Pass an instance, not its class"):
        Wrapper(optimizer, 2)


def test_refuses_a_wrapper_in_a_wrapper():
    with pytest.raises(ValueError, match="product of both"):
        Wrapper(Wrapper("sgd", 2), 2)


def test_refuses_a_loss_scale_inside():
    with pytest.raises(ValueError, match=r"Put it outside: LossScaleOptimizer\(Gradient"):
        Wrapper(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), 2)


def test_refuses_the_built_in_option_inside():
    inner = keras.optimizers.SGD(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"accumulation_steps=2 to `GradientAccumulation"):
        Wrapper(inner, 2)


@pytest.mark.parametrize(
    ("optimizer", "error", "text"),
    [
        ("adam", TypeError, "Pass e.g. model.optimizer"),
        (keras.optimizers.Adam, TypeError, "Pass e.g. model.optimizer"),
        (keras.optimizers.SGD(), ValueError, "must have Keras's `gradient_accumulation_steps`"),
    ],
)
def test_takes_over_what_has_the_built_in_option_only(optimizer, error, text):
    with pytest.raises(error, match=text):
        Wrapper.from_builtin(optimizer)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="needs MultiOptimizer")
def test_refuses_the_built_in_option_in_a_part():
    part = keras.optimizers.SGD(gradient_accumulation_steps=2)
    inner = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(part))
    with pytest.raises(ValueError, match="would accumulate twice"):
        Wrapper(inner, 2)


@pytest.mark.parametrize(
    ("argument", "value"), [("clipnorm", 1.0), ("weight_decay", 0.1), ("use_ema", True)]
)
def test_refuses_arguments_of_the_inner_optimizer(argument, value):
    with pytest.raises(TypeError, match=rf"Adam\({argument}={value}\)"):
        Wrapper("adam", 2, **{argument: value})


def test_refuses_the_built_in_name():
    with pytest.raises(TypeError, match="Write accumulation_steps=4"):
        Wrapper("adam", 2, gradient_accumulation_steps=4)


def test_refuses_unknown_arguments():
    with pytest.raises(TypeError, match=r"`steps` must be left out.*It takes optimizer"):
        Wrapper("adam", 2, steps=3)


def test_refuses_unknown_choices():
    with pytest.raises(ValueError, match="`reduction` must be 'mean' or 'sum'"):
        Wrapper("adam", 2, reduction="average")
    with pytest.raises(ValueError, match="`nonfinite` must be 'propagate' or 'drop'"):
        Wrapper("adam", 2, nonfinite="skip")


@pytest.mark.parametrize("dtype", ["int32", "bool", "nonsense", 3])
def test_refuses_dtypes_that_are_no_float(dtype):
    with pytest.raises(ValueError, match="`accumulator_dtype` must be a float dtype"):
        Wrapper("adam", 2, accumulator_dtype=dtype)


def test_for_batch_size():
    optimizer = Wrapper.for_batch_size("adam", 256, 32, reduction="sum")
    assert (optimizer.accumulation_steps, optimizer.reduction) == (8, "sum")


@pytest.mark.parametrize(
    ("effective", "micro", "message"),
    [
        (100, 30, r"micro_batch_size=25 or 50, or effective_batch_size=90 or 120"),
        (64, 65, r"micro_batch_size=64, or effective_batch_size=65"),
        (7, 2, r"micro_batch_size=1 or 7, or effective_batch_size=6 or 8"),
    ],
)
def test_for_batch_size_names_the_nearest_sizes(effective, micro, message):
    with pytest.raises(ValueError, match=message):
        Wrapper.for_batch_size("adam", effective, micro)


# What it refuses in `apply`.


def test_refuses_gradients_without_variables_before_it_is_built():
    with pytest.raises(ValueError, match="`trainable_variables` must be given on the first call"):
        Wrapper("sgd", 2).apply([keras.ops.ones((2,))])


def test_no_gradients_are_no_micro_step():
    optimizer, _ = built()
    optimizer.apply([])
    assert int(optimizer.micro_steps) == 0


@pytest.mark.parametrize("given", [1, 3])
def test_refuses_another_number_of_gradients(given):
    optimizer, _ = built()
    with pytest.raises(ValueError, match=f"Received: {given} values for 2 variables"):
        optimizer.apply([keras.ops.ones((2,))] * given)


def test_refuses_another_set_of_variables():
    optimizer, variables = built()
    stranger = keras.Variable(np.zeros(5, "float32"), name="stranger")
    with pytest.raises(ValueError, match=r"per set of variables.*missing: \[.*\]; unknown: \[\]"):
        optimizer.apply(ones(variables[:1]), variables[:1])
    with pytest.raises(ValueError, match=r"unknown: \['stranger'\]"):
        optimizer.apply(ones([*variables, stranger]), [*variables, stranger])
    with pytest.raises(ValueError, match="same variables on every call"):
        optimizer.apply(ones([variables[0]] * 2), [variables[0]] * 2)
    assert int(optimizer.micro_steps) == 0


def test_pairs_gradients_with_variables_by_identity():
    optimizer, (first, second) = built(2)
    gradients = [keras.ops.full((2,), 1.0), keras.ops.full((3,), 5.0)]
    optimizer.apply(gradients, [first, second])
    optimizer.apply(gradients[::-1], [second, first])
    assert_equal(values([first, second]), [np.full(2, -1.0), np.full(3, -5.0)])


def test_refuses_a_variable_that_is_given_twice():
    variable = keras.Variable(np.zeros(2, "float32"))
    with pytest.raises(ValueError, match="same variables on every call"):
        Wrapper("sgd", 2).apply(ones([variable] * 2), [variable] * 2)


def test_all_none_is_refused_as_by_the_bare_optimizer():
    optimizer, variables = built()
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        optimizer.apply([None, None], variables)
    assert int(optimizer.micro_steps) == 0


@pytest.mark.parametrize("weight", [True, "1"])
def test_refuses_weights_that_are_no_number(weight):
    optimizer, variables = built()
    with pytest.raises(TypeError, match="`weight` must be a number or a scalar tensor"):
        optimizer.apply(ones(variables), variables, weight=weight)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), np.array(-1.0), np.float32(-1)])
def test_refuses_weights_out_of_range(weight):
    optimizer, variables = built()
    with pytest.raises(ValueError, match="`weight` must be finite and >= 0"):
        optimizer.apply(ones(variables), variables, weight=weight)


def test_refuses_a_weight_per_row():
    optimizer, variables = built()
    with pytest.raises(ValueError, match=r"must be a scalar.*weight of shape \(3,\)"):
        optimizer.apply(ones(variables), variables, weight=np.ones(3))


def test_refuses_an_inner_optimizer_built_on_others():
    inner = keras.optimizers.SGD(1.0)
    inner.build([keras.Variable(np.zeros(2))])
    with pytest.raises(ValueError, match="same variables on every call"):
        built(inner=inner)


# What can be read and set.


def test_counters_before_it_is_built():
    optimizer = Wrapper("sgd", 2)
    assert int(optimizer.iterations) == int(optimizer.micro_steps) == int(optimizer.pending) == 0
    assert not optimizer.has_updated
    assert int(optimizer.dropped_micro_steps) == int(optimizer.skipped_updates) == 0
    optimizer.flush()
    optimizer.reset_window()


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_fires_at_every_nth_micro_step_and_at_no_other(steps):
    optimizer, variables = built(steps)
    fired = []
    for micro_step in range(1, 4 * steps + 1):
        before = int(optimizer.iterations)
        optimizer.apply(ones(variables), variables)
        if int(optimizer.iterations) > before:
            fired.append(micro_step)
            assert bool(optimizer.has_updated)
        assert int(optimizer.pending) == micro_step % steps
        assert int(optimizer.micro_steps) == micro_step
    assert fired == [steps, 2 * steps, 3 * steps, 4 * steps]


def test_learning_rate_is_the_inner_one():
    optimizer = Wrapper(keras.optimizers.SGD(0.5), 2)
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    assert float(optimizer.inner_optimizer.learning_rate) == 0.25
    schedule = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    scheduled, variables = built(2, inner=keras.optimizers.SGD(schedule))
    for _ in range(4):
        scheduled.apply(ones(variables), variables)
    assert float(scheduled.learning_rate) == 0.25  # two updates, not four


@pytest.mark.parametrize(
    ("name", "value"),
    [("clipnorm", 1.0), ("clipvalue", 1.0), ("global_clipnorm", 1.0), ("weight_decay", 0.1)],
)
def test_what_belongs_to_the_inner_optimizer_is_set_there(name, value):
    optimizer, variables = built(1)
    assert getattr(optimizer, name) is None
    setattr(optimizer, name, value)
    assert getattr(optimizer.inner_optimizer, name) == value
    variables[0].assign([1.0, 1.0])
    optimizer.apply([keras.ops.full((2,), 3.0), keras.ops.zeros((3,))], variables)
    assert values(variables)[0][0] != -2.0


def test_set_weights_reaches_the_inner_optimizer():
    first, variables = built(inner=keras.optimizers.Adam(0.1))
    for _ in range(N + 1):
        first.apply(ones(variables), variables)
    second, _ = built(inner=keras.optimizers.Adam(0.1))
    second.set_weights(values(first.variables))
    assert_equal(values(second.variables), values(first.variables))
    with pytest.raises(ValueError, match=r"`weights` must match `optimizer\.variables`"):
        second.set_weights([])


def test_an_update_that_fails_keeps_the_window():
    class Failing(keras.optimizers.SGD):
        fail = True

        def apply(self, grads, trainable_variables=None):
            if self.fail:
                raise RuntimeError("not now")
            super().apply(grads, trainable_variables)

        def stateless_apply(self, *args):
            if self.fail:
                raise RuntimeError("not now")
            return super().stateless_apply(*args)

    inner = Failing(1.0)
    optimizer, variables = built(2, inner=inner)
    optimizer.apply(ones(variables), variables)
    with pytest.raises(RuntimeError, match="not now"):
        optimizer.apply(ones(variables), variables)
    inner.fail = False
    optimizer.apply(ones(variables), variables)
    assert_equal(values(variables), [np.full(2, -1.0), np.full(3, -1.0)])
    assert int(optimizer.pending) == 0


def test_apply_gradients_returns_the_updates():
    optimizer, variables = built(2)
    pairs = list(zip(ones(variables), variables, strict=True))
    assert int(optimizer.apply_gradients(iter(pairs))) == 0
    assert int(optimizer.apply_gradients(pairs)) == 1


def test_steps_can_be_set_in_mid_window():
    optimizer, variables = built(4)
    for _ in range(3):
        optimizer.apply(ones(variables), variables)
    optimizer.accumulation_steps = 2  # three are there already: the next one closes the window
    assert int(optimizer.pending) == 3
    optimizer.apply(ones(variables), variables)
    assert int(optimizer.iterations) == 1
    assert_equal(values(variables), [np.full(2, -1.0), np.full(3, -1.0)])


def test_steps_set_before_build_keep_room_for_the_largest():
    optimizer = Wrapper(keras.optimizers.SGD(1.0), 4)
    optimizer.accumulation_steps = 1
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer.apply(ones([variable]), [variable])
    assert int(optimizer.iterations) == 1
    optimizer.accumulation_steps = 4
    for _ in range(4):
        optimizer.apply(ones([variable]), [variable])
    assert int(optimizer.iterations) == 2
    assert_equal(values([variable]), [np.full(2, -2.0)])


def test_one_step_can_not_become_more_without_accumulators():
    optimizer, _ = built(1)
    optimizer.accumulation_steps = 1
    with pytest.raises(ValueError, match="Construct it with the largest number it will need"):
        optimizer.accumulation_steps = 2


def test_a_schedule_of_steps():
    optimizer, variables = built(lambda update: 1 + update)
    seen = []
    for _ in range(10):
        optimizer.apply(ones(variables), variables)
        seen.append(int(optimizer.iterations))
    assert seen == [1, 1, 2, 2, 2, 3, 3, 3, 3, 4]
    assert optimizer.accumulation_steps == 5
    with pytest.raises(TypeError, match="constructed with a schedule"):
        optimizer.accumulation_steps = 3


def test_a_schedule_of_steps_in_a_compiled_step():
    def momentum():
        return keras.optimizers.SGD(0.1, momentum=0.9)

    growing = accumulating(momentum(), lambda update: keras.ops.where(update > 1, 4, 2))
    model, _ = fitted(growing, MICRO_BATCH, epochs=1)
    by_hand = dense_model()
    optimizer = accumulating(momentum())
    by_hand.compile(optimizer=optimizer, loss="mse")
    x, y = rows()
    for start, stop, steps in ((0, 4, 2), (4, 12, 4)):
        optimizer.accumulation_steps = steps
        for i in range(start, stop):
            at = slice(i * MICRO_BATCH, (i + 1) * MICRO_BATCH)
            by_hand.train_on_batch(x[at], y[at])
    assert int(growing.iterations) == int(optimizer.iterations) == 4
    assert_close(model.get_weights(), by_hand.get_weights())


def test_flush_divides_by_what_was_collected():
    optimizer, variables = built(4)
    for gradient in (1.0, 3.0):
        optimizer.apply([keras.ops.full(v.shape, gradient) for v in variables], variables)
    optimizer.flush()
    assert_equal(values(variables), [np.full(2, -2.0), np.full(3, -2.0)])
    assert (int(optimizer.iterations), int(optimizer.pending)) == (1, 0)
    optimizer.flush()  # an empty window stays as it is
    assert int(optimizer.iterations) == 1


def test_reset_window_forgets_what_was_collected():
    optimizer, variables = built(2)
    optimizer.apply([keras.ops.full(v.shape, 9.0) for v in variables], variables, weight=5.0)
    optimizer.reset_window()
    assert int(optimizer.pending) == 0
    for _ in range(2):
        optimizer.apply(ones(variables), variables)
    assert_equal(values(variables), [np.full(2, -1.0), np.full(3, -1.0)])


def test_goes_on_from_an_inner_optimizer_that_has_trained():
    def momentum():
        return keras.optimizers.SGD(0.1, momentum=0.9)

    inner = momentum()
    model, _ = fitted(inner, LARGE_BATCH, epochs=1)
    model.compile(optimizer=accumulating(inner), loss="mse")
    model.fit(*rows(), batch_size=MICRO_BATCH, epochs=2, shuffle=False, verbose=0)
    straight, _ = fitted(momentum(), LARGE_BATCH, epochs=3)
    assert int(model.optimizer.iterations) == 9
    assert_close(model.get_weights(), straight.get_weights())


def test_the_loss_scale_is_outside_under_mixed_float16():
    model = dense_model(dtype="mixed_float16")
    model.dtype_policy = keras.dtype_policies.get("mixed_float16")
    inner = keras.optimizers.SGD(0.1)
    model.compile(optimizer=accumulating(inner), loss="mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    model.fit(*rows(), batch_size=MICRO_BATCH, epochs=2, shuffle=False, verbose=0)
    wrapper = model.optimizer.inner_optimizer
    assert int(wrapper.micro_steps) > 12
    assert int(inner.iterations) == int(wrapper.micro_steps) // N


def test_the_loss_scale_factor_is_the_inner_one():
    optimizer = Wrapper(keras.optimizers.SGD(0.1, loss_scale_factor=8.0), 2)
    assert float(optimizer.scale_loss(keras.ops.ones(()))) == 8.0
    optimizer.loss_scale_factor = 2.0
    assert optimizer.inner_optimizer.loss_scale_factor == 2.0


def test_sharding_without_a_distribution_is_refused():
    optimizer = keras_ga.GradientAccumulationOptimizer("sgd", 2, shard_accumulators="batch")
    with pytest.raises(ValueError, match=r"`shard_accumulators` must be left out without"):
        optimizer.build(dense_model().trainable_variables)
    with pytest.raises(TypeError, match=r"`shard_accumulators` must be the name of an axis"):
        keras_ga.GradientAccumulationOptimizer("sgd", 2, shard_accumulators=True)
