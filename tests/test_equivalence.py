"""The promise: the weights of the bare optimizer on the large batch, for every optimizer."""

import keras
import numpy as np
import pytest
from support import (
    BACKEND,
    LARGE_BATCH,
    MICRO_BATCH,
    accumulating,
    assert_close,
    assert_differ,
    assert_equal,
    dense_model,
    fitted,
    micro_batches,
    rows,
    values,
)

O = keras.optimizers  # noqa: E741


class HeavyBall(O.Optimizer):
    """A user's own optimizer: momentum, with a variable of its own."""

    def __init__(self, learning_rate=0.05, friction=0.8, name="heavy_ball", **kwargs):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.friction = friction

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.velocities = self.add_optimizer_variables(variables, "velocity")

    def update_step(self, gradient, variable, learning_rate):
        velocity = self.velocities[self._get_variable_index(variable)]
        step = velocity * self.friction + gradient * keras.ops.cast(learning_rate, variable.dtype)
        self.assign(velocity, step)
        self.assign_sub(variable, step)


def two_optimizers(learning_rate=0.02, **arguments):
    """Kernels by Adam, the rest by SGD."""
    return O.MultiOptimizer(
        O.OptimizerMap(
            O.SGD(learning_rate, momentum=0.9, **arguments),
            {".*kernel": O.Adam(learning_rate, **arguments)},
        )
    )


# Name -> constructor. Every optimizer that Keras ships, where this Keras has it.
OPTIMIZERS = {
    "SGD": lambda **kw: O.SGD(**{"learning_rate": 0.05, **kw}),
    "Adam": lambda **kw: O.Adam(**{"learning_rate": 0.02, **kw}),
    "AdamW": lambda **kw: O.AdamW(**{"learning_rate": 0.02, **kw}),
    "RMSprop": lambda **kw: O.RMSprop(**{"learning_rate": 0.02, **kw}),
    "Adagrad": lambda **kw: O.Adagrad(**{"learning_rate": 0.05, **kw}),
    "Adadelta": lambda **kw: O.Adadelta(**{"learning_rate": 0.5, **kw}),
    "Adamax": lambda **kw: O.Adamax(**{"learning_rate": 0.02, **kw}),
    "Nadam": lambda **kw: O.Nadam(**{"learning_rate": 0.02, **kw}),
    "Ftrl": lambda **kw: O.Ftrl(**{"learning_rate": 0.05, **kw}),
    "Lion": lambda **kw: O.Lion(**{"learning_rate": 0.01, **kw}),
    "Lamb": lambda **kw: O.Lamb(**{"learning_rate": 0.02, **kw}),
    "Adafactor": lambda **kw: O.Adafactor(**{"learning_rate": 0.02, **kw}),
    "Muon": lambda **kw: O.Muon(**{"learning_rate": 0.02, **kw}),
    "ScheduleFreeAdamW": lambda **kw: O.ScheduleFreeAdamW(**{"learning_rate": 0.02, **kw}),
    "MultiOptimizer": two_optimizers,
    "HeavyBall": HeavyBall,
}
OPTIMIZERS = {
    name: make for name, make in OPTIMIZERS.items() if hasattr(O, name) or name in ("HeavyBall",)
}


def schedule():
    return O.schedules.CosineDecay(0.02, decay_steps=9, warmup_target=0.05, warmup_steps=3)


def callable_rate():
    return 0.03


# Feature -> (the optimizer's arguments, the layers' arguments), made anew for each side.
FEATURES = {
    "plain": lambda: ({}, {}),
    "clipnorm": lambda: ({"clipnorm": 0.1}, {}),
    "global_clipnorm": lambda: ({"global_clipnorm": 0.2}, {}),
    "clipvalue": lambda: ({"clipvalue": 0.02}, {}),
    "weight_decay": lambda: ({"weight_decay": 0.1}, {}),
    "use_ema": lambda: ({"use_ema": True, "ema_momentum": 0.7}, {}),
    "ema_overwrite_frequency": lambda: (
        {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 2},
        {},
    ),
    "schedule": lambda: ({"learning_rate": schedule()}, {}),
    "callable_rate": lambda: ({"learning_rate": callable_rate}, {}),
    "constraint": lambda: ({}, {"kernel_constraint": keras.constraints.UnitNorm()}),
    "regulariser": lambda: ({}, {"kernel_regularizer": keras.regularizers.L2(0.1)}),
    "loss_scale_factor": lambda: ({"loss_scale_factor": 64.0}, {}),
}


def optimizer_of(name, arguments):
    if name == "MultiOptimizer" and "loss_scale_factor" in arguments:
        optimizer = OPTIMIZERS[name]()
        optimizer.loss_scale_factor = arguments["loss_scale_factor"]
        return optimizer
    return OPTIMIZERS[name](**arguments)


def averages(optimizer):
    """The EMA averages of an optimizer, or of its parts."""
    parts = getattr(optimizer, "optimizers", [optimizer])
    return [
        value
        for part in parts
        if part.use_ema
        for value in values(part._model_variables_moving_average)
    ]


class Network:
    """Two dense layers with their gradients by hand, so that hundreds of trainings cost seconds.

    What is compared is the optimizers; that they do the same in `fit` and in compiled steps is
    tested below and in `test_fit.py`.
    """

    def __init__(self, kernel_constraint=None, kernel_regularizer=None):
        rng = np.random.default_rng(0)
        self.variables = []
        for layer, shape in enumerate([(5, 7), (7,), (7, 3), (3,)]):
            is_kernel = len(shape) == 2
            with keras.name_scope(f"layer_{layer}"):
                variable = keras.Variable(
                    rng.normal(0, 0.5, shape),
                    dtype=keras.config.floatx(),
                    name="kernel" if is_kernel else "bias",
                )
            variable.constraint = kernel_constraint if is_kernel else None
            self.variables.append(variable)
        self.decay = 0.0 if kernel_regularizer is None else float(kernel_regularizer.l2)

    def gradients(self, x, y):
        kernel_1, bias_1, kernel_2, bias_2 = values(self.variables)
        hidden = np.tanh(x @ kernel_1 + bias_1)
        of_output = 2 * (hidden @ kernel_2 + bias_2 - y) / y.size
        of_hidden = of_output @ kernel_2.T * (1 - hidden**2)
        found = [
            x.T @ of_hidden + 2 * self.decay * kernel_1,
            of_hidden.sum(axis=0),
            hidden.T @ of_output + 2 * self.decay * kernel_2,
            of_output.sum(axis=0),
        ]
        return [keras.ops.convert_to_tensor(g, dtype=keras.config.floatx()) for g in found]


def trained(optimizer, batch_size, layer_arguments, epochs=2):
    """The variables after epochs over the rows in order: three updates each."""
    network = Network(**layer_arguments)
    for _ in range(epochs):
        for part in micro_batches(*rows(), batch_size):
            optimizer.apply(network.gradients(*part), network.variables)
    return values(network.variables)


def both_sides(name, feature, train=trained, updates=6):
    """(weights and averages of the bare optimizer, of the wrapped one)."""
    results = []
    for wrap, batch_size in ((lambda o: o, LARGE_BATCH), (accumulating, MICRO_BATCH)):
        arguments, layer_arguments = FEATURES[feature]()
        inner = optimizer_of(name, arguments)
        weights = train(wrap(inner), batch_size, layer_arguments)
        assert int(inner.iterations) == updates
        results.append(weights + averages(inner))
    return results


def trained_by_fit(optimizer, batch_size, layer_arguments):
    model, _ = fitted(optimizer, batch_size, make_model=lambda: dense_model(**layer_arguments))
    return model.get_weights()


# Ftrl keeps its own idea of the weights, which a projection contradicts; that magnifies rounding.
# (Muon with a schedule is skipped in float64.)
TOLERANCES = {("Ftrl", "constraint"): 1e-5, ("Muon", "schedule"): 1e-6}


# All are crossed in float64, where a deviation can't pass as rounding. In float32, which could only
# be wrong by a cast: every optimizer, and every option with the two that differ most.
@pytest.mark.parametrize(
    ("name", "feature"),
    [
        pytest.param(
            name,
            feature,
            marks=()
            if feature == "plain" or name in ("SGD", "Adam") or (name, feature) in TOLERANCES
            else pytest.mark.slow,
        )
        for name in OPTIMIZERS
        for feature in FEATURES
    ],
)
def test_equals_the_large_batch(name, feature):
    large, accumulated = both_sides(name, feature)
    assert_close(accumulated, large, TOLERANCES.get((name, feature), 1e-6))


# In a compiled step: every optimizer once, and every option with the two that differ most, by
# default with the one that it is easier to be wrong with: Adam hides a wrong scale.
WITH_ADAM = {"weight_decay", "use_ema", "ema_overwrite_frequency", "callable_rate", "constraint"}
COMPILED = [(name, "plain") for name in OPTIMIZERS]
COMPILED += [
    pytest.param(
        name,
        feature,
        marks=() if (name == "Adam") == (feature in WITH_ADAM) else pytest.mark.slow,
    )
    for name in ("SGD", "Adam")
    for feature in FEATURES
    if feature != "plain"
]


@pytest.mark.parametrize(("name", "feature"), COMPILED)
def test_equals_the_large_batch_in_fit(name, feature):
    large, accumulated = both_sides(name, feature, trained_by_fit, updates=9)
    assert_close(accumulated, large)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_large_batch_in_float64(name, feature):
    if (name, feature, BACKEND) == ("Muon", "schedule", "tensorflow"):
        pytest.skip("Keras 3.15's Muon does not cast a schedule's float32 rate")
    large, accumulated = both_sides(name, feature)
    assert accumulated[0].dtype == "float64"
    assert_close(accumulated, large, 1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: O.SGD(0.05, momentum=0.9),
        lambda: O.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=0.1),
        lambda: O.RMSprop(0.02, momentum=0.9, centered=True),
        lambda: O.Adam(0.02, amsgrad=True),
    ],
    ids=["momentum", "nesterov", "rmsprop", "amsgrad"],
)
def test_variants_equal_the_large_batch(make):
    large, _ = fitted(make(), LARGE_BATCH)
    accumulated, _ = fitted(accumulating(make()), MICRO_BATCH)
    assert_close(accumulated.get_weights(), large.get_weights())


@pytest.mark.parametrize("through_the_wrapper", [True, False])
def test_weight_decay_spares_excluded_variables(through_the_wrapper):
    def decaying():
        return O.SGD(0.05, weight_decay=0.5)

    bare, inner = decaying(), decaying()
    wrapped = accumulating(inner)
    bare.exclude_from_weight_decay(var_names=["bias"])
    (wrapped if through_the_wrapper else inner).exclude_from_weight_decay(var_names=["bias"])
    large, _ = fitted(bare, LARGE_BATCH)
    accumulated, _ = fitted(wrapped, MICRO_BATCH)
    assert_close(accumulated.get_weights(), large.get_weights())
    decayed, _ = fitted(decaying(), LARGE_BATCH)
    assert_differ(decayed.get_weights(), large.get_weights())


def test_the_small_batch_alone_and_the_built_in_option_differ():
    # What the comparisons above would show if accumulation did nothing, or did Keras's.
    def scheduled(**arguments):
        return O.SGD(schedule(), momentum=0.9, clipnorm=0.1, **arguments)

    large, _ = fitted(scheduled(), LARGE_BATCH)
    small, _ = fitted(scheduled(), MICRO_BATCH)
    built_in, _ = fitted(scheduled(gradient_accumulation_steps=4), MICRO_BATCH)
    assert_differ(small.get_weights(), large.get_weights(), by=1e-2)
    assert_differ(built_in.get_weights(), large.get_weights(), by=1e-2)


def test_the_order_of_the_micro_batches_does_not_matter():
    x, y = rows(LARGE_BATCH)
    backwards = np.arange(LARGE_BATCH).reshape(4, MICRO_BATCH)[::-1].ravel()
    forth, _ = fitted(accumulating(O.SGD(0.1, momentum=0.9)), MICRO_BATCH, data=(x, y))
    back, _ = fitted(
        accumulating(O.SGD(0.1, momentum=0.9)), MICRO_BATCH, data=(x[backwards], y[backwards])
    )
    assert_close(back.get_weights(), forth.get_weights())


def test_the_loss_is_the_large_batch_loss():
    _, large = fitted(O.SGD(0.0), LARGE_BATCH)
    _, accumulated = fitted(accumulating(O.SGD(0.0)), MICRO_BATCH)
    np.testing.assert_allclose(accumulated["loss"], large["loss"], rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_accumulation_step_is_the_bare_optimizer_bit_for_bit(name):
    bare, inner = optimizer_of(name, {}), optimizer_of(name, {})
    wrapped = accumulating(inner, 1)
    assert_equal(
        trained(wrapped, MICRO_BATCH, {}, epochs=1), trained(bare, MICRO_BATCH, {}, epochs=1)
    )
    assert_equal(values(inner.variables), values(bare.variables))
    assert not any("accumulator" in variable.path for variable in wrapped._variables)


def test_one_accumulation_step_in_fit_is_the_bare_optimizer_bit_for_bit():
    bare, history = fitted(OPTIMIZERS["Adam"](), MICRO_BATCH, epochs=1)
    wrapped, wrapped_history = fitted(accumulating(OPTIMIZERS["Adam"](), 1), MICRO_BATCH, epochs=1)
    assert_equal(wrapped.get_weights(), bare.get_weights())
    assert wrapped_history == history
