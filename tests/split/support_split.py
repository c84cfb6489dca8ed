"""A model trained whole and in micro-batches, from the same start."""

import keras
import numpy as np
from support import BACKEND, values

import keras_ga

ROWS, BATCH = 26, 8
"""Neither divides: the last batch has two rows, fewer than a micro-batch."""


def data(rows=ROWS, features=6, targets=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)).astype("float32")
    y = rng.normal(size=(rows, targets)).astype("float32")
    return x, y


def mlp(**arguments):
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(7, activation="tanh", **arguments),
            keras.layers.Dense(3),
        ]
    )


class DenseGradients(keras.optimizers.SGD):
    """Takes an embedding's gradient as a dense one, as other backends and split steps have it."""

    def apply(self, grads, trainable_variables=None):
        grads = [None if g is None else keras.ops.convert_to_tensor(g) for g in grads]
        super().apply(grads, trainable_variables)


class Run:
    """A training and what it came to."""

    def __init__(
        self,
        make_model=mlp,
        micro=None,
        *,
        x=None,
        y=None,
        optimizer=None,
        loss="mse",
        epochs=2,
        batch_size=BATCH,
        sample_weight=None,
        class_weight=None,
        validation_data=None,
        split=None,
        seed=0,
        **compile_,
    ):
        if x is None:
            x, y = data()
        keras.utils.set_random_seed(seed)
        self.model = make_model()
        optimizer = optimizer or (lambda: DenseGradients(0.1, momentum=0.9))
        self.model.compile(optimizer=optimizer(), loss=loss, **compile_)
        if not self.model.built:
            self.model.build(
                {k: (None, *v.shape[1:]) for k, v in x.items()}
                if isinstance(x, dict)
                else (None, *x.shape[1:])
            )
        self.before = values(self.model.trainable_variables)
        if micro:
            keras_ga.split_batches(self.model, micro, **(split or {}))
        fit = {"sample_weight": sample_weight, "class_weight": class_weight}
        self.history = self.model.fit(
            x,
            y,
            batch_size=None if y is None else batch_size,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            validation_data=validation_data,
            **{k: v for k, v in fit.items() if v is not None},
        ).history
        self.weights = values(self.model.trainable_variables)
        self.updates = int(self.model.optimizer.iterations)

    def moved(self):
        return max(np.abs(a - b).max() for a, b in zip(self.weights, self.before, strict=True))


def difference(run, other):
    """The largest difference of a weight, as a share of the way that weights went."""
    apart = max(np.abs(a - b).max() for a, b in zip(run.weights, other.weights, strict=True))
    return apart / run.moved()


def assert_same(split, whole, tolerance=5e-6):
    """Weights, every log and the number of updates."""
    assert difference(whole, split) < tolerance
    assert split.history.keys() == whole.history.keys()
    for name, log in whole.history.items():
        np.testing.assert_allclose(split.history[name], log, rtol=2e-6, atol=2e-6, err_msg=name)
    assert split.updates == whole.updates


__all__ = [
    "BACKEND",
    "BATCH",
    "ROWS",
    "DenseGradients",
    "Run",
    "assert_same",
    "data",
    "difference",
    "mlp",
]
