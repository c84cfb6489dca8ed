"""Keras's own callbacks act through the wrapper as they do on the bare optimizer.

The oracle is the bare optimizer on the large batch with the same callback: final weights, history
and files agree. The training loss agrees as well, because the weights stand still in a window, so
a callback that watches it sees the same numbers on both sides.
"""

import csv

import h5py
import keras
import numpy as np
import pytest
from keras import optimizers
from support import (
    LARGE_BATCH,
    MICRO_BATCH,
    ROWS,
    N,
    accumulating,
    assert_close,
    assert_differ,
    assert_equal,
    dense_model,
    fitted,
    rows,
    values,
)

EPOCHS = 3
UPDATES_PER_EPOCH = ROWS // LARGE_BATCH
# Ten micro-batches: each epoch leaves two more in the open window.
ODD_ROWS = ROWS - 2 * MICRO_BATCH


def itself(optimizer):
    return optimizer


def momentum(learning_rate=0.05, **arguments):
    """SGD with momentum: unlike Adam it shows a gradient of the wrong scale."""
    return optimizers.SGD(learning_rate, momentum=0.9, **arguments)


def two_optimizers(**arguments):
    if not hasattr(optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            momentum(**arguments), {".*kernel": optimizers.Adam(0.02, **arguments)}
        )
    )


def in_a_loss_scale(optimizer):
    """As `compile` wraps it under mixed_float16; a power of two, so nothing is rounded."""
    return optimizers.LossScaleOptimizer(optimizer, initial_scale=16.0)


def bare_and_accumulating(make_optimizer, make_callbacks, outside=itself, **fit):
    """[(model, history), ...] of the large batch with the bare optimizer, then of ours.

    `make_callbacks` gets the side's name; `outside` wraps both sides' optimizers; `fit` has
    further arguments of `model.fit`.
    """
    sides = []
    for name, side, batch_size in (
        ("large", itself, LARGE_BATCH),
        ("ours", accumulating, MICRO_BATCH),
    ):
        # Both models get the same names, so files written for one can be compared to the other's.
        keras.utils.clear_session()
        model = dense_model()
        model.compile(optimizer=outside(side(make_optimizer())), loss="mse")
        history = model.fit(
            *rows(),
            batch_size=batch_size,
            shuffle=False,
            verbose=0,
            callbacks=make_callbacks(name),
            **{"epochs": EPOCHS, **fit},
        )
        sides.append((model, history.history))
    return sides


def assert_same_training(sides):
    (large, large_history), (ours, our_history) = sides
    assert_close(ours.get_weights(), large.get_weights())
    assert sorted(our_history) == sorted(large_history)
    for key, expected in large_history.items():
        np.testing.assert_allclose(our_history[key], expected, rtol=1e-6, atol=1e-6, err_msg=key)


def compiled_model(optimizer=momentum):
    model = dense_model()
    model.compile(optimizer=accumulating(optimizer()), loss="mse")
    return model


def fit(model, data, **arguments):
    return model.fit(*data, batch_size=MICRO_BATCH, shuffle=False, verbose=0, **arguments)


# The learning rate.


@pytest.mark.quick
@pytest.mark.parametrize(
    "outside",
    [
        pytest.param(itself, id="plain"),
        pytest.param(in_a_loss_scale, id="in a loss scale"),
    ],
)
def test_learning_rate_scheduler(outside):
    def rate(epoch, learning_rate):
        return learning_rate * (3.0 if epoch == 1 else 0.5)

    sides = bare_and_accumulating(
        momentum, lambda _: [keras.callbacks.LearningRateScheduler(rate)], outside
    )
    assert_same_training(sides)
    (large, history), (ours, _) = sides
    assert len(set(history["learning_rate"])) == EPOCHS
    assert float(ours.optimizer.learning_rate) == float(large.optimizer.learning_rate)


def test_a_learning_rate_set_in_mid_window_is_that_windows_rate():
    class SetAt(keras.callbacks.Callback):
        def __init__(self, batch):
            super().__init__()
            self.batch = batch

        def on_train_batch_begin(self, batch, logs=None):
            if batch == self.batch:
                self.model.optimizer.learning_rate = 0.2

    def trained(optimizer, batch_size, callbacks):
        return fitted(optimizer, batch_size, epochs=1, callbacks=callbacks)[0].get_weights()

    large = trained(momentum(), LARGE_BATCH, [SetAt(1)])
    # The third micro-batch of the second window.
    ours = trained(accumulating(momentum()), MICRO_BATCH, [SetAt(N + 2)])
    assert_close(ours, large)
    assert_differ(large, trained(momentum(), LARGE_BATCH, []))


def test_reduce_lr_on_plateau():
    # No improvement is large enough, so the rate falls after every second epoch.
    sides = bare_and_accumulating(
        momentum,
        lambda _: [
            keras.callbacks.ReduceLROnPlateau(
                monitor="loss", factor=0.3, patience=2, min_delta=100.0
            )
        ],
        epochs=6,
    )
    assert_same_training(sides)
    ours, history = sides[1]
    np.testing.assert_allclose(
        history["learning_rate"], [0.05, 0.05, 0.05, 0.015, 0.015, 0.0045], rtol=1e-5
    )
    assert float(ours.optimizer.inner_optimizer.learning_rate) == pytest.approx(0.0045)


# TensorBoard.


def scalars(folder):
    """{tag: [value of each epoch]} of what a run's event files hold about epochs."""
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="TensorBoard, which reads the event files, is not installed",
    ).EventAccumulator(str(folder))
    from tensorboard.util.tensor_util import make_ndarray

    reader.Reload()
    return {
        tag: [float(make_ndarray(event.tensor_proto)) for event in reader.Tensors(tag)]
        for tag in reader.Tags()["tensors"]
        if tag.startswith("epoch_")
    }


def two_epochs_of_decay():
    return momentum(optimizers.schedules.PolynomialDecay(0.05, 2 * UPDATES_PER_EPOCH, 0.01))


@pytest.mark.parametrize("make_optimizer", [two_epochs_of_decay, two_optimizers])
def test_tensorboard(tmp_path, make_optimizer):
    pytest.importorskip("tensorflow", reason="keras.callbacks.TensorBoard needs TensorFlow")
    sides = bare_and_accumulating(
        make_optimizer,
        lambda name: [keras.callbacks.TensorBoard(tmp_path / name, histogram_freq=1)],
    )
    assert_same_training(sides)
    large, ours = scalars(tmp_path / "large" / "train"), scalars(tmp_path / "ours" / "train")
    assert sorted(ours) == sorted(large)
    assert len(ours["epoch_loss"]) == EPOCHS
    for tag, expected in large.items():
        np.testing.assert_allclose(ours[tag], expected, rtol=1e-5, err_msg=tag)
    rates = [tag for tag in ours if tag.startswith("epoch_learning_rate")]
    if make_optimizer is two_optimizers:
        assert len(rates) == 2
    else:
        # It runs in updates: it is at its end after two epochs, not after half of one.
        np.testing.assert_allclose(ours["epoch_learning_rate"], [0.03, 0.01, 0.01], rtol=1e-5)


# Moving averages.


EMA = {"use_ema": True, "ema_momentum": 0.7}


@pytest.mark.parametrize(
    ("make_optimizer", "outside", "swap_on_epoch"),
    [
        pytest.param(lambda: momentum(**EMA), itself, False, id="SGD"),
        pytest.param(lambda: momentum(**EMA), itself, True, id="SGD-on-epoch"),
        pytest.param(lambda: momentum(**EMA), in_a_loss_scale, False, id="in-a-loss-scale"),
        pytest.param(
            lambda: two_optimizers(**EMA), in_a_loss_scale, True, id="MultiOptimizer-in-both"
        ),
    ],
)
def test_swap_ema_weights(make_optimizer, outside, swap_on_epoch):
    validation = rows(LARGE_BATCH, seed=1)
    sides = bare_and_accumulating(
        make_optimizer,
        lambda _: [keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)],
        outside,
        validation_data=validation,
    )
    assert_same_training(sides)
    ours, history = sides[1]
    if not swap_on_epoch:
        # `fit` ends with the averages in the model: the last validation saw the same ones.
        loss = ours.evaluate(*validation, verbose=0)
        assert loss == pytest.approx(history["val_loss"][-1], rel=1e-6)


def test_swapping_in_mid_window_leaves_no_trace():
    results = []
    for callbacks in ([], [keras.callbacks.SwapEMAWeights()]):
        model = compiled_model(lambda: momentum(**EMA))
        history = fit(
            model,
            rows(ODD_ROWS),
            epochs=EPOCHS,
            callbacks=callbacks,
            validation_data=rows(LARGE_BATCH, seed=1),
        )
        assert int(model.optimizer.pending) == 2
        results.append((values(model.optimizer.variables) + model.get_weights(), history.history))
    (left_alone, plain), (swapped, averaged) = results
    # Keras swaps by adding and subtracting on TensorFlow, which rounds.
    assert_close(swapped, left_alone)
    assert abs(plain["val_loss"][0] - averaged["val_loss"][0]) > 1e-4


def test_checkpoint_of_swapped_weights_holds_the_averages(tmp_path):
    def callbacks(name):
        return [
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.ModelCheckpoint(
                tmp_path / f"{name}.weights.h5", save_weights_only=True
            ),
        ]

    sides = bare_and_accumulating(lambda: momentum(**EMA), callbacks)
    assert_same_training(sides)
    ours = layers_in(tmp_path / "ours.weights.h5")
    assert_close(ours, layers_in(tmp_path / "large.weights.h5"))
    # At its end `fit` puts the averages into the model.
    assert_close(ours, sides[1][0].get_weights())


def layers_in(path):
    """What a .weights.h5 file holds of the layers, in the file's order."""
    found = []
    with h5py.File(path) as file:
        file["layers"].visititems(
            lambda _, item: found.append(item[()]) if isinstance(item, h5py.Dataset) else None
        )
    return found


# Checkpoints.


def test_model_checkpoint_of_the_best_epoch(tmp_path):
    # Momentum overshoots: the best epoch is not the last one.
    sides = bare_and_accumulating(
        lambda: optimizers.SGD(0.3, momentum=0.95),
        lambda name: [
            keras.callbacks.ModelCheckpoint(
                tmp_path / f"{name}.weights.h5",
                monitor="loss",
                save_best_only=True,
                save_weights_only=True,
            )
        ],
    )
    assert_same_training(sides)
    best = int(np.argmin(sides[1][1]["loss"]))
    assert best < EPOCHS - 1
    keras.utils.clear_session()
    model = compiled_model()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "ours.weights.h5")
    assert_close(model.get_weights(), layers_in(tmp_path / "large.weights.h5"))
    assert int(model.optimizer.iterations) == (best + 1) * UPDATES_PER_EPOCH
    assert_differ(model.get_weights(), sides[1][0].get_weights())


def test_model_checkpoint_of_a_whole_model(tmp_path):
    sides = bare_and_accumulating(
        momentum,
        lambda name: [keras.callbacks.ModelCheckpoint(tmp_path / f"{name}.keras")],
        epochs=1,
    )
    large, ours = (keras.models.load_model(tmp_path / f"{s}.keras") for s in ("large", "ours"))
    assert_equal(ours.get_weights(), sides[1][0].get_weights())
    assert ours.optimizer.accumulation_steps == N
    fit(ours, rows())
    large.fit(*rows(), batch_size=LARGE_BATCH, shuffle=False, verbose=0)
    assert_close(ours.get_weights(), large.get_weights())


def test_model_checkpoint_in_mid_window(tmp_path):
    """Written every six micro-batches, so with two in the open window; training goes on from it."""
    unbroken = compiled_model()
    checkpoint = keras.callbacks.ModelCheckpoint(
        tmp_path / "{batch}.weights.h5", save_freq=6, save_weights_only=True
    )
    fit(unbroken, rows(), callbacks=[checkpoint])
    keras.utils.clear_session()
    model = compiled_model()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(tmp_path / "6.weights.h5")
    assert (int(model.optimizer.pending), int(model.optimizer.iterations)) == (2, 1)
    x, y = rows()
    fit(model, (x[6 * MICRO_BATCH :], y[6 * MICRO_BATCH :]))
    assert_equal(model.get_weights(), unbroken.get_weights())
    assert_equal(values(model.optimizer.variables), values(unbroken.optimizer.variables))


class PowerCutError(Exception):
    pass


class PowerCutAt(keras.callbacks.Callback):
    """Ends training after a micro-batch of an epoch."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.epoch, self.batch = epoch, batch
        self.now = None

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.now, batch) == (self.epoch, self.batch):
            raise PowerCutError


@pytest.mark.quick
@pytest.mark.parametrize("same_names", [True, False])
def test_backup_and_restore(tmp_path, same_names):
    """The epoch that was cut short is run again, from the window that was open before it."""
    data = rows(ODD_ROWS)

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    unbroken = compiled_model()
    fit(unbroken, data, epochs=EPOCHS)
    if same_names:
        keras.utils.clear_session()
    with pytest.raises(PowerCutError):
        fit(compiled_model(), data, epochs=EPOCHS, callbacks=[backup(), PowerCutAt(1, 5)])
    if same_names:
        keras.utils.clear_session()
    resumed = compiled_model()
    history = fit(resumed, data, epochs=EPOCHS, callbacks=[backup()])
    assert history.epoch == [1, 2]
    assert_equal(resumed.get_weights(), unbroken.get_weights())
    assert_equal(values(resumed.optimizer.variables), values(unbroken.optimizer.variables))
    assert int(resumed.optimizer.micro_steps) == EPOCHS * 10


# Stopping.


def test_early_stopping_restores_the_best_weights():
    # The loss falls, and the highest is asked for: the first epoch is the best one.
    stopping = {}

    def callbacks(name):
        stopping[name] = keras.callbacks.EarlyStopping(
            monitor="loss", mode="max", patience=2, restore_best_weights=True
        )
        return [stopping[name]]

    sides = bare_and_accumulating(momentum, callbacks, epochs=6)
    assert_same_training(sides)
    assert stopping["ours"].stopped_epoch == stopping["large"].stopped_epoch == 2
    first_epoch, _ = fitted(momentum(), LARGE_BATCH, epochs=1)
    assert_close(sides[1][0].get_weights(), first_epoch.get_weights())


def test_terminate_on_nan_ends_at_the_micro_batch_with_the_nan():
    """Sooner than with the large batch, and before the NaN has reached the weights."""
    x, y = rows()
    x[LARGE_BATCH + 2] = np.nan
    model = compiled_model()
    history = fit(model, (x, y), epochs=EPOCHS, callbacks=[keras.callbacks.TerminateOnNaN()])
    assert history.epoch == [0]
    assert int(model.optimizer.micro_steps) == N + 1
    before = (x[:LARGE_BATCH], y[:LARGE_BATCH])
    large, _ = fitted(momentum(), LARGE_BATCH, data=before, epochs=1)
    assert_close(model.get_weights(), large.get_weights())


# Logs.


def test_csv_logger(tmp_path):
    sides = bare_and_accumulating(
        momentum,
        lambda name: [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
            keras.callbacks.CSVLogger(tmp_path / f"{name}.csv"),
        ],
    )
    assert_same_training(sides)
    tables = []
    for name in ("large", "ours"):
        with open(tmp_path / f"{name}.csv", newline="") as file:
            tables.append(list(csv.DictReader(file)))
    large, ours = tables
    assert len(ours) == len(large) == EPOCHS
    assert list(ours[0]) == list(large[0])
    for our_row, large_row in zip(ours, large, strict=True):
        for key in ("epoch", "learning_rate", "loss"):
            assert float(our_row[key]) == pytest.approx(float(large_row[key]), rel=1e-6), key
