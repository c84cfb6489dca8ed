"""Gradient accumulation in Keras 3.

Train with the batch you want on the memory you have. A recipe asks for batches of 128 rows, and 16
fit. One small network is trained on scikit-learn's digits in four ways, from the same weights, on
the same rows in the same order:

1. the batch of 128;
2. batches of 16, alone, with the same recipe;
3. 8 batches of 16 per update: `keras_ga.GradientAccumulationOptimizer`;
4. the batch of 128, of which each step works through 16 rows at a time: `keras_ga.split_batches`.

Ways 3 and 4 end on the weights of way 1, to float rounding. It takes some seconds without a GPU.
"""

# %%
# %pip install -q keras-ga scikit-learn matplotlib

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import keras_ga

# %% [markdown]
# ## Data and model
#
# The rows are shuffled once, so that all ways see them in the same order. The normalisation is
# `GroupNormalization`: BatchNormalization normalises by the batch it sees, here a small one.

# %%
order = np.random.default_rng(0).permutation(1792)  # 14 batches of 128
x, y = (load_digits().images / 16).astype("float32")[order, ..., None], load_digits().target[order]


def new_model():
    """Makes the network, with the same initial weights each time."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same"),
            keras.layers.GroupNormalization(4),
            keras.layers.Activation("tanh"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


# %% [markdown]
# ## The recipe
#
# AdamW, with a learning rate that goes down to zero over the updates of the large batch.
# `total_updates` counts them: with `GradientAccumulationOptimizer`, schedules go by updates, not by
# the small batches that `fit` draws.

# %%
EPOCHS = 6
LARGE, SMALL = 128, 16
STEPS = LARGE // SMALL
updates = keras_ga.total_updates(len(x) // SMALL, EPOCHS, STEPS)
print(updates, "updates")


def recipe():
    """Makes the large batch's optimizer."""
    return keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(1e-2, updates))


def train(optimizer, batch_size, micro_batch_size=None):
    """Trains a new model; returns its history, updates and weights."""
    model = new_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    if micro_batch_size:
        keras_ga.split_batches(model, micro_batch_size)
    history = model.fit(x, y, batch_size=batch_size, epochs=EPOCHS, shuffle=False, verbose=0)
    weights = np.concatenate([w.ravel() for w in model.get_weights()])
    return history.history, int(optimizer.iterations), weights


# %% [markdown]
# ## Four ways

# %%
ways = {
    "128 rows": train(recipe(), LARGE),
    "16 rows, alone": train(recipe(), SMALL),
    "8 x 16, accumulated": train(
        keras_ga.GradientAccumulationOptimizer(recipe(), accumulation_steps=STEPS), SMALL
    ),
    "128 rows, split by 16": train(recipe(), LARGE, micro_batch_size=SMALL),
}
large = ways["128 rows"][2]
differences = {name: float(np.abs(way[2] - large).max()) for name, way in ways.items()}
for name, (history, made, _) in ways.items():
    print(
        f"{name:22}{made:5} updates   accuracy {history['accuracy'][-1]:.3f}   "
        f"largest difference of a weight {differences[name]:.0e}"
    )

# %%
for name, (history, _, _) in ways.items():
    style = {"linewidth": 7, "alpha": 0.3} if name == "128 rows" else {}
    plt.plot(range(1, EPOCHS + 1), history["loss"], label=name, **style)
plt.yscale("log")
plt.xlabel("epoch")
plt.ylabel("loss")
plt.legend()
plt.show()

# %% [markdown]
# ## Which way
#
# | | `GradientAccumulationOptimizer` | `split_batches` |
# |---|---|---|
# | a batch of `fit` | is a small one | stays the large one |
# | callbacks, `steps_per_epoch` | count small batches | count updates |
# | small batches of unequal size, masks | `apply(weight=...)` in your own loop | exact by itself |
# | a `train_step` of your own | works | is refused |
# | the size that fits | you choose | `"auto"` finds it |
#
# What neither can do: BatchNormalization's forward pass, losses that compare rows with each other,
# and less time: as many passes are made.
