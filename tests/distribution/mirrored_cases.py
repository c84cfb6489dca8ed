"""MirroredStrategy on logical devices: run by `test_strategies.py`, in a process of its own."""

import functools
import os
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import (
    accumulating,
    assert_close,
    assert_differ,
    assert_equal,
    dense_model,
    gradients_of,
    rows,
    values,
)

import keras_ga

REPLICAS = int(os.environ["KERAS_GA_TEST_REPLICAS"])
DEVICES = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    DEVICES[0], [tf.config.LogicalDeviceConfiguration()] * REPLICAS
)
N, MICRO_BATCH = 3, 4  # of all replicas together
LARGE_BATCH = N * MICRO_BATCH
ROWS = 3 * LARGE_BATCH
NAMES = [f"CPU:{i}" for i in range(REPLICAS)]
STRATEGY = tf.distribute.MirroredStrategy(NAMES)


class Counting(tf.distribute.CrossDeviceOps):
    """Reduces to one device, and counts what it reduces and when."""

    def __init__(self):
        super().__init__()
        self._ops = tf.distribute.ReductionToOneDevice()
        self.reduced = 0

    def reduce_implementation(self, *arguments, **named):
        self.reduced += 1
        return self._ops.reduce_implementation(*arguments, **named)

    def batch_reduce_implementation(self, reduce_op, pairs, options):
        self.reduced += len(pairs)
        return self._ops.batch_reduce_implementation(reduce_op, pairs, options)

    def broadcast_implementation(self, tensor, destinations):
        return self._ops.broadcast_implementation(tensor, destinations)

    def _gather_implementation(self, *arguments, **named):
        return self._ops._gather_implementation(*arguments, **named)


def trained(make_optimizer, batch_size, *, strategy=None, steps=None, epochs=2, **arguments):
    """A model trained by `fit` on so many rows per step, and its optimizer."""
    make_model = arguments.pop("make_model", dense_model)
    data = arguments.pop("data", None) or rows(ROWS)
    callbacks = arguments.pop("callbacks", ())
    loss = arguments.pop("loss", "mse")
    with (strategy or tf.distribute.get_strategy()).scope():
        model = make_model()
        optimizer = make_optimizer()
        if steps is not None:
            optimizer = accumulating(optimizer, steps)
        model.compile(optimizer=optimizer, loss=loss, **arguments)
    if isinstance(data, tf.data.Dataset):
        model.fit(data, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)
    else:
        fit = {"batch_size": batch_size, "shuffle": False, "verbose": 0, "callbacks": callbacks}
        model.fit(*data, epochs=epochs, **fit)
    return model, optimizer


@functools.cache  # the same for many tests
def weights_of_the_large_batch(make_optimizer):
    return trained(make_optimizer, LARGE_BATCH)[0].get_weights()


def replicas_of(variable):
    return [component.numpy() for component in variable.value.values]


def assert_replicas_agree(variables):
    for variable in variables:
        first, *others = replicas_of(variable)
        for other in others:
            np.testing.assert_array_equal(first, other)


# Equal to one device.

CLIPPING = [{}, {"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.02}]
OPTIMIZERS = {
    "momentum": lambda rate, **a: keras.optimizers.SGD(rate, momentum=0.9, **a),
    "adam": keras.optimizers.Adam,
}


@pytest.mark.parametrize(
    ("name", "clipping"),
    [*(("momentum", clipping) for clipping in CLIPPING), ("adam", {"global_clipnorm": 0.1})],
    ids=str,
)
def test_clips_what_one_device_would(name, clipping):
    def make():
        return OPTIMIZERS[name](0.05, **clipping)

    large, _ = trained(make, LARGE_BATCH)
    model, optimizer = trained(make, MICRO_BATCH, strategy=STRATEGY, steps=N)
    assert_close(values(model.trainable_variables), large.get_weights())
    assert_replicas_agree(model.trainable_variables)
    assert_equal(values([optimizer.iterations, optimizer.micro_steps]), [6, 18])
    if clipping and name == "momentum":
        # Guards the test: Keras alone clips on each replica, before it sums.
        bare, _ = trained(make, LARGE_BATCH, strategy=STRATEGY)
        assert_differ(values(bare.trainable_variables), large.get_weights(), by=1e-3)


OTHERS = {
    "adamw": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1, clipnorm=0.1),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.01, global_clipnorm=0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "ema": lambda: keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.5),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    ),
    "scaled": lambda: keras.optimizers.SGD(0.1, momentum=0.9, loss_scale_factor=8.0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_and_options(name):
    large, _ = trained(OTHERS[name], LARGE_BATCH)
    model, _ = trained(OTHERS[name], MICRO_BATCH, strategy=STRATEGY, steps=N)
    assert_close(values(model.trainable_variables), large.get_weights())
    assert_replicas_agree(model.trainable_variables)


def test_constraints():
    def make_model():
        return dense_model(kernel_constraint=keras.constraints.MaxNorm(0.5))

    def make():
        return keras.optimizers.SGD(0.1)

    large, _ = trained(make, LARGE_BATCH, make_model=make_model)
    model, _ = trained(make, MICRO_BATCH, strategy=STRATEGY, steps=N, make_model=make_model)
    assert_close(values(model.trainable_variables), large.get_weights())


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.1)


@pytest.mark.parametrize("arguments", [{"run_eagerly": True}, {"steps_per_execution": 3}], ids=str)
def test_ways_to_run(arguments):
    # Keras's own step fails with the default collectives and several steps at once.
    strategy = tf.distribute.MirroredStrategy(
        NAMES, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    model, _ = trained(momentum, MICRO_BATCH, strategy=strategy, steps=N, **arguments)
    assert_close(values(model.trainable_variables), weights_of_the_large_batch(momentum))


def test_synchronized_batch_normalization():
    def make_model():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((5,)), keras.layers.Dense(6)]
        layers += [keras.layers.BatchNormalization(synchronized=True, momentum=0.9)]
        return keras.Sequential([*layers, keras.layers.Dense(3)])

    one, _ = trained(momentum, MICRO_BATCH, steps=N, make_model=make_model)
    model, _ = trained(momentum, MICRO_BATCH, steps=N, make_model=make_model, strategy=STRATEGY)
    assert_close(values(model.variables), values(one.variables))


def pooled_model(accumulation_steps):
    keras.utils.set_random_seed(0)
    layer = (
        keras.layers.BatchNormalization(momentum=0.9)
        if accumulation_steps == 1
        else keras_ga.layers.BatchNormalization(
            momentum=0.9, synchronized=True, accumulation_steps=accumulation_steps
        )
    )
    return keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(3)])


def test_pooled_statistics_over_replicas_are_the_large_batchs():
    large, _ = trained(momentum, LARGE_BATCH, make_model=lambda: pooled_model(1))
    model, _ = trained(
        momentum, MICRO_BATCH, steps=N, strategy=STRATEGY, make_model=lambda: pooled_model(N)
    )
    layer, its = model.layers[0], large.layers[0]
    expected = values([its.moving_mean, its.moving_variance])
    assert_close(values([layer.moving_mean, layer.moving_variance]), expected)
    assert_replicas_agree([layer.moving_mean, layer.moving_variance])


def test_conversion_and_recalibration_outside_the_scope():
    x, y = rows(ROWS)
    with STRATEGY.scope():
        model = pooled_model(1)
    keras_ga.batch_norm.convert(model, N)
    model.layers[0].synchronized = True
    with STRATEGY.scope():
        model.compile(accumulating(keras.optimizers.SGD(0.0), N), loss="mse")
    model.fit(x, y, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    large, _ = trained(lambda: keras.optimizers.SGD(0.0), LARGE_BATCH, epochs=1,
                       make_model=lambda: pooled_model(1))  # fmt: skip
    layer, its = model.layers[0], large.layers[0]
    expected = values([its.moving_mean, its.moving_variance])
    assert_close(values([layer.moving_mean, layer.moving_variance]), expected)
    keras_ga.batch_norm.revert(model)
    layer.synchronized = False
    keras_ga.batch_norm.recalibrate(model, x, batch_size=MICRO_BATCH, verbose=0)
    assert_close(values([layer.moving_mean, layer.moving_variance]), [x.mean(0), x.var(0)])
    assert not layer.synchronized


def test_an_open_pool_travels_between_strategies(tmp_path):
    """What is pooled counts by its rows, on however many replicas they were."""
    x, y = rows((N + 2) * MICRO_BATCH)
    more = rows(MICRO_BATCH, seed=1)
    saved, _ = trained(
        momentum, MICRO_BATCH, steps=N, strategy=STRATEGY, epochs=1, data=(x, y),
        make_model=lambda: pooled_model(N),
    )  # fmt: skip
    saved.save_weights(tmp_path / "m.weights.h5")
    if REPLICAS != 2:
        return
    # On one device the layer need not be synchronised, and the window goes on.
    other = pooled_model(N)
    other.compile(accumulating(momentum(), N), loss="mse")
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "m.weights.h5")
    before = values([other.layers[0].moving_mean])[0]
    other.fit(*more, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    window = np.concatenate([x[N * MICRO_BATCH :], more[0]])
    expected = 0.9 * before + 0.1 * window.mean(0)
    assert_close(values([other.layers[0].moving_mean]), [expected])


def test_accumulators_of_another_dtype():
    def make():
        return keras.optimizers.SGD(0.1)

    with STRATEGY.scope():
        model = dense_model()
        wrapper = accumulating(make(), N, accumulator_dtype="bfloat16")
        model.compile(wrapper, loss="mse")
    model.fit(*rows(ROWS), batch_size=MICRO_BATCH, epochs=2, shuffle=False, verbose=0)
    large, _ = trained(make, LARGE_BATCH)
    assert_close(values(model.trainable_variables), large.get_weights(), 1e-2)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_embeddings(name):
    """Against the dense gradient: Keras's sparse one differs on repeated rows, on one device."""
    x = np.random.default_rng(0).integers(0, 7, size=(ROWS, 4))
    y = rows(ROWS)[1]

    def make_model():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((4,), dtype="int32"), keras.layers.Embedding(7, 5)]
        return keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(3)])

    def make():
        return OPTIMIZERS[name](0.05)

    large, optimizer = make_model(), make()
    optimizer.build(large.trainable_variables)
    for _ in range(2):
        for start in range(0, ROWS, LARGE_BATCH):
            at = slice(start, start + LARGE_BATCH)
            found = gradients_of(large, x[at], y[at])
            optimizer.apply([tf.convert_to_tensor(g) for g in found], large.trainable_variables)
    model, _ = trained(
        make, MICRO_BATCH, strategy=STRATEGY, steps=N, make_model=make_model, data=(x, y)
    )
    assert_close(values(model.trainable_variables), large.get_weights())


# The data.


def test_data_of_unknown_size_moves_no_counter_at_its_end():
    x, y = rows(4 * MICRO_BATCH)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(MICRO_BATCH)
    data = data.filter(lambda *_: True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        _, optimizer = trained(momentum, None, strategy=STRATEGY, steps=N, data=data, epochs=3)
    # 12 micro-steps: four updates, none by the failed steps at the ends of epochs.
    counters = [optimizer.micro_steps, optimizer.iterations, optimizer.pending]
    assert_equal(values(counters), [12, 4, 0])


@pytest.mark.skipif(REPLICAS != 2, reason="the rows are dealt out by hand")
def test_a_short_last_batch_counts_as_the_mean_of_replica_means():
    """As Keras has it under a strategy: each replica's rows weigh the same, however few."""
    x, y = rows(MICRO_BATCH + 3)
    model, _ = trained(
        lambda: keras.optimizers.SGD(0.1),
        MICRO_BATCH,
        strategy=STRATEGY,
        steps=2,
        data=(x, y),
        epochs=1,
    )
    expected = dense_model()
    found = [gradients_of(expected, x[at], y[at]) for at in (np.s_[:4], np.s_[4:6], np.s_[6:])]
    for variable, whole, two, one in zip(expected.trainable_variables, *found, strict=True):
        variable.assign(variable - 0.1 * (whole + (two + one) / 2) / 2)
    assert_close(values(model.trainable_variables), expected.get_weights())


# Reductions.


def test_reduces_once_per_window_and_never_on_held_micro_steps():
    counting = Counting()
    strategy = tf.distribute.MirroredStrategy(NAMES, cross_device_ops=counting)
    x, y = rows(ROWS)
    with strategy.scope():
        model = dense_model()
        model.compile(accumulating(momentum(), N), loss="mse", run_eagerly=True)
        bare = dense_model()
        bare.compile(momentum(), loss="mse", run_eagerly=True)
    seen = {}
    for name, each in (("keras_ga", model), ("bare", bare)):
        each.train_on_batch(x[:MICRO_BATCH], y[:MICRO_BATCH])
        metrics_and_all = []
        for step in range(1, 2 * N + 1):
            before = counting.reduced
            at = slice(step * MICRO_BATCH, (step + 1) * MICRO_BATCH)
            each.train_on_batch(x[at], y[at])
            metrics_and_all.append(counting.reduced - before)
        seen[name] = metrics_and_all
    held = min(seen["keras_ga"])  # what Keras reduces for its logs
    variables = len(model.trainable_variables)
    assert [n - held for n in seen["bare"]] == [variables] * 2 * N
    # With the sum of weights, which travels in the same pack; counters are not reduced.
    assert [n - held for n in seen["keras_ga"]] == [0, variables + 1, 0] * 2


def test_the_graph_reduces_inside_the_loop_only():
    model, optimizer = trained(momentum, MICRO_BATCH, strategy=STRATEGY, steps=N, epochs=1)
    x, y = rows(MICRO_BATCH)

    @tf.function
    def step():
        def replica():
            gradients = gradients_of_graph(model, x, y)
            optimizer.apply(gradients, model.trainable_variables)

        STRATEGY.run(replica)

    definition = step.get_concrete_function().graph.as_graph_def()

    def reductions(nodes):
        return sum(node.op.startswith("CollectiveReduce") for node in nodes)

    inside = {
        function.signature.name: reductions(function.node_def)
        for function in definition.library.function
    }
    assert reductions(definition.node) == 0
    # One pack of all variables, on each replica.
    assert [number for number in inside.values() if number] == [REPLICAS]


def gradients_of_graph(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y)) / REPLICAS
    return tape.gradient(loss, model.trainable_variables)


# Loops of one's own.


def per_replica(array):
    parts = np.split(array, REPLICAS)
    return STRATEGY.experimental_distribute_values_from_function(
        lambda context: tf.constant(parts[context.replica_id_in_sync_group])
    )


@pytest.mark.parametrize("compiled", [True, False])
def test_weights_of_rows(compiled):
    """A weighted mean over all rows of all replicas: each has its own weight."""
    rng = np.random.default_rng(0)
    x, y = rows(2 * MICRO_BATCH)
    tokens = rng.integers(0, 9, size=2 * MICRO_BATCH).astype("float32")
    expected = dense_model()
    found = gradients_of(
        expected, x, y, reduce=lambda loss: tf.reduce_sum(loss * tokens) / tokens.sum()
    )
    bare = keras.optimizers.SGD(0.1)
    bare.apply(found, expected.trainable_variables)
    with STRATEGY.scope():
        model = dense_model()
        optimizer = accumulating(keras.optimizers.SGD(0.1), 2)
        optimizer.build(model.trainable_variables)

    def replica(x, y, tokens):
        weight = tf.reduce_sum(tokens)
        with tf.GradientTape() as tape:
            loss = keras.losses.mean_squared_error(y, model(x, training=True))
            loss = tf.math.divide_no_nan(tf.reduce_sum(loss * tokens), weight) / REPLICAS
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables, weight=weight)

    def step(*arguments):
        STRATEGY.run(replica, args=arguments)

    step = tf.function(step) if compiled else step
    for at in (slice(0, MICRO_BATCH), slice(MICRO_BATCH, 2 * MICRO_BATCH)):
        step(per_replica(x[at]), per_replica(y[at]), per_replica(tokens[at]))
    assert_close(values(model.trainable_variables), expected.get_weights())
    # A window of nothing but zeros makes no update.
    before = values(model.trainable_variables)
    for _ in range(2):
        step(per_replica(x[at]), per_replica(y[at]), per_replica(0 * tokens[at]))
    assert_equal(values(model.trainable_variables), before)
    assert_equal(values([optimizer.iterations, optimizer.skipped_updates]), [1, 1])


def test_dropping_leaves_out_the_replica_that_is_not_finite():
    x, y = rows(2 * MICRO_BATCH)
    spoilt = x.copy()
    spoilt[MICRO_BATCH - 1] = np.nan  # the last replica's part of the first micro-batch
    expected = dense_model()
    part = MICRO_BATCH // REPLICAS
    kept = np.delete(np.arange(2 * MICRO_BATCH), np.s_[MICRO_BATCH - part : MICRO_BATCH])
    bare = keras.optimizers.SGD(0.1)
    bare.apply(gradients_of(expected, x[kept], y[kept]), expected.trainable_variables)
    with STRATEGY.scope():
        model = dense_model()
        optimizer = accumulating(keras.optimizers.SGD(0.1), 2, nonfinite="drop")
        model.compile(optimizer, loss="mse")
    model.fit(spoilt, y, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    assert_close(values(model.trainable_variables), expected.get_weights())
    assert_equal(values([optimizer.dropped_micro_steps, optimizer.micro_steps]), [1, 2])


@pytest.mark.parametrize("compiled", [True, False])
def test_gradients_that_never_come(compiled):
    """A variable without a gradient keeps its value: no decay, no momentum."""
    with STRATEGY.scope():
        model = dense_model()
        unused = keras.Variable(np.ones(3, "float32"), name="unused")
        variables = [*model.trainable_variables, unused]
        optimizer = accumulating(keras.optimizers.AdamW(0.1, weight_decay=0.1), 2)
        optimizer.build(variables)
    x, y = rows(MICRO_BATCH)

    def replica():
        gradients = gradients_of_graph(model, x, y)
        optimizer.apply([*gradients, None], variables)

    def step():
        STRATEGY.run(replica)

    step = tf.function(step) if compiled else step
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist")
        for _ in range(2):
            step()
    assert_equal(values([optimizer.iterations]), [1])
    assert_equal(values([unused]), [np.ones(3, "float32")])
    for held_back in range(2):
        step()
        if held_back == 0:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Gradients do not exist")
                optimizer.flush()
    assert_equal(values([unused]), [np.ones(3, "float32")])


def test_a_gradient_that_another_trace_had_is_not_lost():
    with STRATEGY.scope():
        late, unused, always = (keras.Variable(np.ones(2, "float32"), name=n) for n in "abc")
        variables = [late, unused, always]
        optimizer = accumulating(keras.optimizers.AdamW(0.1, weight_decay=0.5), 2)
        optimizer.build(variables)

    @tf.function
    def step(with_late):
        def replica():
            gradient = tf.ones(2) / REPLICAS
            optimizer.apply([gradient if with_late else None, None, gradient], variables)

        STRATEGY.run(replica)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist")
        step(True)
        step(False)
    found = values(variables)
    # Adam's first step is the rate, whatever the gradient; decay is on top of it.
    assert_close([found[0], found[2]], [np.full(2, 1 - 0.1 - 0.05, "float32")] * 2, 1e-5)
    assert_equal([found[1]], [np.ones(2, "float32")])


# Windows.


def test_flushing_divides_by_what_is_there():
    data = rows(5 * MICRO_BATCH)
    flush = keras_ga.callbacks.FlushPartialWindow()
    large, _ = trained(momentum, LARGE_BATCH, data=data)
    model, optimizer = trained(
        momentum, MICRO_BATCH, strategy=STRATEGY, steps=N, data=data, callbacks=[flush]
    )
    assert_close(values(model.trainable_variables), large.get_weights())
    assert_equal(values([optimizer.iterations, optimizer.pending]), [4, 0])


def test_another_number_of_steps_and_throwing_away():
    data = rows(4 * MICRO_BATCH)
    model, optimizer = trained(
        momentum, MICRO_BATCH, strategy=STRATEGY, steps=N, data=data, epochs=1
    )
    assert_equal(values([optimizer.pending]), [1])
    optimizer.reset_window()
    optimizer.accumulation_steps = 2
    model.fit(*data, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    large, _ = trained(momentum, LARGE_BATCH, data=tuple(d[:LARGE_BATCH] for d in data), epochs=1)
    large.fit(*data, batch_size=2 * MICRO_BATCH, shuffle=False, verbose=0)
    assert_close(values(model.trainable_variables), large.get_weights())
    assert optimizer.accumulation_steps == 2
    assert_equal(values([optimizer.iterations]), [3])


def test_a_schedule_of_steps():
    steps = keras_ga.schedules.PiecewiseConstantSteps([1], [1, 2])
    data = rows(5 * MICRO_BATCH)
    model, optimizer = trained(
        momentum, MICRO_BATCH, strategy=STRATEGY, steps=steps, data=data, epochs=1
    )
    large, _ = trained(momentum, MICRO_BATCH, data=tuple(d[:MICRO_BATCH] for d in data), epochs=1)
    rest = tuple(d[MICRO_BATCH:] for d in data)
    large.fit(*rest, batch_size=2 * MICRO_BATCH, shuffle=False, verbose=0)
    assert_close(values(model.trainable_variables), large.get_weights())
    assert optimizer.accumulation_steps == 2


def test_one_step_is_the_bare_optimizer():
    bare, _ = trained(momentum, MICRO_BATCH, strategy=STRATEGY)
    model, _ = trained(momentum, MICRO_BATCH, strategy=STRATEGY, steps=1)
    assert_equal(values(model.trainable_variables), values(bare.trainable_variables))


# Mixed precision.


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def scaled(loss_scale, strategy, spoilt, make=lambda: keras.optimizers.SGD(0.05)):
    x, y = rows(ROWS)
    x = x.copy()
    if spoilt is not None:
        x[spoilt] = np.inf
    with (strategy or tf.distribute.get_strategy()).scope():
        model = dense_model()
        # Of one device and of two: the halved loss of a replica overflows at another scale.
        optimizer = loss_scale(accumulating(make(), N), initial_scale=2.0**6)
        model.compile(optimizer=optimizer, loss="mse")
    model.fit(x, y, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    assert model.optimizer is optimizer
    return model, optimizer


@pytest.mark.usefixtures("mixed_float16")
@pytest.mark.parametrize("replica", [0, REPLICAS - 1])
def test_an_overflow_on_any_replica_is_one_on_all(replica):
    spoilt = MICRO_BATCH + replica * (MICRO_BATCH // REPLICAS)
    one, single = scaled(keras_ga.LossScaleOptimizer, None, spoilt)
    model, optimizer = scaled(keras_ga.LossScaleOptimizer, STRATEGY, spoilt)
    assert np.isfinite(np.concatenate([w.ravel() for w in model.get_weights()])).all()
    assert_close(values(model.trainable_variables), one.get_weights(), 1e-3)  # float16
    assert_replicas_agree(model.trainable_variables)
    for each in (single, optimizer):
        counters = [each.inner_optimizer.micro_steps, each.iterations, each.dynamic_scale]
        assert_equal(values(counters), [8, 2, 2.0**5])


@pytest.mark.usefixtures("mixed_float16")
@pytest.mark.filterwarnings("ignore:Under `mixed_float16` replicas must agree")
@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_kerass_own_loss_scale_lets_it_through():
    """Guards the test above, and says when ours is no longer needed."""
    model, _ = scaled(keras.optimizers.LossScaleOptimizer, STRATEGY, 2 * MICRO_BATCH - 1)
    assert not np.isfinite(model.get_weights()[0]).all()


@pytest.mark.usefixtures("mixed_float16")
def test_kerass_own_loss_scale_is_warned_of():
    with STRATEGY.scope():
        model = dense_model()
        model.compile(accumulating(momentum(), N), loss="mse")
        with pytest.warns(UserWarning, match=r"keras_ga\.LossScaleOptimizer"):
            model.optimizer.build(model.trainable_variables)


# Checkpoints, under another number of replicas or none.


def not_clipped():
    # Clipping would hide a window that is divided by too much.
    return keras.optimizers.SGD(0.05, momentum=0.9)


def half_trained(strategy):
    """Two micro-batches in an open window, after one update."""
    data = rows((N + 2) * MICRO_BATCH)
    return trained(not_clipped, MICRO_BATCH, strategy=strategy, steps=N, data=data, epochs=1)


def ready(strategy):
    with (strategy or tf.distribute.get_strategy()).scope():
        model = dense_model(seed=1)
        optimizer = accumulating(not_clipped(), N)
        model.compile(optimizer, loss="mse")
        optimizer.build(model.trainable_variables)
    return model, optimizer


def totals(optimizer):
    """What the accumulators hold in all, and the counters."""
    store = {}
    optimizer.save_own_variables(store)
    return {k: np.asarray(v) for k, v in store.items()}


# Each kind of file into the strategy and out of it, and once within it.
@pytest.mark.parametrize(
    ("kind", "saved_under", "loaded_under"),
    [
        *((kind, *way) for kind in ("keras", "checkpoint") for way in ((0, 1), (1, 0))),
        ("weights", 1, 1),
    ],
)
def test_an_open_window_travels_between_strategies(tmp_path, kind, saved_under, loaded_under):
    source, target = [(None, STRATEGY)[i] for i in (saved_under, loaded_under)]
    model, optimizer = half_trained(source)
    if kind == "keras":
        model.save(tmp_path / "m.keras")
        with (target or tf.distribute.get_strategy()).scope():
            loaded = keras.saving.load_model(tmp_path / "m.keras")
        its = loaded.optimizer
    else:
        loaded, its = ready(target)
        if kind == "weights":
            model.save_weights(tmp_path / "m.weights.h5")
            loaded.load_weights(tmp_path / "m.weights.h5")
        else:
            path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "c"))
            tf.train.Checkpoint(model=loaded, optimizer=its).restore(path).assert_consumed()
    before, after = totals(optimizer), totals(its)
    assert before.keys() == after.keys()
    for key in before:
        np.testing.assert_allclose(after[key], before[key], rtol=1e-6, atol=1e-7)
    assert int(after["pending"]) == 2
    more = rows(2 * N * MICRO_BATCH, seed=1)
    for each in (model, loaded):
        each.fit(*more, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    assert_close(values(loaded.trainable_variables), values(model.trainable_variables))
    assert_equal(values([its.iterations, its.pending]), [3, 2])


# Refusals.


def test_an_optimizer_built_without_the_strategy_is_refused():
    model = dense_model()
    optimizer = accumulating(momentum(), N)
    optimizer.build(model.trainable_variables)
    gradients = [tf.ones(v.shape) for v in model.trainable_variables]
    with pytest.raises(ValueError, match="must be built under the strategy that it is used under"):
        STRATEGY.run(lambda: optimizer.apply(gradients, model.trainable_variables))


def test_apply_outside_the_strategy_is_refused():
    with STRATEGY.scope():
        model = dense_model()
        optimizer = accumulating(momentum(), N)
        optimizer.build(model.trainable_variables)
    gradients = [tf.ones(v.shape) for v in model.trainable_variables]
    with pytest.raises(ValueError, match=r"Call it within strategy\.run"):
        optimizer.apply(gradients, model.trainable_variables)


def test_weights_without_accumulators_are_refused():
    with STRATEGY.scope():
        model = dense_model()
        optimizer = accumulating(momentum(), 1)
        optimizer.build(model.trainable_variables)
    gradients = [tf.ones(v.shape) for v in model.trainable_variables]
    with pytest.raises(ValueError, match=r"need accumulators under `tf\.distribute`"):
        STRATEGY.run(lambda: optimizer.apply(gradients, model.trainable_variables, weight=2))
