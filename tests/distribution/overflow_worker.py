"""One of two workers, the second of which overflows: run by `test_strategies.py`."""

import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf

import keras_ga

strategy = tf.distribute.MultiWorkerMirroredStrategy()
worker = strategy.cluster_resolver.task_id
keras.config.set_dtype_policy("mixed_float16")
with strategy.scope():
    variable = keras.Variable(np.ones(3, "float32"))
    optimizer = keras_ga.LossScaleOptimizer(
        keras_ga.GradientAccumulationOptimizer(keras.optimizers.SGD(1.0), 2), initial_scale=8.0
    )
    optimizer.build([variable])


@tf.function
def micro_step(gradient):
    strategy.run(lambda: optimizer.apply([gradient * optimizer.dynamic_scale], [variable]))


# The second of five micro-steps overflows on the second worker alone: both skip it, and make two
# updates of the other four: of the means of 1 and 3, 4 and 5. Each worker has half of them.
for step in range(1, 6):
    value = np.inf if step == 2 and worker == 1 else step / 2
    micro_step(tf.fill((3,), tf.constant(value, "float32")))
inner = optimizer.inner_optimizer
counters = [inner.micro_steps, inner.iterations, optimizer.dynamic_scale]
numbers = [float(keras.ops.convert_to_numpy(counter)) for counter in counters]
sys.stdout.write(f"RESULT {numbers} {variable.numpy().tolist()}\n")
