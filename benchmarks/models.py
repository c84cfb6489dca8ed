"""The two models that are measured: a stack of Dense layers, and a decoder of BLOOM-560M's size."""

from __future__ import annotations

import keras
from keras import layers

DEPTH = 4


def dense_stack(parameters: int) -> keras.Model:
    """Builds four equal Dense layers with about so many weights.

    On a few rows their forward and backward pass is short, so that what an optimizer does with
    each weight shows.
    """
    width = max(16, round((parameters / DEPTH) ** 0.5 / 16) * 16)
    hidden = [layers.Dense(width, activation="relu") for _ in range(DEPTH - 1)]
    return keras.Sequential([keras.Input((width,)), *hidden, layers.Dense(width)])


def decoder(
    *, number_of_layers: int, width: int, heads: int, vocabulary: int, sequence: int
) -> keras.Model:
    """Builds a causal transformer with a two-class head that reads the last position."""
    tokens = keras.Input((sequence,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(tokens)
    for _ in range(number_of_layers):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        x = layers.Add()([x, y])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, activation="gelu")(y)
        x = layers.Add()([x, layers.Dense(width)(y)])
    x = layers.LayerNormalization()(x)[:, -1]
    return keras.Model(tokens, layers.Dense(2, dtype="float32")(x))
