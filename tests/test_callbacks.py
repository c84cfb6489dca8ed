"""Our callbacks: flushing at an epoch's end, changing N by epoch, counting updates."""

import csv

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
    dense_model,
    fitted,
    rows,
)

from keras_ga.callbacks import AccumulationStepsScheduler, FlushPartialWindow, UpdateCounter

# 5 micro-batches an epoch: a window of 4 and one of 1, as large batches of 12 rows and of 3.
SHORT = 5 * MICRO_BATCH


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1)


@pytest.mark.parametrize(("steps_per_execution", "validate"), [(1, True), (1, False), (3, True)])
def test_flushing_equals_the_large_batch_where_rows_do_not_divide(steps_per_execution, validate):
    if BACKEND == "torch" and steps_per_execution > 1:
        pytest.skip("Keras has no steps_per_execution on torch")
    data, extra = rows(SHORT), {}
    results = []
    for optimizer, size, callbacks in (
        (momentum(), LARGE_BATCH, []),
        (accumulating(momentum()), MICRO_BATCH, [FlushPartialWindow()]),
    ):
        model = dense_model()
        if size == MICRO_BATCH:
            extra = {"steps_per_execution": steps_per_execution}
        model.compile(optimizer=optimizer, loss="mse", **extra)
        history = model.fit(
            *data,
            batch_size=size,
            epochs=3,
            shuffle=False,
            verbose=0,
            validation_data=rows(9, seed=1) if validate else None,
            callbacks=callbacks,
        )
        results.append((model.get_weights(), history.history.get("val_loss", [])))
        assert int(optimizer.iterations) == 6
    assert_close(results[1][0], results[0][0])
    # The validation saw the flushed weights.
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-5)
    carried, _ = fitted(accumulating(momentum()), MICRO_BATCH, data=data)
    assert_differ(carried.get_weights(), results[0][0])


def test_two_fits_are_one():
    once, _ = fitted(accumulating(momentum()), MICRO_BATCH, data=rows(SHORT), epochs=3)
    twice, _ = fitted(accumulating(momentum()), MICRO_BATCH, data=rows(SHORT), epochs=1)
    assert int(twice.optimizer.pending) == 1
    twice.fit(*rows(SHORT), batch_size=MICRO_BATCH, epochs=2, shuffle=False, verbose=0)
    assert int(twice.optimizer.iterations) == int(once.optimizer.iterations) == 3
    assert_close(twice.get_weights(), once.get_weights(), 0)


def test_an_evaluation_outside_fit_does_not_flush():
    model, _ = fitted(accumulating(momentum()), MICRO_BATCH, data=rows(SHORT), epochs=1)
    before = model.get_weights()
    model.evaluate(*rows(), verbose=0, callbacks=[FlushPartialWindow()])
    assert int(model.optimizer.pending) == 1
    assert_close(model.get_weights(), before, 0)


def test_evaluate_and_predict_in_mid_window_touch_nothing():
    class Nosy(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if BACKEND == "jax":
                self.model.jax_state_sync()
            self.model.evaluate(*rows(6), verbose=0)
            self.model.predict(rows(6)[0], verbose=0)

    quiet, _ = fitted(accumulating(momentum()), MICRO_BATCH, epochs=1)
    nosy, _ = fitted(accumulating(momentum()), MICRO_BATCH, epochs=1, callbacks=[Nosy()])
    assert_close(nosy.get_weights(), quiet.get_weights(), 0)


def test_flushing_needs_a_wrapper():
    with pytest.raises(ValueError, match="`FlushPartialWindow` must be used with a model that"):
        fitted(momentum(), MICRO_BATCH, callbacks=[FlushPartialWindow()])


def test_the_scheduler_sets_steps_by_epoch():
    optimizer = accumulating(momentum(), 4)
    scheduler = AccumulationStepsScheduler({2: 4, 0: 1, 1: 2})
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(int(optimizer.iterations))
    )
    fitted(optimizer, MICRO_BATCH, epochs=4, callbacks=[scheduler, watch])
    assert seen == [12, 18, 21, 24]


def test_the_scheduler_leaves_the_steps_before_its_first_epoch():
    optimizer = accumulating(momentum(), 3)
    fitted(optimizer, MICRO_BATCH, epochs=2, callbacks=[AccumulationStepsScheduler({1: 2})])
    assert int(optimizer.iterations) == 4 + 6


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        ([4], TypeError, "must be a dict from epoch to accumulation steps"),
        ({}, ValueError, "must name an epoch"),
        ({-1: 4}, ValueError, "must have ints >= 0 for keys"),
        ({0.5: 4}, TypeError, "must have ints >= 0 for keys"),
        ({0: 0}, ValueError, "`steps_by_epoch` must be an int >= 1"),
        ({0: "4"}, TypeError, "`steps_by_epoch` must be an int >= 1"),
    ],
)
def test_the_scheduler_refuses(steps, error, message):
    with pytest.raises(error, match=message):
        AccumulationStepsScheduler(steps)


def test_updates_are_in_the_logs(tmp_path):
    log = tmp_path / "log.csv"
    callbacks = [UpdateCounter(), keras.callbacks.CSVLogger(str(log))]
    _, history = fitted(
        accumulating(momentum()), MICRO_BATCH, data=rows(SHORT), callbacks=callbacks
    )
    assert history["updates"] == [1, 2, 3]
    assert "accumulation_steps" not in history
    assert [row["updates"] for row in csv.DictReader(log.read_text().splitlines())] == [
        "1",
        "2",
        "3",
    ]


def test_steps_that_vary_are_in_the_logs():
    callbacks = [AccumulationStepsScheduler({0: 4, 1: 2}), UpdateCounter()]
    _, history = fitted(accumulating(momentum()), MICRO_BATCH, callbacks=callbacks)
    assert history["updates"] == [3, 9, 15]
    assert history["accumulation_steps"] == [2, 2]
    scheduled = accumulating(momentum(), lambda update: 3)
    _, history = fitted(scheduled, MICRO_BATCH, epochs=2, callbacks=[UpdateCounter()])
    assert history["accumulation_steps"] == [3, 3]


def test_updates_count_under_a_loss_scale():
    optimizer = keras.optimizers.LossScaleOptimizer(accumulating(momentum()), initial_scale=2.0)
    _, history = fitted(optimizer, MICRO_BATCH, callbacks=[UpdateCounter(), FlushPartialWindow()])
    assert history["updates"] == [3, 6, 9]


def test_counters_can_be_read_in_callbacks():
    seen = []

    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if BACKEND == "jax":
                self.model.jax_state_sync()
            o = self.model.optimizer
            seen.append(
                (int(o.micro_steps), int(o.iterations), int(o.pending), bool(o.has_updated))
            )

    fitted(
        accumulating(momentum(), 2), MICRO_BATCH, data=rows(SHORT), epochs=1, callbacks=[Reader()]
    )
    assert seen == [
        (1, 0, 1, False),
        (2, 1, 0, True),
        (3, 1, 1, False),
        (4, 2, 0, True),
        (5, 2, 1, False),
    ]


def test_a_fit_without_any_update_warns():
    with pytest.warns(UserWarning, match="ended before its first update: it had 12 micro-batches"):
        fitted(accumulating(momentum(), 99), MICRO_BATCH, epochs=1)
