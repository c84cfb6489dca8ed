"""A training that is killed again and again ends where the unbroken one does, bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support import BACKEND

# Every start imports the backend: one is killed often, the others now and then.
KILLS = {"jax": (2, 1), "torch": (6, 3)}.get(BACKEND, (1, 1))
if BACKEND == "tensorflow":
    pytestmark = pytest.mark.slow
SECONDS = 300

COMMON = """
import os, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, keras_ga
import numpy as np

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(22, 5)).astype("float32"), rng.normal(size=(22, 3)).astype("float32")
layers = [keras.Input((5,)), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(3)]
model = keras.Sequential(layers)
optimizer = keras_ga.GradientAccumulationOptimizer(
    keras.optimizers.AdamW(0.01, weight_decay=0.1), accumulation_steps=4
)
model.compile(optimizer, loss="mse")
optimizer.build(model.trainable_variables)


def finish():
    arrays = [keras.ops.convert_to_numpy(v) for v in (*model.weights, *optimizer.variables)]
    np.savez("result.tmp.npz", *arrays)
    os.replace("result.tmp.npz", "result.npz")
"""

# Eleven micro-batches an epoch, windows of four: an epoch's end is in mid-window, mostly.
FIT = (
    COMMON
    + """
class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            print("training", flush=True)
        time.sleep(float(sys.argv[1]))


backup = keras.callbacks.BackupAndRestore("backup", double_checkpoint=True)
fit = {"batch_size": 2, "shuffle": False, "verbose": 0, "callbacks": [backup, Slow()]}
model.fit(x, y, epochs=int(sys.argv[2]), **fit)
finish()
"""
)

# The file has all there is to know: weights, optimizer, window, and with `micro_steps` the place in
# the data. It is complete or it is not there, since it is renamed when it has been written.
LOOP = (
    COMMON
    + """
if os.path.exists("latest.weights.h5"):
    model.load_weights("latest.weights.h5")
while int(optimizer.micro_steps) < int(sys.argv[2]):
    step = int(optimizer.micro_steps)
    start = 2 * (step % 11)
    model.train_on_batch(x[start : start + 2], y[start : start + 2])
    if step % 3 == 0:
        model.save_weights("next.weights.h5")
        os.replace("next.weights.h5", "latest.weights.h5")
        print("saved", flush=True)
    time.sleep(float(sys.argv[1]))
finish()
"""
)


def start(script, folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=folder,
        env={
            **os.environ,
            "KERAS_BACKEND": BACKEND,
            # JAX compiles for the first start only; nothing else reads these files.
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process):
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors[-3000:]


def result(folder):
    with np.load(folder / "result.npz") as file:
        return [file[name] for name in file.files]


@pytest.mark.parametrize("script", [LOOP, FIT], ids=["loop", "fit"])
def test_killed_at_random_moments(tmp_path, script):
    kills = KILLS[script is FIT]
    length = 60 if script is LOOP else 12  # micro-steps, or epochs
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    unbroken.mkdir()
    broken.mkdir()
    finished(start(script, unbroken, 0, length))
    moments = random.Random(0)
    for _ in range(kills):
        process = start(script, broken, 0.05, length)
        line = process.stdout.readline()
        assert line, process.stderr.read()[-3000:]
        time.sleep(moments.uniform(0, 1.5 / kills if script is LOOP else 1.0))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    finished(start(script, broken, 0, length))
    for one, other in zip(result(broken), result(unbroken), strict=True):
        np.testing.assert_array_equal(one, other)
