"""A batch worked through in micro-batches is the batch: weights, logs, counts."""

import contextlib
import itertools
import re

import keras
import numpy as np
import pytest
from support import BACKEND, assert_close, values
from support_split import BATCH, ROWS, Run, assert_same, data, difference, mlp

import keras_ga

MODES = {
    "default": {},
    "eager": {"run_eagerly": True},
    "several steps": {"steps_per_execution": 3},
    "jit": {"jit_compile": True},
}
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "clipped Adam": lambda: keras.optimizers.Adam(0.02, global_clipnorm=0.3),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_equals_the_whole_batch(optimizer, mode):
    if BACKEND == "torch" and mode == "several steps":
        pytest.skip("Keras has no steps_per_execution on torch")
    if BACKEND == "torch" and mode == "jit" and optimizer != "momentum":
        pytest.skip("torch.compile is slow; one optimizer shows it")
    arguments = {"optimizer": OPTIMIZERS[optimizer], "metrics": ["mae"]}
    # Keras's own compiled step on torch gives warnings about its metrics.
    whole = Run(**arguments, **({} if BACKEND == "torch" else MODES[mode]))
    for micro in (4, 3) if mode == "default" else (3,):
        assert_same(Run(micro=micro, **arguments, **MODES[mode]), whole, 2e-6)
    assert whole.updates == 2 * -(-ROWS // BATCH)


def test_a_larger_optimizer_and_variables_that_do_not_train():
    def model():
        inputs = keras.Input((6,))
        frozen = keras.layers.Dense(5, trainable=False)(inputs)
        unused = keras.layers.Dense(2)
        outputs = keras.layers.Dense(3)(keras.layers.concatenate([frozen, inputs]))
        model = keras.Model(inputs, outputs)
        model.unused = unused
        unused.build((None, 6))
        return model

    def optimizer():
        return keras.optimizers.AdamW(
            0.02, weight_decay=0.1, global_clipnorm=0.5, use_ema=True, ema_momentum=0.5
        )

    with (
        pytest.warns(UserWarning, match="Gradients do not exist")
        if BACKEND != "jax"
        else contextlib.nullcontext()
    ):
        whole = Run(model, optimizer=optimizer)
        split = Run(model, 3, optimizer=optimizer)
    assert_same(split, whole)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(7, "tanh"), keras.layers.Dense(3)

    def call(self, inputs, training=False):
        return self.out(self.hidden(inputs["a"]) + self.hidden(inputs["nested"][0]))


def test_parts_of_a_model_with_optimizers_of_their_own():
    optimizers = keras.optimizers
    if not hasattr(optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")

    def two():
        return optimizers.MultiOptimizer(
            optimizers.OptimizerMap(
                optimizers.SGD(0.1, momentum=0.9), {".*kernel": optimizers.Adam(0.02)}
            )
        )

    assert_same(Run(micro=3, optimizer=two), Run(optimizer=two))


@pytest.mark.parametrize("compiled_first", [True, False])
def test_unbuilt_subclassed_models_and_nested_inputs(compiled_first):
    x, y = data()
    inputs = {"a": x, "nested": [x[:, ::-1].copy()]}
    results = []
    for micro in (None, 3):
        keras.utils.set_random_seed(0)
        model = Subclassed()
        if micro and not compiled_first:
            keras_ga.split_batches(model, micro)
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
        if micro and compiled_first:
            keras_ga.split_batches(model, micro)
        model.fit(inputs, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        results.append(values(model.trainable_variables))
    assert_close(*results)


def test_compiling_anew_forgets_the_old_loss_and_its_divisors():
    x, y = data()
    results = []
    for micro in (None, 3):
        keras.utils.set_random_seed(0)
        model = mlp()
        if micro:
            keras_ga.split_batches(model, micro)
        for loss in ("mse", keras.losses.MeanAbsoluteError(reduction="sum"), "mse"):
            model.compile(optimizer=keras.optimizers.SGD(0.01, momentum=0.9), loss=loss)
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        results.append(values(model.trainable_variables))
    assert_close(*results)


def test_unsplit_undoes_it_and_splitting_again_changes_the_size():
    x, y = data()
    whole = Run(epochs=3)
    keras.utils.set_random_seed(0)
    model = mlp()
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    for change in (
        lambda: keras_ga.split_batches(model, 3),
        lambda: keras_ga.unsplit_batches(model),
        lambda: keras_ga.split_batches(model, 5),
    ):
        change()
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    keras_ga.unsplit_batches(model)
    keras_ga.unsplit_batches(model)
    assert "make_train_function" not in model.__dict__
    assert_close(values(model.trainable_variables), whole.weights)


def test_train_on_batch_and_datasets():
    x, y = data()
    weights = np.linspace(0.5, 2, ROWS).astype("float32")
    results = []
    for micro in (None, 3):
        keras.utils.set_random_seed(0)
        model = mlp()
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
        if micro:
            keras_ga.split_batches(model, micro)
        logs = [model.train_on_batch(x[:7], y[:7], sample_weight=weights[:7])]
        logs += [model.train_on_batch(x[:5], y[:5], class_weight=None)]
        if BACKEND == "tensorflow":
            import tensorflow as tf

            dataset = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(BATCH)
            known = dataset.map(lambda *batch: batch)
            endless = dataset.repeat().filter(lambda *_: True)  # of unknown size
            model.fit(known, shuffle=False, verbose=0)
            model.fit(endless, steps_per_epoch=3, shuffle=False, verbose=0)
        elif BACKEND == "torch":
            import torch

            parts = torch.utils.data.TensorDataset(*map(torch.from_numpy, (x, y, weights)))
            loader = torch.utils.data.DataLoader(parts, batch_size=BATCH)
            model.fit(loader, shuffle=False, verbose=0)
        else:
            starts = itertools.cycle((0, 8, 16))
            batches = ((x[i : i + 8], y[i : i + 8], weights[i : i + 8]) for i in starts)
            model.fit(batches, steps_per_epoch=3, shuffle=False, verbose=0)
        results.append((values(model.trainable_variables), logs, int(model.optimizer.iterations)))
    assert_close(results[1][0], results[0][0])
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-6)
    assert results[1][2] == results[0][2]


def test_everything_counts_updates():
    x, y = data()
    seen = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((batch, sorted(logs)))

    model = mlp()
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    keras_ga.split_batches(model, 2)
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[Count()])
    assert [batch for batch, _ in seen] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert {tuple(names) for _, names in seen} == {("loss", "mae")}
    assert int(model.optimizer.iterations) == 8


def test_metrics_and_validation_logs():
    x, _ = data()
    y = (np.arange(ROWS) % 3 == 0).astype("float32")[:, None]
    metrics = ["mae", "binary_accuracy"]
    metrics += [
        getattr(keras.metrics, n)() for n in ("AUC", "Precision", "R2Score", "RootMeanSquaredError")
    ]
    metrics += [keras.metrics.CosineSimilarity(), keras.metrics.F1Score(threshold=0.5)]

    def model():
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])

    def run(micro):
        fresh = [m if isinstance(m, str) else type(m).from_config(m.get_config()) for m in metrics]
        return Run(
            model, micro, x=x, y=y, loss="binary_crossentropy", metrics=fresh,
            weighted_metrics=["mse"], validation_data=(x[:10], y[:10]), sample_weight=np.ones(ROWS),
        )  # fmt: skip

    assert_same(run(3), run(None))


def test_mixed_float16_skips_and_scales_as_the_whole_batch_does():
    results = []
    x, y = data()
    for micro in (None, 3):
        keras.utils.set_random_seed(0)
        model = mlp(dtype="mixed_float16")
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        model.compile(optimizer=optimizer, loss="mse")
        if micro:
            keras_ga.split_batches(model, micro)
        model.fit(x[:24], y[:24], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        broken = y[:8].copy()
        broken[5] = np.inf
        before = values(model.trainable_variables)
        scale = float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))
        model.train_on_batch(x[:8], broken)
        after = values(model.trainable_variables)
        for a, b in zip(after, before, strict=True):
            np.testing.assert_array_equal(a, b)
        assert float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)) == scale / 2
        results.append((after, int(optimizer.inner_optimizer.iterations)))
    assert_close(results[1][0], results[0][0], 1e-3)
    assert results[1][1] == results[0][1]


def test_bfloat16_weights_are_added_up_in_float32():
    def model(dtype):
        return keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(3, dtype=dtype, kernel_initializer="zeros")]
        )

    # In bfloat16 a sum of 512 equal parts stops far below what it should be.
    x, y = np.ones((512, 6), "float32"), np.ones((512, 3), "float32")
    arguments = {"x": x, "y": y, "batch_size": 512, "epochs": 1, "loss": "mae"}
    arguments["optimizer"] = lambda: keras.optimizers.SGD(1.0)
    split = Run(lambda: model("bfloat16"), 1, **arguments)
    # The sums that Keras makes for a whole batch in bfloat16 are none to compare with.
    whole = Run(lambda: model("float32"), **arguments)
    assert difference(whole, split) < 1e-2


@pytest.mark.parametrize("outputs", ["one", "masked"])
def test_windows_over_steps_of_split_batches(outputs):
    """Batches of 16, 16 and 8 rows in one window, which a batch of 40 is."""
    x, y = data(40)
    masked = (np.arange(40) % 3 > 0).astype("float32")

    def train(optimizer, batch_size, micro):
        keras.utils.set_random_seed(0)
        model = mlp()
        loss = keras.losses.MeanSquaredError(
            reduction="mean_with_sample_weight" if outputs == "masked" else "sum_over_batch_size"
        )
        model.compile(optimizer=optimizer, loss=loss)
        if micro:
            keras_ga.split_batches(model, micro)
        weights = {"sample_weight": masked} if outputs == "masked" else {}
        model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, **weights)
        return values(model.trainable_variables)

    large = train(keras.optimizers.SGD(0.1, momentum=0.9), 40, None)
    windows = keras_ga.GradientAccumulationOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), 3)
    assert_close(train(windows, 16, 5), large, 2e-6)
    assert int(windows.iterations) == 2


def test_nothing_of_it_is_saved(tmp_path):
    import copy
    import pickle

    model = mlp()
    model.compile(optimizer="sgd", loss="mse")
    keras_ga.split_batches(model, 3)
    model.fit(*data(), batch_size=BATCH, verbose=0)
    model.save(tmp_path / "model.keras")
    copies = [
        keras.models.load_model(tmp_path / "model.keras"),
        keras.models.clone_model(model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ]
    for copied in copies:
        assert "make_train_function" not in copied.__dict__
    assert "make_train_function" in model.__dict__
    assert "keras_ga" not in model.to_json()


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y - y_pred)) + sum(self.losses)


def test_a_loss_that_the_model_computes():
    def model():
        layer = keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.1))
        return OwnLoss([keras.Input((6,)), layer])

    assert_same(Run(model, 3), Run(model))


# Refusals.


class OwnStep(keras.Sequential):
    def train_step(self, *arguments):
        return super().train_step(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"micro_batch_size": 0}, ValueError, "`micro_batch_size` must be an int >= 1"),
        ({"micro_batch_size": 2.0}, TypeError, "`micro_batch_size` must be an int >= 1"),
        ({"micro_batch_size": "all"}, ValueError, "must be an int >= 1 or 'auto'"),
        ({"batch_norm": "off"}, ValueError, "`batch_norm` must be 'pooled' or 'micro'"),
        ({"add_loss": "max"}, ValueError, "`add_loss` must be 'mean' or 'sum'"),
        ({"divisor": 3}, TypeError, "`divisor` must be a function of `y_true`"),
        ({"divisor": {"a": 3}}, TypeError, "`divisor` must be a function of `y_true`"),
        ({"memory_limit": 0}, ValueError, "`memory_limit` must be an int >= 1"),
        ({"model": keras.layers.Dense(1)}, TypeError, "`model` must be a `keras.Model`"),
        ({"model": OwnStep()}, ValueError, "must not have a `train_step` of its own"),
    ],
)
def test_bad_arguments(arguments, error, text):
    given = {"model": mlp(), "micro_batch_size": 2, **arguments}
    with pytest.raises(error, match=text):
        keras_ga.split_batches(**given)
    assert "make_train_function" not in given["model"].__dict__


def test_pooling_layers_are_refused():
    layer = keras_ga.layers.BatchNormalization(accumulation_steps=2)
    model = keras.Sequential([keras.Input((6,)), layer])
    with pytest.raises(ValueError, match="must have Keras's own BatchNormalization"):
        keras_ga.split_batches(model, 2)


class Shrinks(keras.layers.Dense):
    def call(self, inputs):
        self.kernel.assign(self.kernel * 0.9)
        return super().call(inputs)


@pytest.mark.parametrize("regularizer", [None, "l2"])
def test_a_layer_that_sets_what_is_trained_is_refused(regularizer):
    if BACKEND == "jax":
        pytest.skip("Keras itself loses it there")
    model = keras.Sequential([keras.Input((6,)), Shrinks(3, kernel_regularizer=regularizer)])
    with pytest.raises(ValueError, match="must not set a trainable variable"):
        Run(lambda: model, 3)


class MadeLate(keras.Model):
    def build(self, shape):
        self.normalised = keras.layers.SpectralNormalization(keras.layers.Dense(3))
        self.normalised.build(shape)

    def call(self, inputs, training=False):
        return self.normalised(inputs, training=training)


def test_layers_that_can_not_be_split_are_refused():
    stateful = keras.layers.GRU(3, stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(8, 6, 1)), stateful])
    with pytest.raises(ValueError, match="a row for each row of the batch"):
        keras_ga.split_batches(model, 4)
    late = MadeLate()
    late.compile("sgd", "mse")
    keras_ga.split_batches(late, 4)
    with pytest.raises(ValueError, match="sets its kernel in every forward pass"):
        late.fit(*data(), verbose=0)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a trace is TensorFlow's")
def test_a_layer_frozen_without_compiling_anew_confuses_no_sums():
    """What Keras makes of it depends on what it traces anew; it must not end training."""
    x, y = data(20)
    model = mlp()
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    keras_ga.split_batches(model, 3)
    model.fit(x[:16], y[:16], batch_size=BATCH, verbose=0)
    model.layers[0].trainable = False
    before = values(model.layers[1].weights)
    model.fit(x, y, batch_size=BATCH, verbose=0)  # the last micro-batch has a size of its own
    assert int(model.optimizer.iterations) == 5
    for now, then in zip(values(model.layers[1].weights), before, strict=True):
        assert np.abs(now - then).max() > 1e-4


class Interrupted(keras.layers.Layer):
    now = False

    def call(self, inputs):
        if self.now:
            raise KeyboardInterrupt
        return inputs


def test_an_interrupt_within_a_step_loses_nothing():
    """As pressing stop in a notebook does; on JAX `fit` has the weights then, not the model."""
    model = keras.Sequential([keras.Input((6,)), Interrupted(), keras.layers.Dense(3)])
    x, y = data()
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    keras_ga.split_batches(model, 3)
    model.fit(x[:16], y[:16], batch_size=BATCH, verbose=0)
    before = values(model.variables)
    model.layers[0].now = True
    with pytest.raises(KeyboardInterrupt):
        model.fit(x[:7], y[:7], batch_size=7, verbose=0)  # the last one row: not traced yet
    assert_close(values(model.variables), before, 0)
    model.layers[0].now = False
    model.fit(x[:16], y[:16], batch_size=BATCH, verbose=0)
    assert int(model.optimizer.iterations) == 4


def test_rows_that_do_not_agree_lose_nothing():
    model = Subclassed()
    x, y = data()
    model.compile(optimizer="sgd", loss="mse")
    model.fit({"a": x, "nested": [x]}, y, verbose=0)
    keras_ga.split_batches(model, 2)
    before = values(model.trainable_variables)
    with pytest.raises(ValueError, match="same number of rows"):
        model.train_on_batch({"a": x[:4], "nested": [x[:5]]}, y[:4])
    assert_close(values(model.trainable_variables), before, 0)
    model.fit({"a": x, "nested": [x]}, y, verbose=0)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a trace is TensorFlow's")
def test_tensorflow_does_not_warn_of_retracing(caplog):
    """Micro-steps, zeros and updates are functions of their own, and so are those of each model."""
    for _ in range(6):
        model = mlp()
        model.compile("sgd", "mse")
        keras_ga.split_batches(model, 3)
        model.train_on_batch(*data(BATCH))
    assert "retracing" not in caplog.text


@pytest.mark.skipif(BACKEND != "jax", reason="compilations are JAX's")
def test_each_part_of_a_step_is_compiled_once(caplog):
    """Also after values have come from a step, and another `fit`, which jit may tell apart."""
    import jax

    x, y = data(24)
    model = mlp()
    model.add(keras.layers.BatchNormalization())
    model.compile(optimizer="adam", loss="mse")
    keras_ga.split_batches(model, 4)
    with jax.log_compiles():
        for rows in (8, 24, 16):
            model.fit(x[:rows], y[:rows], batch_size=8, verbose=0)
    names = re.findall(r"Compiling jit\((\w+)\)", caplog.text)
    ours = ("_no_gradients", "_rows_from", "_gradients_and_changes", "moved", "_updated")
    assert {name: names.count(name) for name in ours} == dict.fromkeys(ours, 1)
