"""The optimizer survives configs, `.keras` files and weight files, in mid-window too.

Resuming must be bit-identical to never having stopped, so weights are compared exactly here.
"""

import copy
import json
import os
import subprocess
import sys
import zipfile

import h5py
import keras
import numpy as np
import pytest
from keras import optimizers
from support import (
    BACKEND,
    MICRO_BATCH,
    N,
    accumulating,
    assert_close,
    assert_differ,
    assert_equal,
    dense_model,
    rows,
    values,
)

import keras_ga

# Ten micro-batches: two windows, and two micro-batches in the third.
ROWS = 10 * MICRO_BATCH
PENDING = 2


@keras.saving.register_keras_serializable(package="test_serialisation")
class Stubborn(optimizers.SGD):
    """A user's own optimizer, registered."""

    def __init__(self, learning_rate=0.1, stubbornness=0.5, name="stubborn", **kwargs):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.stubbornness = stubbornness

    def get_config(self):
        return {**super().get_config(), "stubbornness": self.stubbornness}


class Unregistered(optimizers.SGD):
    """A user's own optimizer that nobody has registered."""


@keras.saving.register_keras_serializable(package="test_serialisation")
def growing(update):
    """N = 2 for two updates, then 4."""
    return keras.ops.where(update < 2, 2, 4)


@keras.saving.register_keras_serializable(package="test_serialisation")
class Growing:
    """The same, with settings of its own."""

    def __init__(self, until, steps):
        self.until, self.steps = until, steps

    def __call__(self, update):
        return keras.ops.where(update < self.until, *self.steps)

    def get_config(self):
        return {"until": self.until, "steps": self.steps}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def adam_with_schedule():
    return optimizers.Adam(
        optimizers.schedules.CosineDecay(0.01, 10, warmup_target=0.02, warmup_steps=2),
        beta_1=0.8,
        weight_decay=0.01,
        clipnorm=2.0,
    )


def two_optimizers():
    if not hasattr(optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.SGD(0.1, momentum=0.9), {".*kernel": optimizers.Adam(0.02)}
        )
    )


INNER = {
    "Adam with a schedule": adam_with_schedule,
    "SGD": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True, global_clipnorm=1.0),
    "MultiOptimizer": two_optimizers,
    "registered": lambda: Stubborn(stubbornness=0.25),
}

# Arguments of the wrapper, none of them a default.
ARGUMENTS = {
    "reduction": "sum",
    "accumulator_dtype": "bfloat16",
    "nonfinite": "drop",
    "name": "patience",
}


def through_json(config):
    return json.loads(json.dumps(config))


def assert_same_settings(copied, original):
    assert type(copied) is type(original)
    assert copied.get_config() == original.get_config()
    assert type(copied.inner_optimizer) is type(original.inner_optimizer)
    for name, value in ARGUMENTS.items():
        assert getattr(copied, name) == getattr(original, name) == value


WAYS = {
    "from_config": lambda o: type(o).from_config(through_json(o.get_config())),
    "keras.optimizers": lambda o: optimizers.deserialize(through_json(optimizers.serialize(o))),
    "keras.optimizers.get": lambda o: optimizers.get(through_json(optimizers.serialize(o))),
    "keras.saving": lambda o: keras.saving.deserialize_keras_object(
        through_json(keras.saving.serialize_keras_object(o))
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("inner", INNER)
def test_config_round_trip(inner):
    original = accumulating(INNER[inner](), **ARGUMENTS)
    config = original.get_config()
    assert through_json(config) == config
    for way in WAYS.values():
        copied = way(original)
        assert copied is not original
        assert copied.inner_optimizer is not original.inner_optimizer
        assert_same_settings(copied, original)
        assert copied.accumulation_steps == N


def test_numpy_steps_become_plain_json():
    config = accumulating("sgd", np.int64(3)).get_config()
    assert through_json(config)["accumulation_steps"] == 3
    assert type(config["accumulation_steps"]) is int


def test_get_config_holds_the_whole_constructor():
    """A new argument of the constructor must not be lost on saving."""
    import inspect

    arguments = [
        name
        for name, parameter in inspect.signature(
            keras_ga.GradientAccumulationOptimizer
        ).parameters.items()
        # The model that is adjusted is not the optimizer's to save.
        if parameter.kind is not parameter.VAR_KEYWORD and name != "model"
    ]
    assert sorted(accumulating("sgd").get_config()) == sorted(arguments)


@pytest.mark.parametrize(
    "schedule", [growing, Growing(2, [2, 4])], ids=["registered function", "registered class"]
)
def test_schedule_of_steps_round_trip(schedule):
    original = accumulating(optimizers.SGD(0.1), schedule, **ARGUMENTS)
    for way in WAYS.values():
        copied = way(original)
        assert_same_settings(copied, original)
        assert copied.accumulation_steps == 2
        copied.build(dense_model().trainable_variables)
        copied.inner_optimizer.iterations.assign(2)
        assert copied.accumulation_steps == 4


@pytest.mark.parametrize("built", [False, True], ids=["not built", "built"])
@pytest.mark.parametrize("steps", [2, 7])
def test_steps_set_at_run_time_are_kept_with_their_room(built, steps):
    """A copy has the N that was set, and accumulators even if that is 1 for now."""
    original = accumulating("sgd", N, **ARGUMENTS)
    if built:
        original.build(dense_model().trainable_variables)
    original.accumulation_steps = steps
    copied = WAYS["keras.saving"](original)
    assert_same_settings(copied, original)
    assert copied.accumulation_steps == steps
    copied.accumulation_steps = 1
    once_more = WAYS["from_config"](copied)
    assert once_more.accumulation_steps == 1
    once_more.build(dense_model().trainable_variables)
    once_more.accumulation_steps = N
    assert once_more.accumulation_steps == N


def test_a_copy_accumulates_as_the_original_does():
    original = accumulating(optimizers.SGD(0.1), N, reduction="sum")
    original.accumulation_steps = 2
    results = []
    for optimizer in (original, WAYS["keras.saving"](original)):
        variable = keras.Variable([1.0])
        for gradient in (1.0, 2.0, 4.0):
            optimizer.apply([keras.ops.convert_to_tensor([gradient])], [variable])
        results.append(values([variable]))
    # One update with the sum of the first two; the third waits.
    assert_close(results[0], [np.array([0.7])])
    assert_equal(results[1], results[0])


def test_config_keeps_a_rate_that_a_callback_has_set():
    original = accumulating(optimizers.SGD(0.5))
    original.learning_rate = 0.25
    assert float(WAYS["keras.saving"](original).learning_rate) == 0.25


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("schedule", [N, Growing(2, [2, 4])], ids=["int", "schedule"])
def test_from_config_leaves_the_callers_dict_untouched(inner, schedule):
    config = accumulating(INNER[inner](), schedule, **ARGUMENTS).get_config()
    before = copy.deepcopy(config)
    first = keras_ga.GradientAccumulationOptimizer.from_config(config)
    assert config == before
    second = keras_ga.GradientAccumulationOptimizer.from_config(config)
    assert second.get_config() == first.get_config() == before


def test_from_config_leaves_a_run_time_steps_entry_untouched():
    optimizer = accumulating("sgd")
    optimizer.build(dense_model().trainable_variables)
    optimizer.accumulation_steps = 2
    config = optimizer.get_config()
    before = copy.deepcopy(config)
    assert keras_ga.GradientAccumulationOptimizer.from_config(config).accumulation_steps == 2
    assert config == before


def test_custom_objects_reach_the_inner_optimizer():
    config = accumulating(Unregistered(0.3)).get_config()
    # As if its module could not be imported where it is loaded.
    config["optimizer"]["module"] = None
    copied = keras_ga.GradientAccumulationOptimizer.from_config(
        config, custom_objects={"Unregistered": Unregistered}
    )
    assert type(copied.inner_optimizer) is Unregistered
    with keras.saving.custom_object_scope({"Unregistered": Unregistered}):
        copied = WAYS["keras.optimizers"](accumulating(Unregistered(0.3)))
    assert type(copied.inner_optimizer) is Unregistered


def test_a_config_may_name_the_inner_optimizer():
    """Written by hand: what the constructor takes, `from_config` takes."""
    config = {"optimizer": "adam", "accumulation_steps": 3}
    optimizer = keras_ga.GradientAccumulationOptimizer.from_config(config)
    assert optimizer.inner_optimizer.name == "adam"
    assert optimizer.accumulation_steps == 3


# Files.


def functional_model(optimizer=None):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(7, activation="tanh")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    model.compile(optimizer=optimizer or accumulating(optimizers.Adam(0.02)), loss="mse")
    return model


def sequential_model(optimizer=None):
    model = dense_model()
    model.compile(optimizer=optimizer or accumulating(optimizers.Adam(0.02)), loss="mse")
    return model


def fit(model, data):
    model.fit(*data, batch_size=MICRO_BATCH, shuffle=False, verbose=0)


def everything(model):
    return model.get_weights() + values(model.optimizer.variables)


CONTINUE = f"""
import sys
import keras, keras_ga
import numpy as np

data = np.load("data.npz")
model = keras.models.load_model("model.keras")
optimizer = model.optimizer
print(type(optimizer).__name__, int(optimizer.pending), int(optimizer.iterations))
model.fit(data["x"], data["y"], batch_size={MICRO_BATCH}, shuffle=False, verbose=0)
arrays = [keras.ops.convert_to_numpy(v) for v in (*model.weights, *optimizer.variables)]
np.savez("result.npz", *arrays)
"""


def run_in_a_new_process(script, folder):
    """Runs a script on the same backend; warnings are errors there as well."""
    environment = dict(os.environ, KERAS_BACKEND=BACKEND, TF_CPP_MIN_LOG_LEVEL="3")
    done = subprocess.run(
        [sys.executable, "-W", "error:::keras_ga", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.quick
def test_a_keras_file_of_mid_window_goes_on_in_a_new_process(tmp_path):
    """It takes `import keras, keras_ga` there, and no custom objects."""
    data = rows(ROWS)
    model = sequential_model()
    fit(model, data)
    assert int(model.optimizer.pending) == PENDING
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "data.npz", x=data[0], y=data[1])
    output = run_in_a_new_process(CONTINUE, tmp_path)
    assert output.split()[-3:] == ["GradientAccumulationOptimizer", str(PENDING), "2"]
    before = everything(model)
    fit(model, data)
    with np.load(tmp_path / "result.npz") as stored:
        result = [stored[name] for name in stored.files]
    assert_equal(result, everything(model))
    assert_differ(result[:4], before[:4])


@pytest.mark.parametrize("make_model", [functional_model, sequential_model])
def test_a_keras_file_loads_in_the_same_process(tmp_path, make_model):
    model = make_model()
    model.optimizer.accumulation_steps = 3
    fit(model, rows(ROWS))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.accumulation_steps == 3
    assert_equal(everything(loaded), everything(model))
    for each in (model, loaded):
        fit(each, rows(ROWS, seed=1))
    assert_equal(everything(loaded), everything(model))


@pytest.mark.quick
@pytest.mark.parametrize("same_names", [True, False])
def test_weights_file_of_mid_window(tmp_path, same_names):
    model = sequential_model()
    fit(model, rows(ROWS))
    model.save_weights(tmp_path / "mid.weights.h5")
    if same_names:
        keras.utils.clear_session()
    loaded = sequential_model()
    loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(tmp_path / "mid.weights.h5")
    assert int(loaded.optimizer.pending) == PENDING
    assert_equal(everything(loaded), everything(model))
    for each in (model, loaded):
        fit(each, rows(ROWS, seed=1))
    assert_equal(everything(loaded), everything(model))


def test_loading_over_an_open_window_leaves_nothing_of_it(tmp_path):
    """A model that has gone on is set back, on torch the host's copies of counters too."""
    model = sequential_model()
    fit(model, rows(ROWS))
    model.save_weights(tmp_path / "mid.weights.h5")
    results = []
    for _ in range(2):
        fit(model, rows(ROWS + MICRO_BATCH, seed=1))
        results.append(everything(model))
        model.load_weights(tmp_path / "mid.weights.h5")
        assert int(model.optimizer.pending) == PENDING
    assert_equal(results[1], results[0])


def test_loaded_weights_keep_the_steps_of_this_optimizer(tmp_path):
    """N is a setting, not state: a checkpoint brings back the window, not another N."""
    model = sequential_model()
    fit(model, rows(ROWS))
    model.save_weights(tmp_path / "mid.weights.h5")
    keras.utils.clear_session()
    loaded = sequential_model(accumulating(optimizers.Adam(0.02), 3))
    loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(tmp_path / "mid.weights.h5")
    assert loaded.optimizer.accumulation_steps == 3
    assert (int(loaded.optimizer.pending), int(loaded.optimizer.iterations)) == (PENDING, 2)
    fit(loaded, rows(MICRO_BATCH))
    assert (int(loaded.optimizer.pending), int(loaded.optimizer.iterations)) == (0, 3)


def stored_in(file):
    """{path: array} of a weights file."""
    found = {}
    with h5py.File(file) as weights:
        weights.visititems(
            lambda path, item: (
                found.update({path: item[()]}) if isinstance(item, h5py.Dataset) else None
            )
        )
    return found


@pytest.mark.parametrize(
    ("inner", "slots"),
    [(lambda: optimizers.Adam(0.02), 2), (lambda: optimizers.SGD(0.1, momentum=0.9), 1)],
    ids=["Adam", "SGD"],
)
def test_the_inner_optimizers_state_is_stored_once(tmp_path, inner, slots):
    # Only the first kernel has this shape.
    model = functional_model(accumulating(inner()))
    fit(model, rows(ROWS))
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        archive.extract("model.weights.h5", tmp_path)
    stored = stored_in(tmp_path / "model.weights.h5")
    kernels = [path for path, array in stored.items() if array.shape == (5, 7)]
    under = [path.rsplit("/vars/")[0] for path in kernels]
    assert under.count("optimizer/inner_optimizer") == slots
    assert under.count("optimizer") == 1  # the accumulator
    assert len(kernels) == 1 + slots + 1
    of_the_optimizer = [path for path in stored if path.startswith("optimizer/")]
    # All but N, which is in the config; and the format's number.
    assert len(of_the_optimizer) == len(model.optimizer.variables) - 1 + 1


def test_variables_have_unique_paths():
    """Orbax and `tf.train.Checkpoint` store by path, and two layers may have one name."""
    inputs = keras.Input((3,))
    first, second = keras.layers.Dense(3, name="twin"), keras.layers.Dense(3, name="twin_1")
    second._name = "twin"
    model = keras.Model(inputs, second(first(inputs)))
    optimizer = accumulating("adam")
    optimizer.build(model.trainable_variables)
    paths = [variable.path for variable in optimizer._variables]
    assert len(set(paths)) == len(paths)


@pytest.mark.parametrize("inner", ["MultiOptimizer", "registered"])
def test_a_keras_file_keeps_other_inner_optimizers(tmp_path, inner):
    model = functional_model(accumulating(INNER[inner](), **{**ARGUMENTS, "reduction": "mean"}))
    fit(model, rows(ROWS))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_equal(everything(loaded), everything(model))
    for each in (model, loaded):
        fit(each, rows(ROWS, seed=1))
    assert_equal(everything(loaded), everything(model))


# Under mixed_float16, where `compile` puts a LossScaleOptimizer outside.


@pytest.fixture
def mixed_float16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


@pytest.mark.usefixtures("mixed_float16")
def test_inside_a_loss_scale(tmp_path):
    model = functional_model()
    outer = model.optimizer
    assert type(outer) is optimizers.LossScaleOptimizer
    assert type(outer.inner_optimizer) is keras_ga.GradientAccumulationOptimizer
    outer.initial_scale = 64.0  # the default overflows here, and is halved in a skipped step
    fit(model, rows(ROWS))
    assert int(outer.inner_optimizer.pending) == PENDING
    config = through_json(optimizers.serialize(outer))
    assert optimizers.deserialize(copy.deepcopy(config)).get_config() == outer.get_config()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is optimizers.LossScaleOptimizer
    assert_equal(everything(loaded), everything(model))
    for each in (model, loaded):
        fit(each, rows(ROWS, seed=1))
    assert int(loaded.optimizer.inner_optimizer.iterations) == 5
    assert_equal(everything(loaded), everything(model))
