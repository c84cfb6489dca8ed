"""What is done to the BatchNormalization layers of a model, on every kind of model."""

import copy
import json
import pickle
import types
import warnings

import keras
import numpy as np
import pytest
from support import (
    LARGE_BATCH,
    MICRO_BATCH,
    N,
    accumulating,
    assert_close,
    assert_differ,
    assert_equal,
    rows,
    values,
)
from test_layers import batch_norm_model, images, sgd, statistics, trained

import keras_ga
from keras_ga import batch_norm

Stock = keras.layers.BatchNormalization
Pooled = keras_ga.layers.BatchNormalization


@pytest.fixture
def needed_advice(monkeypatch):
    monkeypatch.setattr(batch_norm._Advice, "needed", True)


# Momentum.


class Containers(keras.Model):
    """Holds nine layers in all the ways that Keras tracks."""

    def __init__(self):
        super().__init__()
        self.single = Stock(momentum=0.9, name="single")
        self.in_list = [Stock(momentum=0.8), [Stock(momentum=0.7)]]
        self.in_dict = {"a": Stock(), "b": (Stock(),)}
        self.wrapped = keras.layers.TimeDistributed(Stock())
        inputs = keras.Input((3,))
        self.functional = keras.Model(inputs, Stock()(inputs))
        self.sequential = keras.Sequential([keras.layers.Dense(3), Stock()])
        self.shared = self.single
        self.last = Stock()

    def call(self, x, training=None):
        for layer in (
            self.single,
            self.in_list[0],
            self.in_list[1][0],
            self.in_dict["a"],
            self.in_dict["b"][0],
        ):
            x = layer(x, training=training)
        x = self.wrapped(x[:, None], training=training)[:, 0]
        return self.last(self.sequential(self.functional(x, training=training), training=training))


def momenta(model):
    return [layer.momentum for layer in batch_norm.layers_of(model)]


@pytest.mark.filterwarnings("ignore:Running statistics may be off")
@pytest.mark.parametrize("built", [False, True])
def test_every_kind_of_container_is_searched(built):
    model = Containers()
    if built:
        model(np.zeros((2, 3), "float32"))
    before = momenta(model)
    table = batch_norm.adjust_momentum(model, 4)
    assert len(table) == len(before) == 9
    assert momenta(model) == [m**0.25 for m in before]
    assert [row.note for row in table].count("called at each time step: moves that often") == 1
    batch_norm.restore_momentum(model)
    assert momenta(model) == before


APPLICATIONS = {"ResNet50": 53, "MobileNetV2": 52, "EfficientNetB0": 49}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "MobileNetV2" else pytest.mark.slow)
        for name in APPLICATIONS
    ],
)
def test_keras_applications(name):
    model = getattr(keras.applications, name)(weights=None, input_shape=(32, 32, 3))
    before = momenta(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is called twice, though it is in other models
        head = keras.Sequential([keras.Input((32, 32, 3)), model, keras.layers.Dense(2)])
        table = batch_norm.adjust_momentum(head, 8)
    assert len(table) == APPLICATIONS[name]
    assert momenta(model) == [m ** (1 / 8) for m in before]


def test_keras_hub_models_have_momenta_of_their_own():
    keras_hub = pytest.importorskip("keras_hub")
    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        image_shape=(16, 16, 3),
    )
    before = momenta(backbone)
    assert set(before) == {0.9}
    batch_norm.adjust_momentum(backbone, 2)
    assert momenta(backbone) == [m**0.5 for m in before]
    clone = type(backbone).from_config(backbone.get_config())
    assert momenta(clone) == before


def simple(momentum=0.9, **arguments):
    return batch_norm_model(Stock(momentum=momentum, **arguments))


def test_adjusting_again_starts_from_the_original():
    model = simple()
    batch_norm.adjust_momentum(model, 4)
    batch_norm.adjust_momentum(model, 4)
    assert momenta(model) == [0.9**0.25]
    batch_norm.adjust_momentum(model, 8)
    assert momenta(model) == [0.9**0.125]
    batch_norm.adjust_momentum(model, 1)
    assert momenta(model) == [0.9]
    assert "get_config" not in vars(model.layers[1])


def test_a_momentum_that_was_set_since_is_the_new_original():
    model = simple()
    batch_norm.adjust_momentum(model, 4)
    model.layers[1].momentum = 0.5
    assert model.layers[1].get_config()["momentum"] == 0.5
    batch_norm.adjust_momentum(model, 2)
    assert momenta(model) == [0.5**0.5]
    batch_norm.restore_momentum(model)
    assert momenta(model) == [0.5]


def saved_and_loaded(model, tmp_path):
    model.save(tmp_path / "m.keras")
    return keras.saving.load_model(tmp_path / "m.keras")


COPIES = {
    "save": saved_and_loaded,
    "clone": lambda model, _: keras.models.clone_model(model),
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "json": lambda model, _: keras.models.model_from_json(model.to_json()),
    "config": lambda model, _: type(model).from_config(model.get_config()),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_have_the_original_momentum(how, tmp_path):
    model = simple()
    batch_norm.adjust_momentum(model, 8)
    other = COPIES[how](model, tmp_path)
    assert momenta(other) == [0.9]
    assert momenta(model) == [0.9 ** (1 / 8)]
    batch_norm.adjust_momentum(other, 8)
    assert momenta(other) == [0.9 ** (1 / 8)]


def test_the_json_of_an_adjusted_model_has_the_original():
    model = simple()
    expected = json.loads(model.to_json())
    batch_norm.adjust_momentum(model, 8)
    assert json.loads(model.to_json()) == expected


@pytest.mark.skipif(not hasattr(Stock(), "renorm"), reason="this Keras has no renorm")
def test_renorm_has_a_momentum_of_its_own():
    layer = Stock(momentum=0.9, renorm=True, renorm_momentum=0.8)
    model = batch_norm_model(layer)
    batch_norm.adjust_momentum(model, 4)
    assert (layer.momentum, layer.renorm_momentum) == (0.9**0.25, 0.8**0.25)
    config = layer.get_config()
    assert (config["momentum"], config["renorm_momentum"]) == (0.9, 0.8)
    layer.renorm_momentum = 0.5
    batch_norm.restore_momentum(model)
    assert (layer.momentum, layer.renorm_momentum) == (0.9, 0.5)


@pytest.mark.parametrize("mode", [{}, {"run_eagerly": True}], ids=["compiled", "eager"])
def test_takes_effect_after_a_fit(mode):
    """A traced step has the momentum that it was traced with."""
    x, y = rows(N * MICRO_BATCH)
    model = trained(Stock(momentum=0.9), accumulating(sgd()), MICRO_BATCH, data=(x, y), **mode)
    batch_norm.adjust_momentum(model, N)
    layer = model.layers[1]
    layer.moving_mean.assign(np.zeros(6))
    model.train_on_batch(x[:MICRO_BATCH], y[:MICRO_BATCH])
    batch_mean = (x[:MICRO_BATCH] @ model.get_weights()[0]).mean(0)
    np.testing.assert_allclose(statistics(layer)[0] / batch_mean, 1 - 0.9**0.25, atol=1e-5)


def test_forgets_per_window_as_it_did_per_step():
    x, y = rows(LARGE_BATCH)
    models = {}
    for name, momentum, arguments in (("adjusted", 0.9, True), ("alone", 0.9, False)):
        model = simple(momentum)
        optimizer = keras_ga.GradientAccumulationOptimizer(
            sgd(), N, model=model if arguments else None
        )
        model.compile(optimizer, loss="mse")
        before = statistics(model.layers[1])[1]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "After 1 updates")
            model.fit(x, y, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
        hidden = (x @ model.get_weights()[0]).reshape(N, MICRO_BATCH, -1)
        moved = statistics(model.layers[1])[1]
        weights = model.layers[1].momentum ** np.arange(N)[::-1]
        added = (1 - model.layers[1].momentum) * np.tensordot(weights, hidden.var(1), 1)
        models[name] = ((moved - added) / before)[0]
    assert models["adjusted"] == pytest.approx(0.9, rel=1e-5)
    assert models["alone"] == pytest.approx(0.9**N, rel=1e-5)


@pytest.mark.parametrize(("micro_batch", "expected"), [(4, -0.238), (2, -0.484)])
def test_the_variance_between_micro_batches_is_missed_as_predicted(micro_batch, expected):
    """(1 - 1/b) / (1 - 1/(N b)) - 1 for a layer without spatial axes."""
    updates, steps = 20, 16
    rng = np.random.default_rng(0)
    x = rng.normal(size=(updates * steps, micro_batch, 64)).astype("float32")
    large, adjusted, pooled = Stock(momentum=0.9), Stock(momentum=0.9), Pooled(momentum=0.9)
    model = keras.Sequential([keras.Input((64,)), adjusted])
    batch_norm.adjust_momentum(model, steps)
    pooled.accumulation_steps = steps
    for layer in (adjusted, pooled):
        for batch in x:
            layer(batch, training=True)
    for batch in x.reshape(updates, steps * micro_batch, 64):
        large(batch, training=True)
    start = 0.9**updates  # of the initial variance, 1
    bias = [
        ((statistics(layer)[1] - start) / (statistics(large)[1] - start)).mean() - 1
        for layer in (adjusted, pooled)
    ]
    assert bias[0] == pytest.approx(expected, abs=0.02)
    assert bias[1] == pytest.approx(0, abs=1e-6)


def test_a_model_of_the_table():
    model = simple()
    model.layers[1].trainable = False
    table = batch_norm.adjust_momentum(model, 4)
    path = model.layers[1].path
    assert str(table) == (
        f"{'layer'.ljust(len(path))}  momentum  adjusted  trainable  note\n"
        f"{path}  0.9       0.974004  no         frozen: does not move"
    )
    assert table[0]._asdict() == {
        "layer": path,
        "momentum": 0.9,
        "adjusted": 0.9**0.25,
        "trainable": False,
        "note": "frozen: does not move",
    }


def test_a_model_without_such_layers_has_an_empty_table():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert len(batch_norm.adjust_momentum(model, 4)) == 0
    batch_norm.restore_momentum(model)


def test_pooling_layers_are_left_as_they_are():
    model = batch_norm_model(Pooled(momentum=0.9, accumulation_steps=4))
    (row,) = batch_norm.adjust_momentum(model, 4)
    assert (row.adjusted, row.note) == (0.9, "pooled")


def test_warns_of_too_few_updates():
    with pytest.warns(UserWarning, match=r"lags: 37% of the initial statistics left after 100 upd"):
        batch_norm.adjust_momentum(simple(0.99), 4, updates=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch_norm.adjust_momentum(simple(0.99), 4, updates=300)


def test_warns_of_16_bit_statistics():
    with pytest.warns(UserWarning, match="running statistics in bfloat16: small steps are rounded"):
        batch_norm.adjust_momentum(simple(dtype="bfloat16"), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch_norm.adjust_momentum(simple(dtype="mixed_bfloat16"), 4)


def shared_model():
    inputs = keras.Input((3,))
    layer = Stock(name="shared")
    return keras.Model(inputs, layer(keras.layers.Dense(3)(layer(inputs))))


def test_warns_of_shared_layers():
    with pytest.warns(UserWarning, match=r"shared .*called 2 times per step: moves that often"):
        batch_norm.adjust_momentum(shared_model(), 4)


def test_a_model_that_is_called_twice_has_its_layers_called_twice():
    inner = simple()
    inputs = keras.Input((5,))
    outer = keras.Model(inputs, keras.layers.add([inner(inputs), inner(-inputs)]))
    with pytest.warns(UserWarning, match="called 2 times per step"):
        batch_norm.adjust_momentum(outer, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0,), ValueError, "`accumulation_steps` must be an int >= 1"),
        (("4",), TypeError, "`accumulation_steps` must be an int >= 1"),
        ((4, 0), ValueError, "`updates` must be an int >= 1"),
    ],
)
def test_bad_numbers_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        batch_norm.adjust_momentum(simple(), *arguments)


# The optimizer's model.


@pytest.mark.filterwarnings("ignore:After .* updates the running statistics")
def test_the_optimizer_leads_the_models_layers():
    model = simple()
    optimizer = accumulating(sgd(), 4, model=model)
    assert momenta(model) == [0.9**0.25]
    model.compile(optimizer, loss="mse")
    model.fit(*rows(), batch_size=MICRO_BATCH, verbose=0)
    optimizer.accumulation_steps = 2
    assert momenta(model) == [0.9**0.5]
    x, y = rows(MICRO_BATCH)
    model.layers[1].moving_mean.assign(np.zeros(6))
    model.train_on_batch(x, y)
    batch_mean = (x @ model.get_weights()[0]).mean(0)
    np.testing.assert_allclose(statistics(model.layers[1])[0] / batch_mean, 1 - 0.9**0.5, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:After .* updates the running statistics")
def test_a_scheduler_changes_momenta_within_fit():
    model = simple()
    model.compile(accumulating(sgd(), 4, model=model), loss="mse")
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(momenta(self.model)[0])

    scheduler = keras_ga.callbacks.AccumulationStepsScheduler({0: 1, 1: 4})
    x, y = rows(4 * MICRO_BATCH)
    before = statistics(model.layers[1])[1]
    model.fit(
        x, y, batch_size=MICRO_BATCH, epochs=2, shuffle=False, verbose=0,
        callbacks=[scheduler, Look()],
    )  # fmt: skip
    assert seen == [0.9, 0.9**0.25]
    # Four steps forgot 0.9 each, four more 0.9 together.
    hidden = (x @ model.get_weights()[0]).reshape(4, MICRO_BATCH, -1).var(1)
    expected = before
    for m in (0.9, 0.9**0.25):
        for variance in hidden:
            expected = m * expected + (1 - m) * variance
    assert_close([statistics(model.layers[1])[1]], [expected], 1e-5)


def test_layers_that_are_made_in_build_follow_too():
    class Late(keras.Model):
        def build(self, input_shape):
            self.norm = Stock(momentum=0.9)
            self.out = keras.layers.Dense(3)
            self.norm.build(input_shape)
            self.out.build(input_shape)

        def call(self, x, training=None):
            return self.out(self.norm(x, training=training))

    model = Late()
    model.compile(accumulating(sgd(), 4, model=model), loss="mse")
    with pytest.warns(UserWarning, match="After 3 updates the running statistics"):
        model.fit(*rows(), batch_size=MICRO_BATCH, verbose=0)
    assert momenta(model) == [0.9**0.25]


def test_the_optimizer_does_not_keep_its_model_alive():
    import gc
    import weakref

    model = simple()
    optimizer = accumulating(sgd(), 4, model=model)
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None
    optimizer.accumulation_steps = 2
    optimizer.flush()


@pytest.mark.filterwarnings("ignore:After .* updates the running statistics")
def test_a_model_is_not_part_of_the_config(tmp_path):
    model = simple()
    model.compile(accumulating(sgd(), 4, model=model), loss="mse")
    model.fit(*rows(), batch_size=MICRO_BATCH, verbose=0)
    assert "model" not in model.optimizer.get_config()
    loaded = saved_and_loaded(model, tmp_path)
    assert momenta(loaded) == [0.9]


def test_pooling_layers_of_the_optimizers_model_follow_its_window():
    model = batch_norm_model(Pooled(momentum=0.9, accumulation_steps=2))
    layer, optimizer = model.layers[1], accumulating(sgd(), 4, model=model)
    assert layer.accumulation_steps == 4
    model.compile(optimizer, loss="mse")
    x, y = rows(2 * MICRO_BATCH)
    for start in (0, MICRO_BATCH):
        model.train_on_batch(x[start : start + MICRO_BATCH], y[start : start + MICRO_BATCH])
    optimizer.flush()
    hidden = x @ model.get_weights()[0]
    assert_close([statistics(layer)[0]], [0.1 * hidden.mean(0)])
    model.train_on_batch(x, y)
    optimizer.reset_window()
    assert (int(layer.window_step), int(optimizer.pending)) == (0, 0)
    optimizer.accumulation_steps = 3
    assert layer.accumulation_steps == 3


def test_a_training_too_short_for_its_momentum_ends_with_a_warning():
    model = simple(0.99)
    model.compile(accumulating(sgd(), 4, model=model), loss="mse")
    with pytest.warns(UserWarning, match="After 3 updates .* still hold 97% of what they were"):
        model.fit(*rows(), batch_size=MICRO_BATCH, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        model.fit(*rows(), batch_size=MICRO_BATCH, verbose=0)
    long = simple(0.3)
    long.compile(accumulating(sgd(), 4, model=long), loss="mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        long.fit(*rows(), batch_size=MICRO_BATCH, verbose=0)


def test_the_model_must_be_one():
    with pytest.raises(TypeError, match=r"`model` must be a `keras\.Model`"):
        accumulating("sgd", 4, model=Stock())
    steps = keras_ga.schedules.PiecewiseConstantSteps([10], [1, 4])
    with pytest.raises(ValueError, match="`model` must be left out with a schedule"):
        accumulating("sgd", steps, model=simple())


def test_a_new_optimizer_for_the_model_starts_an_empty_window():
    """As after freezing: what is left of the last one would be in every window from here on."""
    layer = Pooled(momentum=0.9, accumulation_steps=N)
    model = batch_norm_model(layer)
    for count, left in ((5, 1), (4, 0)):
        model.compile(accumulating(sgd(), N, model=model), loss="mse")
        x, y = rows(count * MICRO_BATCH)
        before = statistics(layer)[0]
        model.fit(x, y, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
        assert int(layer.window_step) == int(model.optimizer.pending) == left
    hidden = x @ model.get_weights()[0]
    assert_close([statistics(layer)[0]], [0.9 * before + 0.1 * hidden.mean(0)])


def test_weights_that_are_set_leave_the_window_in_step():
    data = rows(5 * MICRO_BATCH)
    best = keras.callbacks.EarlyStopping("loss", restore_best_weights=True, patience=9)
    layer = Pooled(momentum=0.9, accumulation_steps=N)
    optimizer = accumulating(keras.optimizers.SGD(1e3), N)
    model = trained(layer, optimizer, MICRO_BATCH, data=data, epochs=2, callbacks=[best])
    assert int(optimizer.pending) == int(layer.window_step) == 2
    stock = batch_norm_model(Stock())
    stock.set_weights(model.get_weights())
    other = batch_norm_model(Pooled(accumulation_steps=3))
    other.set_weights(model.get_weights())
    assert int(other.layers[1].window_length) == 3
    assert int(other.layers[1].window_step) == 0


# Conversion.


def converted(model, steps=N):
    batch_norm.convert(model, steps)
    return model


@pytest.mark.parametrize("mode", [{}, {"run_eagerly": True}], ids=["compiled", "eager"])
def test_a_trained_model_is_converted_and_goes_on(mode):
    data = rows()
    adam = keras.optimizers.Adam(0.01)
    model = trained(Stock(momentum=0.9), accumulating(adam), MICRO_BATCH, **mode)
    reference = trained(Stock(momentum=0.9), accumulating("adam"), MICRO_BATCH, **mode)
    reference.optimizer.learning_rate = 0.01
    x, y = data
    before = model.predict(x, verbose=0)
    weights, slots = list(model.trainable_variables), list(model.optimizer.variables)
    iterations = int(model.optimizer.iterations)
    assert batch_norm.convert(model, N) == 1
    assert all(a is b for a, b in zip(model.trainable_variables, weights, strict=True))
    assert all(a is b for a, b in zip(model.optimizer.variables, slots, strict=True))
    assert_equal([model.predict(x, verbose=0)], [before])
    model.fit(x, y, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == iterations + 3
    assert isinstance(model.layers[1], Pooled)
    held = statistics(model.layers[1])
    model.train_on_batch(x[:MICRO_BATCH], y[:MICRO_BATCH])
    assert_equal(statistics(model.layers[1]), held)


def test_conversion_pools_also_after_a_fit():
    model = trained(Stock(momentum=0.9), accumulating(sgd()), MICRO_BATCH)
    large = trained(Stock(momentum=0.9), sgd(), LARGE_BATCH)
    for one, other in zip(model.layers[1].weights, large.layers[1].weights, strict=True):
        one.assign(keras.ops.convert_to_numpy(other))
    batch_norm.convert(model, N)
    for each, batch_size in ((model, MICRO_BATCH), (large, LARGE_BATCH)):
        each.fit(*rows(), batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    assert_close(statistics(model.layers[1]), statistics(large.layers[1]))


def test_conversion_in_mid_window_stays_in_step():
    model = trained(
        Stock(momentum=0.9), accumulating(sgd()), MICRO_BATCH, data=rows(6 * MICRO_BATCH), epochs=1
    )
    assert int(model.optimizer.pending) == 2
    batch_norm.convert(model, N)
    model.fit(*rows(3 * MICRO_BATCH), batch_size=MICRO_BATCH, verbose=0)
    assert int(model.optimizer.pending) == int(model.layers[1].window_step) == 1


def mobilenet():
    return keras.applications.MobileNetV2(
        weights=None, alpha=0.35, input_shape=(32, 32, 3), classes=4
    )


def nested():
    inputs = keras.Input((4, 4, 3))
    return keras.Model(inputs, Stock()(conv_net()(inputs)))


@pytest.mark.parametrize(
    ("make", "layers", "weights"),
    [(nested, 3, 16), pytest.param(mobilenet, 52, 262, marks=pytest.mark.slow)],
)
def test_converts_and_reverts(tmp_path, make, layers, weights):
    model = make()
    x = np.random.default_rng(0).normal(size=(2, *model.input_shape[1:])).astype("float32")
    before = values([model(x)])
    count, states = len(model.weights), len(model.variables)
    assert batch_norm.convert(model, 4) == layers
    assert len(model.weights) == count
    assert len(model.variables) == states + 5 * layers
    assert_equal(values([model(x)]), before)
    assert batch_norm.revert(model) == layers
    assert len(model.weights) == count == weights
    assert len(model.variables) == states
    assert_equal(values([model(x)]), before)
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert {type(layer) for layer in batch_norm.layers_of(loaded)} == {Stock}
    assert_equal(values([loaded(x)]), before)


@pytest.mark.filterwarnings("ignore:After .* updates the running statistics")
def test_reverting_goes_on_as_stock():
    model = trained(Stock(momentum=0.9), accumulating(sgd()), MICRO_BATCH)
    batch_norm.convert(model, N)
    model.fit(*rows(), batch_size=MICRO_BATCH, verbose=0)
    assert batch_norm.revert(model) == 1
    assert batch_norm.revert(model) == 0
    assert type(model.layers[1]) is Stock
    before = statistics(model.layers[1])
    model.train_on_batch(*rows(MICRO_BATCH))
    assert_differ(statistics(model.layers[1]), before, by=0)


def test_an_adjusted_model_is_converted_with_its_original_momentum():
    model = simple()
    batch_norm.adjust_momentum(model, 4)
    batch_norm.convert(model, 4)
    assert momenta(model) == [0.9]
    batch_norm.convert(model, 8)  # again: another number of steps
    assert model.layers[1].accumulation_steps == 8


def test_subclassed_models_convert():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.norms = [Stock(momentum=0.9), Stock(momentum=0.9)]
            self.out = keras.layers.Dense(3)

        def call(self, x, training=None):
            for norm in self.norms:
                x = norm(x, training=training)
            return self.out(x)

    model = Net()
    model(np.zeros((2, 5), "float32"))
    assert batch_norm.convert(model, 4) == 2
    model.compile(accumulating(sgd()), loss="mse")
    model.fit(*rows(), batch_size=MICRO_BATCH, verbose=0)
    assert int(model.norms[0].window_step) == 0


class Derived(Stock):
    pass


def with_renorm():
    return batch_norm_model(Stock(renorm=True))


def time_distributed():
    return keras.Sequential([keras.Input((4, 3)), keras.layers.TimeDistributed(Stock())])


CANNOT = {
    "derived": (lambda: batch_norm_model(Derived()), "is of the derived class Derived"),
    "unbuilt": (lambda: keras.Sequential([Stock(name="bn")]), "bn is not built; build the model"),
    "shared": (shared_model, "shared is called 2 times per step"),
    "loop": (time_distributed, "is called at each time step"),
}
if hasattr(Stock(), "renorm"):
    CANNOT["renorm"] = (with_renorm, "has renorm=True")


@pytest.mark.parametrize("kind", CANNOT)
def test_what_cannot_be_converted_is_refused_and_nothing_changed(kind):
    make, text = CANNOT[kind]
    inputs = keras.Input((5,))
    fine = keras.Model(inputs, Stock(name="fine")(inputs))

    class Both(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [fine, make()]

    model = Both() if kind != "shared" else make()
    with pytest.raises(ValueError, match=f"{text}.*"):
        batch_norm.convert(model, 4)
    assert not batch_norm.pooled_layers(model)


def test_a_model_without_such_layers_is_not_converted():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="`model` must have a BatchNormalization layer"):
        batch_norm.convert(model, 4)
    assert batch_norm.revert(model) == 0


def test_another_number_of_steps_than_the_optimizers_is_warned_of():
    model = simple()
    model.compile(accumulating(sgd(), 6), loss="mse")
    with pytest.warns(UserWarning, match="pool over 3 micro-batches.*accumulates 6"):
        batch_norm.convert(model, 3)
    steps = keras_ga.schedules.PiecewiseConstantSteps([10], [3, 6])
    model.compile(accumulating(sgd(), steps), loss="mse")
    with pytest.warns(UserWarning, match="accumulates 3 and changes that"):
        batch_norm.convert(model, 3)


# Recalibration.


def conv_net():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((4, 4, 3)),
            Stock(),
            keras.layers.Dropout(0.5, seed=1),
            keras.layers.Conv2D(4, 3),
            Stock(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3),
        ]
    )


def batches_of(x, y=None, size=5):
    for start in range(0, len(x), size):
        at = slice(start, start + size)
        yield (x[at],) if y is None else (x[at], y[at])


@pytest.mark.parametrize("kind", ["array", "generator", "dataset"])
def test_statistics_are_those_of_the_data(kind):
    x = images(24)
    data, batch_size = x, 5
    if kind == "generator":
        data, batch_size = batches_of(x, np.zeros(24)), None
    if kind == "dataset":
        tf = pytest.importorskip("tensorflow")
        data, batch_size = tf.data.Dataset.from_tensor_slices((x, np.zeros(24))).batch(5), None
    model = conv_net()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        batch_norm.recalibrate(model, data, batch_size=batch_size, verbose=0)
    flat = x.reshape(-1, 3)
    assert_close(statistics(model.layers[0]), [flat.mean(0), flat.var(0)])
    assert {type(layer) for layer in batch_norm.layers_of(model)} == {Stock}


def test_recalibration_touches_nothing_else():
    x = images(24)
    model = conv_net()
    model.compile(accumulating(keras.optimizers.Adam()), loss="mse")
    y = np.zeros((24, 3), "float32")
    model.fit(x, y, batch_size=2, verbose=0)
    norms = batch_norm.layers_of(model)
    running = {id(v) for layer in norms for v in (layer.moving_mean, layer.moving_variance)}
    others = [v for v in model.variables if id(v) not in running]
    others += model.optimizer.variables
    before, moved = values(others), statistics(norms[0]) + statistics(norms[1])
    batch_norm.recalibrate(model, x, batch_size=8, verbose=0)
    assert_equal(values(others), before)
    assert_differ(statistics(norms[0]) + statistics(norms[1]), moved)
    model.fit(x, y, batch_size=2, verbose=0)  # goes on
    assert int(model.optimizer.iterations) == 6


def test_deeper_layers_see_their_batches_inputs():
    x = images(24)
    model = conv_net()
    model.layers[1].rate = 0.0
    batch_norm.recalibrate(model, x, batch_size=24, verbose=0)
    first, _, conv, second = model.layers[:4]
    hidden = keras.ops.convert_to_numpy(conv(first(x, training=False)))
    flat = hidden.reshape(-1, 4)
    assert_close(statistics(second), [flat.mean(0), flat.var(0)], 1e-5)


def test_shared_layers_get_the_statistics_of_all_their_calls():
    x = rows(12, features=3)[0]
    model = shared_model()
    batch_norm.recalibrate(model, x, batch_size=4, verbose=0)
    assert np.isfinite(statistics(model.get_layer("shared"))[0]).all()


def test_poisoned_statistics_are_cured():
    x = images(24)
    model = conv_net()
    model.layers[0].moving_mean.assign(np.full(3, np.nan))
    batch_norm.recalibrate(model, x, verbose=0)
    assert np.isfinite(statistics(model.layers[0])[0]).all()


def test_pooling_layers_keep_their_open_window():
    x, y = rows(6 * MICRO_BATCH)
    layer = Pooled(momentum=0.9, accumulation_steps=N)
    model = trained(layer, accumulating(sgd()), MICRO_BATCH, data=(x, y), epochs=1)
    window = values(layer._window_variables())
    batch_norm.recalibrate(model, x, verbose=0)
    assert_equal(values(layer._window_variables()), window)
    assert (type(layer), layer.accumulation_steps, int(layer.window_length)) == (Pooled, N, N)
    hidden = x @ model.get_weights()[0]
    assert_close(statistics(layer), [hidden.mean(0), hidden.var(0)])
    model.fit(x, y, batch_size=MICRO_BATCH, verbose=0)
    assert int(layer.window_step) == 0


def test_frozen_layers_are_left_alone():
    model = conv_net()
    model.layers[0].trainable = False
    before = statistics(model.layers[0])
    batch_norm.recalibrate(model, images(24), verbose=0)
    assert_equal(statistics(model.layers[0]), before)
    model.trainable = False
    with pytest.raises(ValueError, match="layer that is not frozen"):
        batch_norm.recalibrate(model, images(24), verbose=0)


def test_inputs_are_cast_by_the_layers_that_do_in_training():
    """Not by the model's policy: ids and large values would lose their digits."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        layers = [
            keras.Input((6,)),
            keras.layers.Normalization(mean=1e5, variance=4.0, dtype="float32"),
            Stock(dtype="float32"),
            keras.layers.Dense(1, dtype="float32"),
        ]
        model = keras.Sequential(layers)
        x = (1e5 + np.random.default_rng(0).normal(size=(32, 6))).astype("float32")
        batch_norm.recalibrate(model, x, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    expected = (x.astype("float64") - 1e5) / 2
    assert_close([statistics(model.layers[1])[0]], [expected.mean(0)], 1e-2)


def test_weights_that_a_forward_pass_changes_are_put_back():
    inner = keras.layers.SpectralNormalization(keras.layers.Dense(8))
    model = keras.Sequential([keras.Input((6,)), inner, Stock()])
    before = values(inner.variables)
    batch_norm.recalibrate(model, rows(32, features=6)[0], verbose=0)
    assert_equal(values(inner.variables), before)


def test_a_layer_that_is_not_called_in_training_mode_keeps_its_statistics():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.base, self.norm, self.unused = Stock(), Stock(), Stock()
            self.unused.build((None, 6))

        def call(self, x, training=None):
            return self.norm(self.base(x, training=False), training=training)

    x = rows(32, features=6)[0]
    model = Net()
    model(x)
    batch_norm.recalibrate(model, 3 + x, verbose=0)
    assert_equal([statistics(model.base)[0]], [np.zeros(6, "float32")])
    assert abs(statistics(model.norm)[0]).min() > 1
    only = Net()
    only(x)
    only.norm.trainable = False
    with pytest.raises(ValueError, match="must call a BatchNormalization layer in training mode"):
        batch_norm.recalibrate(only, x, verbose=0)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_no_data_is_an_error():
    with pytest.raises(ValueError, match="`data` must have a batch"):
        batch_norm.recalibrate(conv_net(), images(0), verbose=0)


class DataError(Exception):
    pass


def failing(x):
    for _ in range(6):
        yield (x[:8],)
    raise DataError


@pytest.mark.parametrize("fault", ["stops", "shape", "empty"])
def test_data_that_fails_changes_nothing(fault):
    model = conv_net()
    model.compile(accumulating(sgd()), loss="mse")
    x = images(24)
    before = values(model.variables)
    data = {"stops": failing(x), "shape": np.zeros((8, 5), "float32"), "empty": x * np.nan}[fault]
    with pytest.raises(Exception) as caught:  # noqa: PT011
        batch_norm.recalibrate(model, data, verbose=0)
    if fault == "empty":
        assert "`data` must have valid, finite entries" in str(caught.value)
    assert_equal(values(model.variables), before)
    assert {type(layer) for layer in batch_norm.layers_of(model)} == {Stock}
    model.fit(x, np.zeros((24, 3)), batch_size=6, verbose=0)


def test_shows_a_progress_bar(capsys):
    batch_norm.recalibrate(conv_net(), images(24), batch_size=8, verbose=1)
    assert "3/3" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["derived", "unbuilt"])
def test_what_cannot_be_recalibrated_is_named(kind):
    make, text = CANNOT[kind]
    with pytest.raises(ValueError, match=text):
        batch_norm.recalibrate(make(), np.zeros((2, 5)), verbose=0)


# Group normalisation.


def test_group_norm_takes_the_other_weights_over():
    inner = conv_net()
    inputs = keras.Input((4, 4, 3))
    model = keras.Model(inputs, [inner(inputs), Stock(axis=-1, center=False)(inputs)])
    inner.layers[3].gamma.assign([1.0, 2.0, 3.0, 4.0])
    copied = batch_norm.replace_with_group_norm(model, groups=1)
    assert not batch_norm.layers_of(copied)
    assert len(batch_norm.layers_of(model)) == 3
    copied_inner = copied.get_layer(inner.name)
    group_norm = copied_inner.layers[3]
    assert isinstance(group_norm, keras.layers.GroupNormalization)
    assert_equal(values([group_norm.gamma]), [np.array([1.0, 2.0, 3.0, 4.0], "float32")])
    assert_equal(copied_inner.layers[2].get_weights(), inner.layers[2].get_weights())
    assert_equal(copied_inner.layers[-1].get_weights(), inner.layers[-1].get_weights())


def test_group_norm_in_a_graph_with_operations():
    inputs = keras.Input((6,))
    scaled = keras.layers.Normalization()
    scaled.adapt(3 + rows(32, features=6)[0])
    hidden = keras.layers.Dense(6)(scaled(inputs))
    model = keras.Model(inputs, keras.ops.relu(Stock()(hidden)) + hidden)
    copied = batch_norm.replace_with_group_norm(model, groups=2)
    x = rows(8, features=6)[0]
    its = next(layer for layer in copied.layers if isinstance(layer, type(scaled)))
    assert_close(values([its(x)]), values([scaled(x)]))
    assert not batch_norm.layers_of(copied)


def test_group_norm_under_accumulation_is_the_large_batch():
    x = images(24)
    y = np.zeros((24, 3), "float32")
    results = []
    for optimizer, batch_size in (("sgd", 8), (accumulating("sgd", 4), 2)):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((4, 4, 3)), keras.layers.Conv2D(8, 3), Stock(), keras.layers.Flatten()]
        )
        model.add(keras.layers.Dense(3))
        model = batch_norm.replace_with_group_norm(model, groups=4)
        model.compile(optimizer, loss="mse")
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
        results.append(model.get_weights())
    assert_close(*results)


def test_groups_must_divide_the_channels():
    with pytest.raises(ValueError, match="groups=4 for 6 channels of"):
        batch_norm.replace_with_group_norm(simple(), groups=4)
    with pytest.raises(TypeError, match="`groups` must be an int >= 1"):
        batch_norm.replace_with_group_norm(simple(), groups=2.0)


def test_layers_out_of_reach_are_named():
    with pytest.raises(ValueError, match=r"Change its code.*in sequential/time_distributed"):
        batch_norm.replace_with_group_norm(time_distributed(), groups=1)
    model = Containers()
    model(np.zeros((2, 3), "float32"))
    with pytest.raises(ValueError, match="single in containers"):
        batch_norm.replace_with_group_norm(model, groups=1)


# Advice.


@pytest.mark.usefixtures("needed_advice")
def test_accumulating_over_batch_normalization_is_advised_once():
    with pytest.warns(UserWarning, match=r"The model has BatchNormalization .*recalibrate"):
        trained(Stock(), accumulating(sgd()), MICRO_BATCH)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The model has")
        trained(Stock(), accumulating(sgd()), MICRO_BATCH)


@pytest.mark.usefixtures("needed_advice")
@pytest.mark.parametrize("choice", ["adjust", "convert", "model", "one step", "layer norm"])
def test_no_advice_where_none_is_needed(choice):
    model = simple()
    if choice == "layer norm":
        model = keras.Sequential([keras.Input((5,)), keras.layers.LayerNormalization()])
        model.add(keras.layers.Dense(3))
    if choice == "adjust":
        batch_norm.adjust_momentum(model, N)
    if choice == "convert":
        batch_norm.convert(model, N)
    steps = 1 if choice == "one step" else N
    optimizer = accumulating(sgd(), steps, model=model if choice == "model" else None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The model has")
        optimizer.build(model.trainable_variables)


@pytest.mark.usefixtures("needed_advice")
@pytest.mark.parametrize("path", ["a/conv1_bn/gamma", "bn_Conv1/beta", "x/batchnorm_2/gamma"])
def test_names_that_are_recognised(path):
    with pytest.warns(UserWarning, match=path):
        batch_norm.advise([types.SimpleNamespace(path=path)])


@pytest.mark.parametrize("path", ["a/bn/kernel", "subnet/gamma", "ln/gamma", "group_norm/beta"])
@pytest.mark.usefixtures("needed_advice")
def test_names_that_are_not(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch_norm.advise([types.SimpleNamespace(path=path)])
