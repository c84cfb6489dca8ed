"""Accumulation on several GPUs of one machine: `tf.distribute.MirroredStrategy` and `fit`.

Model, optimizer and `compile` go into the strategy's scope; the rest is as on one device. Each
replica adds its gradients to accumulators of its own; the last micro-batch of a window reduces
them, once. The run is compared with the whole batch on one device, and with what Keras does on
several devices without accumulation: it clips each replica's gradient, not their sum.

It uses the GPUs that TensorFlow finds; where there are fewer than two it makes two devices of the
CPU, so that it runs anywhere. `--mixed` trains in float16 with a loss scale that all replicas agree
on.

    python examples/multi_gpu.py
"""

from __future__ import annotations

import argparse
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_ga


def options() -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=2, help="epochs to train for (2)")
    parser.add_argument("--batch-size", type=int, default=256, help="rows of an update (256)")
    parser.add_argument("--accumulation-steps", type=int, default=4, help="micro-batches (4)")
    parser.add_argument("--mixed", action="store_true", help="mixed_float16")
    chosen = parser.parse_args()
    if chosen.batch_size % chosen.accumulation_steps:
        parser.error("--batch-size must be divisible by --accumulation-steps")
    return chosen


def devices() -> list[str]:
    """Returns the GPUs, or two devices made of the CPU; for before TensorFlow is first used."""
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) > 1:
        return [f"GPU:{i}" for i in range(len(gpus))]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
    return ["CPU:0", "CPU:1"]


def make_model() -> keras.Model:
    """Returns a small network, with the same initial weights each time."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )


def make_optimizer() -> keras.optimizers.Optimizer:
    """Returns the optimizer of the recipe, as it would be without accumulation."""
    return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.3)


def trained(
    optimizer: keras.optimizers.Optimizer, batch_size: int, chosen: argparse.Namespace
) -> list[np.ndarray]:
    """Returns the weights after training on the digits in their order, in the scope that holds."""
    x, y = load_digits(return_X_y=True)
    rows = len(x) // chosen.batch_size * chosen.batch_size
    model = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss)
    x, y = (x[:rows] / 16).astype("float32"), y[:rows]
    model.fit(x, y, batch_size=batch_size, epochs=chosen.epochs, shuffle=False, verbose=0)
    return [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]


def main() -> None:
    """Trains in three ways and compares."""
    chosen = options()
    strategy = tf.distribute.MirroredStrategy(devices())
    if chosen.mixed:
        keras.config.set_dtype_policy("mixed_float16")
    large = trained(make_optimizer(), chosen.batch_size, chosen)
    with strategy.scope():
        bare = trained(make_optimizer(), chosen.batch_size, chosen)
        optimizer = keras_ga.GradientAccumulationOptimizer(
            make_optimizer(), chosen.accumulation_steps
        )
        if chosen.mixed:
            optimizer = keras_ga.LossScaleOptimizer(optimizer)
        ours = trained(optimizer, chosen.batch_size // chosen.accumulation_steps, chosen)
    print(f"Trained on {strategy.num_replicas_in_sync} replicas. Largest difference of a weight")
    for name, weights in (("keras_ga", ours), ("Keras, whole batch", bare)):
        away = max(float(np.abs(a - b).max()) for a, b in zip(weights, large, strict=True))
        print(f"from the whole batch on one device, {name}: {away:.1e}")


if __name__ == "__main__":
    main()
