"""Gradient accumulation for Keras 3: the large batch's weights at the small batch's memory."""

from keras_ga import batch_norm, callbacks, layers, schedules
from keras_ga.loss_scale import LossScaleOptimizer
from keras_ga.optimizer import GradientAccumulationOptimizer
from keras_ga.schedules import scale_learning_rate, total_updates
from keras_ga.split import (
    check_split,
    find_micro_batch_size,
    split_batches,
    unsplit_batches,
)

__all__ = [
    "GradientAccumulationOptimizer",
    "LossScaleOptimizer",
    "__version__",
    "batch_norm",
    "callbacks",
    "check_split",
    "find_micro_batch_size",
    "layers",
    "scale_learning_rate",
    "schedules",
    "split_batches",
    "total_updates",
    "unsplit_batches",
]

__version__ = "0.1.0"
