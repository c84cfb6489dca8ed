"""`check_split` says what a split batch makes of a model, and touches nothing."""

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, assert_equal, values
from support_split import data, mlp

import keras_ga

X, Y = data(12)


def compiled(model, loss="mse", **arguments):
    model.compile(optimizer="adam", loss=loss, **{"metrics": ["mae"], **arguments})
    return model


def test_an_exact_model(capsys):
    found = keras_ga.check_split(compiled(mlp()), X, Y, micro_batch_size=5)
    assert found.exact
    assert found.layers == ()
    assert [row.name for row in found.losses][-1] == "loss"
    assert all(row.difference < 1e-5 for row in (*found.losses, *found.gradients))
    assert all(row.whole > 0 for row in found.gradients)
    printed = capsys.readouterr().out
    assert printed == f"{found}\n"
    assert printed.endswith("\nexact\n")


def test_a_loss_that_compares_rows(capsys):
    def centred(y, p):
        return ops.mean((y - p - ops.mean(p, axis=0)) ** 2)

    def model():
        inputs = keras.Input((6,))
        outputs = [keras.layers.Dense(3, name=name)(inputs) for name in ("plain", "mixed")]
        return keras.Model(inputs, outputs)

    found = keras_ga.check_split(compiled(model(), ["mse", centred], metrics=None), X, [Y, Y])
    assert not found.exact
    by_name = {row.name: row.difference for row in (*found.losses, *found.gradients)}
    assert by_name["plain"] < 1e-5 < 1e-2 < by_name["mixed"]
    assert by_name["plain/kernel"] < 1e-5 < 1e-2 < by_name["mixed/kernel"]
    printed = capsys.readouterr().out
    assert "differs" in printed
    assert printed.endswith("\nnot exact\n")


class Mixes(keras.layers.Layer):
    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


def test_a_layer_that_compares_rows():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), Mixes(name="mixes")])
    model.add(keras.layers.Dense(3))
    found = keras_ga.check_split(compiled(model), X, Y)
    assert not found.exact
    assert found.layers == ("mixes: a row's output depends on the other rows",)


def test_layers_that_see_their_micro_batch_in_training():
    model = mlp()
    model.add(keras.layers.Dropout(0.5, name="drop"))
    found = keras_ga.check_split(compiled(model), X, Y)
    assert found.exact
    assert found.layers == ("drop: draws other random numbers in training",)
    assert str(found).endswith("\nexact, but for random numbers")
    model.add(keras.layers.BatchNormalization(name="norm"))
    found = keras_ga.check_split(compiled(model), X, Y)
    assert not found.exact
    assert found.layers == (
        "norm: normalises by its micro-batch in training",
        "drop: draws other random numbers in training",
    )
    assert str(found).endswith("\nexact in inference mode, not exact in training")
    model.layers[-1].trainable = False
    assert keras_ga.check_split(compiled(model), X, Y).exact


def test_a_sum_that_is_added():
    class Adds(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(ops.sum(ops.square(inputs)))
            return inputs

    def model():
        return compiled(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), Adds()]))

    found = keras_ga.check_split(model(), X, Y)
    assert not found.exact
    by_name = {row.name: row.difference for row in found.losses}
    assert by_name["add_loss and regularisers"] > 0.1
    split = model()
    keras_ga.split_batches(split, 5, add_loss="sum")
    assert keras_ga.check_split(split, X, Y).exact


@pytest.mark.parametrize("told", [False, True])
def test_a_function_that_averages_tokens(told):
    def over_tokens(y, p):
        valid = ops.cast(y != 0, "float32")
        return ops.sum(ops.abs(y - p) * valid) / ops.sum(valid)

    y = np.where(np.arange(12)[:, None] % 4 == 0, 0, Y).astype("float32")
    model = compiled(mlp(), loss=over_tokens)
    divisor = (lambda y: ops.sum(ops.cast(y != 0, "float32"))) if told else None
    keras_ga.split_batches(model, 5, divisor=divisor)
    assert keras_ga.check_split(model, X, y).exact is told


def test_it_touches_nothing():
    model = mlp()
    model.add(keras.layers.BatchNormalization())
    model.add(keras.layers.Dropout(0.5))
    compiled(model)
    model.fit(X, Y, verbose=0)
    before = values([*model.variables, *model.optimizer.variables, *model.metrics_variables])
    function = model.train_function
    keras_ga.check_split(model, X, Y, micro_batch_size=5)
    after = values([*model.variables, *model.optimizer.variables, *model.metrics_variables])
    assert_equal(after, before)
    assert model.train_function is function
    assert "make_train_function" not in model.__dict__
    if BACKEND == "torch":
        assert all(v.value.grad is None for v in model.trainable_variables)


def test_refusals():
    with pytest.raises(ValueError, match="must be compiled"):
        keras_ga.check_split(mlp(), X, Y)
    with pytest.raises(ValueError, match="same number of rows"):
        keras_ga.check_split(compiled(mlp()), X, Y[:5])
