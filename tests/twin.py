"""The window in NumPy, with momentum SGD inside: an oracle that uses no framework."""

import numpy as np


class Twin:
    """What `GradientAccumulationOptimizer(SGD(rate, momentum), N)` must do to `weights`."""

    def __init__(
        self, weights, steps, *, reduction="mean", nonfinite="propagate", rate=0.5, momentum=0.5
    ):
        self.weights = [np.array(w, "float64") for w in weights]
        self.velocities = [np.zeros_like(w) for w in self.weights]
        self.had_gradient = [False] * len(weights)
        self.steps, self.reduction, self.nonfinite = steps, reduction, nonfinite
        self.rate, self.momentum = rate, momentum
        self.updates = self.micro_steps = self.dropped = self.skipped = 0
        self.has_updated = False
        self.reset()

    def reset(self):
        self.totals = [np.zeros_like(w) for w in self.weights]
        self.weight_sum, self.pending = 0.0, 0

    def apply(self, gradients, weight=None):
        weight = 1.0 if weight is None else weight
        self.micro_steps += 1
        self.pending += 1
        self.had_gradient = [
            had or g is not None for had, g in zip(self.had_gradient, gradients, strict=True)
        ]
        finite = all(np.isfinite(g).all() for g in gradients if g is not None)
        if self.nonfinite == "drop" and not finite:
            self.dropped += 1
        elif weight != 0:
            self.weight_sum += weight
            for total, gradient in zip(self.totals, gradients, strict=True):
                if gradient is not None:
                    total += weight * gradient
        self.has_updated = False
        if self.pending >= self.steps:
            self.close()

    def close(self):
        if self.pending == 0:
            return
        self.has_updated = self.weight_sum != 0
        if self.has_updated:
            self.update()
        else:
            self.skipped += 1
        self.reset()

    def update(self):
        self.updates += 1
        divisor = self.weight_sum if self.reduction == "mean" else 1.0
        for i, had in enumerate(self.had_gradient):
            if had:
                gradient = self.totals[i] / divisor
                self.velocities[i] = self.momentum * self.velocities[i] - self.rate * gradient
                self.weights[i] += self.velocities[i]
