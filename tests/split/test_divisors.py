"""What a loss divides by: each compiled loss by its own, on the whole batch.

Most cases have teeth: with the rows alone for weights the split run is far off, which is shown.
"""

import keras
import numpy as np
import pytest
from keras import ops
from support import assert_equal
from support_split import BATCH, Run, assert_same, data, difference, mlp

from keras_ga.split import divisors

# Every batch has 8 rows, cut into 5 and 3: two shapes to compile for, not five.
ROWS, MICRO = 16, 5
TIME, VOCABULARY = 5, 11
RNG = np.random.default_rng(1)
LENGTHS = RNG.integers(1, TIME + 1, ROWS)
VALID = (np.arange(TIME)[None] < LENGTHS[:, None]).astype("float32")
TOKENS = (RNG.integers(1, VOCABULARY, (ROWS, TIME)) * VALID).astype("int32")
TARGETS = RNG.integers(0, VOCABULARY, (ROWS, TIME)).astype("int32")
IGNORED = np.where(VALID > 0, TARGETS, -1).astype("int32")
X, Y = data(ROWS)
WEIGHTS = RNG.uniform(0, 3, ROWS).astype("float32")
CLASSES = RNG.integers(0, 3, ROWS).astype("int32")


def tagger(mask_zero=True):
    inputs = keras.Input((TIME,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 4, mask_zero=mask_zero)(inputs)
    x = keras.layers.Dense(6, activation="tanh")(x)
    return keras.Model(inputs, keras.layers.Dense(VOCABULARY)(x))


def masked_gru():
    inputs = keras.Input((TIME, 3))
    x = keras.layers.Masking()(inputs)
    x = keras.layers.GRU(4, return_sequences=True)(x)
    return keras.Model(inputs, keras.layers.Dense(2)(x))


def crossentropy(**arguments):
    return lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def mse(**arguments):
    return lambda: keras.losses.MeanSquaredError(**arguments)


SEQUENCES = np.concatenate([RNG.normal(size=(ROWS, TIME, 2)), np.ones((ROWS, TIME, 1))], -1)
SEQUENCES = (SEQUENCES * VALID[..., None]).astype("float32")
OF_SEQUENCES = RNG.normal(size=(ROWS, TIME, 2)).astype("float32")

# name: (model, loss, further arguments, how far off rows alone are)
CASES = {
    "sample weights": (mlp, mse(), {"sample_weight": WEIGHTS}, 0),
    "class weights": (
        mlp, crossentropy(), {"y": CLASSES, "class_weight": {0: 0.1, 1: 1.0, 2: 5.0}}, 0
    ),
    "mean with sample weights": (
        mlp, mse(reduction="mean_with_sample_weight"), {"sample_weight": WEIGHTS}, 2e-2
    ),
    "mean with class weights": (
        mlp, crossentropy(reduction="mean_with_sample_weight"),
        {"y": CLASSES, "class_weight": {0: 0.1, 1: 1.0, 2: 5.0}}, 2e-2
    ),
    "a masked embedding": (tagger, crossentropy(), {"x": TOKENS, "y": TARGETS}, 2e-2),
    "Masking and GRU": (masked_gru, mse(), {"x": SEQUENCES, "y": OF_SEQUENCES}, 2e-2),
    "ignore_class": (
        lambda: tagger(False), crossentropy(ignore_class=-1), {"x": TOKENS, "y": IGNORED}, 2e-2
    ),
    "ignore_class and a mask": (
        tagger, crossentropy(ignore_class=3), {"x": TOKENS, "y": TARGETS}, 2e-2
    ),
    "a mask and weights of tokens": (
        tagger, crossentropy(),
        {"x": TOKENS, "y": TARGETS, "sample_weight": RNG.uniform(0, 2, (ROWS, TIME))}, 2e-2
    ),
    "a mask, weights and their mean": (
        tagger, crossentropy(reduction="mean_with_sample_weight"),
        {"x": TOKENS, "y": TARGETS, "sample_weight": RNG.uniform(0, 2, (ROWS, TIME))}, 2e-2
    ),
    "sum": (mlp, mse(reduction="sum"), {}, 1e-1),
    "sum with a mask": (tagger, crossentropy(reduction="sum"), {"x": TOKENS, "y": TARGETS}, 1e-1),
    "sum and regularisers": (
        lambda: mlp(kernel_regularizer=keras.regularizers.L2(0.1)), mse(reduction="sum"), {}, 1e-1
    ),
    "regularisers": (
        lambda: mlp(
            kernel_regularizer=keras.regularizers.L1L2(0.02, 0.1),
            activity_regularizer=keras.regularizers.L2(0.1),
        ),
        mse(), {}, 0,
    ),
    "a function of rows": (
        mlp, lambda: lambda y, p: ops.mean(ops.abs(y - p), axis=-1), {}, 0
    ),
    "a function that is a mean": (mlp, lambda: lambda y, p: ops.mean((y - p) ** 2), {}, 0),
}  # fmt: skip


def optimizer():
    return keras.optimizers.SGD(0.02, momentum=0.9)


def run(case, micro=None, **more):
    model, loss, arguments, _ = CASES[case]
    arguments = {"x": X, "y": Y, **arguments}
    return Run(model, micro, loss=loss(), **arguments, **more)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_whole_batch(case):
    whole = run(case)
    assert_same(run(case, MICRO), whole)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][3]])
def test_rows_alone_would_not_do(case, monkeypatch):
    if case not in ("a masked embedding", "mean with sample weights", "sum"):
        pytest.skip("one of each kind shows that the test above can fail")
    monkeypatch.setattr(divisors, "_value_and_divisor", lambda loss, *data: (loss(*data), None))
    monkeypatch.setattr(divisors, "_ratio", lambda *_: 1.0)
    assert difference(run(case), run(case, MICRO)) > CASES[case][3]


def test_eagerly_too():
    for case in ("a masked embedding", "sum with a mask"):
        assert_same(run(case, MICRO, run_eagerly=True), run(case))


def test_each_output_has_its_own_divisor():
    def model():
        tokens = keras.Input((TIME,), dtype="int32", name="tokens")
        features = keras.Input((6,), name="features")
        x = keras.layers.Embedding(VOCABULARY, 4, mask_zero=True)(tokens)
        tags = keras.layers.Dense(VOCABULARY, name="tags")(x)
        pooled = keras.layers.GlobalAveragePooling1D()(x)
        score = keras.layers.Dense(3, name="score")(keras.layers.concatenate([pooled, features]))
        total = keras.layers.Dense(1, name="total")(features)
        return keras.Model([tokens, features], {"tags": tags, "score": score, "total": total})

    def go(micro):
        return Run(
            model,
            micro,
            x={"tokens": TOKENS, "features": X},
            y={"tags": TARGETS, "score": Y, "total": Y[:, :1]},
            sample_weight={"tags": VALID + 0.5, "score": WEIGHTS, "total": WEIGHTS},
            loss={
                "tags": crossentropy()(),
                "score": mse(reduction="mean_with_sample_weight")(),
                "total": mse(reduction="sum")(),
            },
            loss_weights={"tags": 1.0, "score": 0.5, "total": 0.1},
            metrics={"score": ["mae"]},
        )

    whole = go(None)
    assert {"tags_loss", "score_loss", "total_loss"} < set(whole.history)
    assert_same(go(MICRO), whole)


class Adds(keras.layers.Layer):
    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, inputs):
        self.add_loss(0.1 * self.reduce(ops.square(inputs)))
        return inputs


def adding(reduce):
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.1)),
            Adds(reduce),
            keras.layers.Dense(3, bias_regularizer=keras.regularizers.L2(0.1)),
        ]
    )


def test_add_loss_is_a_mean_unless_it_is_said_to_be_a_sum():
    def mean(x):
        return ops.mean(x)

    def total(x):
        return ops.sum(x)

    arguments = {"x": X, "y": Y, "optimizer": lambda: keras.optimizers.SGD(0.01, momentum=0.9)}
    assert_same(
        Run(lambda: adding(mean), MICRO, **arguments), Run(lambda: adding(mean), **arguments)
    )
    whole = Run(lambda: adding(total), **arguments)
    assert_same(Run(lambda: adding(total), MICRO, split={"add_loss": "sum"}, **arguments), whole)
    assert difference(whole, Run(lambda: adding(total), MICRO, **arguments)) > 0.1


def test_a_model_without_a_compiled_loss():
    def go(micro):
        def model():
            inputs = keras.Input((6,))
            return keras.Model(inputs, Adds(ops.mean)(keras.layers.Dense(3)(inputs)))

        return Run(model, micro, loss=None, metrics=["mae"])

    assert_same(go(MICRO), go(None))


def test_a_sum_that_is_added_cannot_be_told_from_an_activity_regulariser():
    model = mlp(activity_regularizer=keras.regularizers.L2(0.1))
    with pytest.raises(ValueError, match="must be 'mean' where a layer has an activity"):
        Run(lambda: model, MICRO, split={"add_loss": "sum"})


def mean_over_tokens(y, p):
    loss = keras.losses.sparse_categorical_crossentropy(ops.maximum(y, 0), p, from_logits=True)
    valid = ops.cast(y != -1, "float32")
    return ops.sum(loss * valid) / ops.sum(valid)


def test_a_function_that_averages_by_itself_needs_a_divisor():
    arguments = {"x": TOKENS, "y": IGNORED, "loss": mean_over_tokens}
    whole = Run(lambda: tagger(False), **arguments)
    told = {"divisor": lambda y: ops.sum(ops.cast(y != -1, "float32"))}
    assert_same(Run(lambda: tagger(False), MICRO, split=told, **arguments), whole)
    assert difference(whole, Run(lambda: tagger(False), MICRO, **arguments)) > 1e-2


def test_a_divisor_by_name():
    def model():
        inputs = keras.Input((TIME,), dtype="int32")
        x = keras.layers.Embedding(VOCABULARY, 4)(inputs)
        tags = keras.layers.Dense(VOCABULARY, name="tags")(x)
        return keras.Model(inputs, [tags, keras.layers.Dense(1, name="other")(x)])

    targets = [IGNORED, np.zeros((ROWS, TIME, 1), "float32")]
    arguments = {"x": TOKENS, "y": targets, "loss": [mean_over_tokens, "mse"]}
    told = {"divisor": {"tags": lambda y: ops.sum(ops.cast(y != -1, "float32"))}}
    assert_same(Run(model, MICRO, split=told, **arguments), Run(model, **arguments))
    for wrong, text in (
        ({"tag": ops.sum}, "must have names of compiled losses for keys.*'tags', 'other'"),
        (ops.sum, "must be a dict from losses' names to functions.*2 losses"),
    ):
        with pytest.raises(ValueError, match=text):
            Run(model, MICRO, split={"divisor": wrong}, **arguments)


@pytest.mark.parametrize("loss", ["Dice", "Tversky", "Circle"])
def test_losses_over_the_whole_batch_are_named(loss):
    def model():
        head = keras.layers.Dense(3, activation="sigmoid")
        return keras.Sequential([keras.Input((6,)), head])

    targets = CLASSES if loss == "Circle" else np.eye(3, dtype="float32")[CLASSES]
    made = getattr(keras.losses, loss)
    with pytest.warns(UserWarning, match=f"The loss '{loss.lower()}' .*check_split"):
        split = Run(model, MICRO, x=X, y=targets, loss=made())
    assert difference(Run(model, x=X, y=targets, loss=made()), split) > 1e-3
    if loss != "Circle":
        by_row = {"x": X[..., None], "y": targets[..., None], "loss": made(axis=(1, 2))}

        def rowwise():
            return keras.Sequential(
                [keras.Input((6, 1)), keras.layers.Flatten(), model(), keras.layers.Reshape((3, 1))]
            )

        assert_same(Run(rowwise, MICRO, **by_row), Run(rowwise, **by_row))


def test_a_loss_without_a_reduction_is_refused():
    with pytest.raises(ValueError, match="must have a reduction"):
        Run(mlp, MICRO, loss=keras.losses.MeanSquaredError(reduction=None))


def test_sample_weights_of_the_caller_stay_as_they_are():
    weights = np.ones((ROWS, TIME), "float32")
    before = weights.copy()
    Run(tagger, MICRO, x=TOKENS, y=TARGETS, loss=crossentropy()(), sample_weight=weights)
    assert_equal([weights], [before])


def test_the_losses_are_the_models_own_again_after_a_step():
    whole = run("a masked embedding", 3)
    entries = whole.model._compile_loss._flat_losses
    assert [type(entry.loss) for entry in entries] == [keras.losses.SparseCategoricalCrossentropy]
    assert "call" not in entries[0].loss.__dict__


def test_a_batch_without_valid_tokens_moves_nothing_but_by_momentum():
    arguments = {"y": TARGETS[:BATCH], "loss": crossentropy()(), "epochs": 1}
    whole, split = (
        Run(tagger, micro, x=np.zeros((BATCH, TIME), "int32"), **arguments)
        for micro in (None, MICRO)
    )
    for weights, before in zip(split.weights, whole.before, strict=True):
        np.testing.assert_array_equal(weights, before)
