"""Gradient accumulation for Keras 3: the large batch's weights at the small batch's memory."""

from keras_ga.optimizer import GradientAccumulationOptimizer

__all__ = ["GradientAccumulationOptimizer", "__version__"]

__version__ = "0.1.0"
