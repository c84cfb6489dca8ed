"""Gradient accumulation for Keras 3: the large batch's weights at the small batch's memory."""

from keras_ga import batch_norm, callbacks, layers, schedules
from keras_ga.loss_scale import LossScaleOptimizer
from keras_ga.optimizer import GradientAccumulationOptimizer
from keras_ga.schedules import scale_learning_rate, total_updates

__all__ = [
    "GradientAccumulationOptimizer",
    "LossScaleOptimizer",
    "__version__",
    "batch_norm",
    "callbacks",
    "layers",
    "scale_learning_rate",
    "schedules",
    "total_updates",
]

__version__ = "0.1.0"
