"""A language model for the examples that needs no download: tiny, of bytes, of KerasHub's Llama 3.

Also the text for it: lines that come with Python and with scikit-learn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import keras_hub
import numpy as np
from sklearn import datasets

START, VOCABULARY = 256, 257  # a byte is a token, and there is one that starts a line


def lines_of(text: str) -> list[str]:
    """Returns the lines with words in them."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if len(line) > 4 and line[0].isalpha()]


def documentation_of_python() -> list[str]:
    """Returns the lines of Python's help texts."""
    return lines_of("\n".join(topics[name] for name in sorted(topics)))


def descriptions_of_datasets() -> list[str]:
    """Returns the lines of scikit-learn's descriptions of its datasets."""
    names = ("iris", "wine", "diabetes", "breast_cancer", "linnerud", "digits")
    return lines_of("\n".join(getattr(datasets, f"load_{name}")().DESCR for name in names))


def padded(rows: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids (rows, length), padded with zeros, and 1 where there is a token."""
    ids = np.zeros((len(rows), length), "int32")
    valid = np.zeros((len(rows), length), "float32")
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens[:length]
        valid[row, : len(tokens)] = 1
    return ids, valid


def token_loss() -> keras.losses.Loss:
    """Returns the sum of the tokens' cross-entropies, each times its weight."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


def make_model(
    layers: int, steps: int, length: int, on_step: Callable[[], None]
) -> keras_hub.models.Llama3CausalLM:
    """Returns the model, trained for so many steps on Python's documentation."""
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=layers,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=64,
        intermediate_dim=128,
    )
    model = keras_hub.models.Llama3CausalLM(backbone=backbone, preprocessor=None)
    model.compile(keras.optimizers.Adam(5e-3), token_loss(), weighted_metrics=[])
    lines = documentation_of_python()
    ids, valid = padded([[START, *line.encode()] for line in lines], length + 1)
    draws = np.random.default_rng(0)
    for _ in range(steps):
        rows = draws.integers(len(ids), size=32)
        x = {"token_ids": ids[rows, :-1], "padding_mask": valid[rows, :-1]}
        counts = valid[rows, 1:]
        model.train_on_batch(x, ids[rows, 1:], sample_weight=counts / counts.sum())
        on_step()
    return model
