"""State that travels: between backends, versions, optimizers and processes."""

import copy
import os
import pickle
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import h5py
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
    held,
    rows,
    values,
)

import keras_ga

N = 4
DATA = Path(__file__).parent / "data"


def adam():
    return keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5)


def ready(optimizer=None, seed=1):
    """A model that is built and compiled, to load into."""
    model = dense_model(seed=seed)
    optimizer = accumulating(adam(), N) if optimizer is None else optimizer
    model.compile(optimizer=optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    return model


def go_on(model, micro_batches=6, seed=2):
    data = rows(micro_batches * MICRO_BATCH, seed=seed)
    model.fit(*data, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    return model.get_weights()


def stopped(micro_batches, optimizer=None):
    optimizer = accumulating(adam(), N) if optimizer is None else optimizer
    data = rows(micro_batches * MICRO_BATCH)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Training ended before its first update")
        model, _ = fitted(optimizer, MICRO_BATCH, data=data, epochs=1)
    return model


# Every place in a window.


@pytest.mark.parametrize("position", range(N))
def test_weights_file_at_every_position(tmp_path, position):
    model = stopped(N + position)
    model.save_weights(tmp_path / "m.weights.h5")
    loaded = ready()
    loaded.load_weights(tmp_path / "m.weights.h5")
    assert int(loaded.optimizer.pending) == position
    assert_equal(held(loaded.optimizer), held(model.optimizer))
    assert_equal(go_on(loaded), go_on(model))


@pytest.mark.parametrize("position", [0, 3])
def test_state_tree(position):
    """What Orbax saves, on JAX."""
    model = stopped(N + position)
    keras.utils.clear_session()  # the tree goes by names, as they are in a new process
    loaded = ready()
    loaded.set_state_tree(model.get_state_tree(value_format="numpy_array"))
    assert int(loaded.optimizer.pending) == position
    assert_equal(go_on(loaded), go_on(model))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own checkpoints")
@pytest.mark.parametrize("position", [0, 3])
def test_tensorflow_checkpoint_manager(tmp_path, position):
    import tensorflow as tf

    model = stopped(N + position)
    state = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    tf.train.CheckpointManager(state, str(tmp_path), max_to_keep=1).save()
    loaded = ready()
    state = tf.train.Checkpoint(model=loaded, optimizer=loaded.optimizer)
    manager = tf.train.CheckpointManager(state, str(tmp_path), max_to_keep=1)
    state.restore(manager.latest_checkpoint).assert_consumed()
    assert_equal(go_on(loaded), go_on(model))


COPIES = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_a_compiled_model(how):
    model = stopped(N + 1)
    other = COPIES[how](model)
    assert other.optimizer is not model.optimizer
    assert_equal(values(other.optimizer.variables), values(model.optimizer.variables))
    assert_equal(go_on(other), go_on(model))


def test_copies_of_an_optimizer_that_is_not_built():
    optimizer = accumulating(adam(), 3, reduction="sum")
    other = copy.deepcopy(optimizer)
    assert other.inner_optimizer is not optimizer.inner_optimizer
    assert other.get_config() == optimizer.get_config()


# The inner optimizer's own warning.
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer 'adam")
def test_loading_before_the_optimizer_is_built_is_told(tmp_path):
    stopped(N + 1).save_weights(tmp_path / "m.weights.h5")
    model = dense_model()
    model.compile(accumulating(adam(), N), loss="mse")
    with pytest.warns(UserWarning, match=r"Call `optimizer.build\(model.trainable_variables\)`"):
        model.load_weights(tmp_path / "m.weights.h5")


# Keras's own option.


BUILTINS = {
    "SGD": lambda **more: keras.optimizers.SGD(0.05, momentum=0.9, **more),
    "scheduled": lambda **more: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.2, 60), **more
    ),
    "averaging": lambda **more: keras.optimizers.SGD(0.05, use_ema=True, **more),
    "AdamW": lambda **more: keras.optimizers.AdamW(0.02, weight_decay=0.1, clipnorm=0.3, **more),
}


@pytest.mark.parametrize(
    ("name", "position"),
    [("SGD", 0), ("AdamW", 1), ("AdamW", N), ("scheduled", 1), ("averaging", 1)],
)
def test_a_training_with_the_built_in_option_goes_on(tmp_path, name, position):
    """Window, slots and counters are taken over from its file."""
    x, y = rows()
    before = (N + position) * MICRO_BATCH
    model = dense_model()
    optimizer = BUILTINS[name](gradient_accumulation_steps=N)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(optimizer, loss="mse")
    model.fit(x[:before], y[:before], batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    if name != "AdamW":  # no weight decay: nothing is lost that is in no file
        model.save(tmp_path / "m.keras")
        model = keras.saving.load_model(tmp_path / "m.keras")
    wrapper = keras_ga.GradientAccumulationOptimizer.from_builtin(model.optimizer)
    assert int(wrapper.iterations) == 1 + position // N
    assert int(wrapper.pending) == position % N
    builtin = model.optimizer
    held_by_builtin = values(builtin.variables)
    sums = {id(variable) for variable in builtin._accumulated_gradients}
    state = values(variable for variable in builtin.variables if id(variable) not in sums)
    assert_equal(values(wrapper.inner_optimizer.variables)[1:], state[1:])  # all but iterations
    model.compile(wrapper, loss="mse")
    model.fit(x[before:], y[before:], batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    if name != "averaging":  # whose fit sets the weights to averages, on JAX by their buffers
        assert_equal(values(builtin.variables), held_by_builtin)
    bare = BUILTINS[name]()
    bare.exclude_from_weight_decay(var_names=["bias"])
    large, _ = fitted(bare, LARGE_BATCH, epochs=1)
    if name == "scheduled":  # micro-batches are counted on
        bare = BUILTINS[name](gradient_accumulation_steps=N)
        large, _ = fitted(bare, MICRO_BATCH, epochs=1)
    if name != "averaging":  # Keras's averages move on each micro-batch
        assert_close(model.get_weights(), large.get_weights())
    assert int(wrapper.iterations) == int(bare.iterations)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_the_built_in_option_taken_over_leaves_alone_what_has_no_gradient():
    """Weight decay would show it."""
    ends = []
    for wrapped in (True, False):
        variables = [keras.Variable(np.ones(2, "float32")) for _ in range(2)]
        optimizer = BUILTINS["AdamW"](gradient_accumulation_steps=N)
        optimizer.build(variables)
        for step in range(2 * N):
            if wrapped and step == N + 1:
                optimizer = keras_ga.GradientAccumulationOptimizer.from_builtin(optimizer)
            optimizer.apply([keras.ops.ones((2,)), None], variables)
        ends.append(values(variables))
    assert_close(*ends)
    np.testing.assert_array_equal(ends[0][1], 1)


def test_an_optimizer_with_the_built_in_option_that_is_not_built():
    averaging = keras.optimizers.SGD(0.05, use_ema=True, gradient_accumulation_steps=N)
    wrapper = keras_ga.GradientAccumulationOptimizer.from_builtin(averaging, nonfinite="drop")
    assert (wrapper.accumulation_steps, wrapper.nonfinite) == (N, "drop")
    assert wrapper.inner_optimizer.use_ema
    assert not wrapper.built


# Keras's, and for the inner optimizer once more.
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_a_file_of_the_built_in_option_is_told(tmp_path):
    model = dense_model()
    model.compile(BUILTINS["SGD"](gradient_accumulation_steps=N), loss="mse")
    model.fit(*rows(), batch_size=MICRO_BATCH, verbose=0)
    model.save_weights(tmp_path / "m.weights.h5")
    model = dense_model()
    model.compile(accumulating(BUILTINS["SGD"](), N), loss="mse")
    model.optimizer.build(model.trainable_variables)
    with pytest.warns(UserWarning, match="may be of an optimizer with Keras's `gradient_accumu"):
        model.load_weights(tmp_path / "m.weights.h5")
    assert int(model.optimizer.iterations) == 0


# Another backend.

OTHERS = [
    backend
    for backend in ("tensorflow", "jax", "torch")
    if backend != BACKEND and find_spec(backend) is not None
]
SAVE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from test_checkpoints import N, go_on, held, np, stopped
model = stopped(N + 2)
model.save("m.keras")
model.save_weights("m.weights.h5")
np.savez("held.npz", *held(model.optimizer))
np.savez("after.npz", *go_on(model))
"""


def arrays(path):
    with np.load(path) as file:
        return [file[name] for name in file.files]


@pytest.mark.parametrize("other", OTHERS)
def test_files_of_another_backend(tmp_path, other):
    done = subprocess.run(
        [sys.executable, "-c", SAVE, str(Path(__file__).parent)],
        cwd=tmp_path,
        env={**os.environ, "KERAS_BACKEND": other, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = [keras.saving.load_model(tmp_path / "m.keras"), ready()]
    loaded[1].load_weights(tmp_path / "m.weights.h5")
    for each in loaded:
        assert int(each.optimizer.pending) == 2
        assert_equal(held(each.optimizer), arrays(tmp_path / "held.npz"))
        assert_close(go_on(each), arrays(tmp_path / "after.npz"))


# The bare optimizer.


def test_back_to_the_bare_optimizer_in_one_line(tmp_path):
    model = stopped(2 * N)
    model.compile(model.optimizer.inner_optimizer, loss="mse")
    model.save_weights(tmp_path / "m.weights.h5")
    bare = ready(adam())
    bare.load_weights(tmp_path / "m.weights.h5")
    assert int(bare.optimizer.iterations) == 2
    assert_equal(go_on(bare), go_on(model))


# Keras looks for the inner optimizer a second time, where the bare one's file has nothing.
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
def test_accumulation_turned_on_in_mid_training(tmp_path):
    bare = stopped(3, adam())
    bare.save_weights(tmp_path / "m.weights.h5")
    model = ready()
    model.load_weights(tmp_path / "m.weights.h5")
    assert (int(model.optimizer.iterations), int(model.optimizer.pending)) == (3, 0)
    data = rows(2 * N * MICRO_BATCH, seed=2)
    model.fit(*data, batch_size=MICRO_BATCH, shuffle=False, verbose=0)
    bare.fit(*data, batch_size=N * MICRO_BATCH, shuffle=False, verbose=0)
    assert_close(model.get_weights(), bare.get_weights())


def test_another_accumulator_dtype(tmp_path):
    model = stopped(N + 2)
    model.save_weights(tmp_path / "m.weights.h5")
    other = ready(accumulating(adam(), N, accumulator_dtype="bfloat16"))
    other.load_weights(tmp_path / "m.weights.h5")
    its = [total.astype("float32") for total in held(other.optimizer)]
    assert_close(its, held(model.optimizer), 1e-2)
    assert_differ(its, held(model.optimizer), by=0)


def test_a_window_of_other_variables_is_refused_and_nothing_changed(tmp_path):
    stopped(N + 2).save_weights(tmp_path / "m.weights.h5")
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    model.compile(accumulating(adam(), N), loss="mse")
    model.optimizer.build(model.trainable_variables)
    before = values(model.optimizer.variables)
    with pytest.raises(ValueError):  # noqa: PT011 - Keras's, of the layers
        model.load_weights(tmp_path / "m.weights.h5")
    assert_equal(values(model.optimizer.variables), before)


# Versions.


def test_files_of_release_0_1_0_are_still_read():
    """Made by `python tests/data/make.py` with that release: two micro-batches in the window."""
    model = ready()
    model.load_weights(DATA / "release_0_1_0.weights.h5")
    optimizer = model.optimizer
    counters = (optimizer.micro_steps, optimizer.iterations, optimizer.pending)
    assert tuple(map(int, counters)) == (6, 1, 2)
    assert_equal(held(optimizer), arrays(DATA / "release_0_1_0_held.npz"))
    whole = keras.saving.load_model(DATA / "release_0_1_0.keras")
    assert whole.optimizer.accumulation_steps == N
    for each in (model, whole):
        assert_close(go_on(each), arrays(DATA / "release_0_1_0_after.npz"))


def test_a_file_of_a_later_version_is_refused():
    optimizer = ready().optimizer
    store = {}
    optimizer.save_own_variables(store)
    assert int(store["format"]) == 1
    store["format"] = np.array(2)
    with pytest.raises(ValueError, match="Install the version that wrote it"):
        optimizer.load_own_variables(store)
    del store["format"]
    optimizer.load_own_variables(store)


# Broken files.


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    model = stopped(N + 2)
    model.save(folder / "m.keras")
    model.save_weights(folder / "m.weights.h5")
    return folder


@pytest.mark.parametrize("kind", ["m.keras", "m.weights.h5"])
@pytest.mark.parametrize("fault", ["cut off", "noise", "empty"])
def test_a_broken_file_is_an_error_and_changes_nothing(tmp_path, whole_files, kind, fault):
    path = tmp_path / kind
    whole = (whole_files / kind).read_bytes()
    noise = np.random.default_rng(0).bytes(len(whole) // 2)
    content = {"cut off": whole[: len(whole) // 2], "noise": noise, "empty": b""}
    path.write_bytes(content[fault])
    target = ready()
    before = target.get_weights() + values(target.optimizer.variables)
    load = keras.saving.load_model if kind == "m.keras" else target.load_weights
    with pytest.raises((OSError, ValueError, KeyError)):
        load(path)
    assert_equal(target.get_weights() + values(target.optimizer.variables), before)


# Export.


def paths_in(path):
    with h5py.File(path) as file:
        paths = []
        file.visit(paths.append)
    return [name for name in paths if "accumulator" in name]


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_a_model_saved_without_its_optimizer_has_no_accumulators(tmp_path):
    """In HDF5; Keras 3 leaves the optimizer in a `.keras` file whatever is asked."""
    model = stopped(N + 2)
    model.save(tmp_path / "with.h5")
    model.save(tmp_path / "without.h5", include_optimizer=False)
    assert paths_in(tmp_path / "with.h5")
    assert not paths_in(tmp_path / "without.h5")
    loaded = keras.saving.load_model(tmp_path / "without.h5")
    x, _ = rows()
    assert_equal([loaded.predict(x, verbose=0)], [model.predict(x, verbose=0)])


@pytest.mark.skipif(BACKEND != "tensorflow", reason="needs nothing but TensorFlow there")
def test_an_exported_model_has_no_accumulators(tmp_path):
    import tensorflow as tf

    model = stopped(N + 2)
    model.export(tmp_path / "exported", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "exported"))
    path = str(tmp_path / "exported" / "variables" / "variables")
    names = [name for name, _ in tf.train.list_variables(path)]
    assert not [name for name in names if "accumulator" in name or "optimizer" in name]
    assert len(served.variables) == len(model.weights)
    x, _ = rows()
    assert_close([served.serve(x).numpy()], [model.predict(x, verbose=0)])


# Reproducible.


def dropout_model():
    keras.utils.set_random_seed(3)
    layers = [keras.Input((5,)), keras.layers.Dense(7), keras.layers.Dropout(0.5)]
    return keras.Sequential([*layers, keras.layers.Dense(3)])


def test_two_runs_with_one_seed_are_equal():
    runs = [fitted(accumulating(adam(), N), MICRO_BATCH, make_model=dropout_model) for _ in "ab"]
    (one, history), (other, its) = runs
    assert_equal(one.get_weights(), other.get_weights())
    assert history == its


def test_the_seed_of_dropout_moves_once_per_micro_step():
    seeds = []
    for optimizer in (adam(), accumulating(adam(), N)):
        model, _ = fitted(optimizer, MICRO_BATCH, make_model=dropout_model, epochs=1)
        seeds.append(values(v for v in model.non_trainable_variables if "seed" in v.path))
    assert seeds[0]
    assert_equal(*seeds)


# Sessions.


def test_a_cleared_session_shares_nothing():
    first = go_on(stopped(N + 2))
    keras.utils.clear_session()
    assert_equal(go_on(stopped(N + 2)), first)


def test_two_models_trained_in_turn():
    alone = [go_on(stopped(N + 1)), go_on(stopped(N + 2))]
    models = [stopped(N + 1), stopped(N + 2)]
    data = rows(6 * MICRO_BATCH, seed=2)
    for start in range(0, len(data[0]), MICRO_BATCH):
        at = slice(start, start + MICRO_BATCH)
        for model in models:
            model.train_on_batch(data[0][at], data[1][at])
    for model, expected in zip(models, alone, strict=True):
        assert_equal(model.get_weights(), expected)


def test_a_new_wrapper_starts_an_empty_window():
    model = stopped(N + 2)
    model.compile(accumulating(adam(), N), loss="mse")
    go_on(model, micro_batches=N)
    assert (int(model.optimizer.iterations), int(model.optimizer.pending)) == (1, 0)


def test_a_clone_has_an_optimizer_of_its_own():
    model = stopped(N + 2)
    other = keras.models.clone_model(model)
    assert other.optimizer is not model.optimizer
    go_on(other, micro_batches=N)
    assert int(model.optimizer.pending) == 2


def test_fit_in_a_thread():
    import threading

    expected = go_on(stopped(N + 2))
    found = []
    thread = threading.Thread(target=lambda: found.append(go_on(stopped(N + 2))))
    thread.start()
    thread.join()
    assert_equal(found[0], expected)
