"""A KerasHub language model with adapters, split, on padded lines: what `fit` has in production."""

import keras
import numpy as np
import pytest
from support import values

import keras_ga

keras_hub = pytest.importorskip("keras_hub")

ROWS, LENGTH, VOCABULARY = 12, 10, 50


def trained(micro_batch_size=None, **arguments):
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=16,
        intermediate_dim=32,
    )
    backbone.enable_lora(2)
    model = keras_hub.models.Llama3CausalLM(backbone=backbone, preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    model.compile(optimizer, loss, weighted_metrics=["accuracy"], **arguments)
    if micro_batch_size:
        keras_ga.split_batches(model, micro_batch_size)
    rng = np.random.default_rng(0)
    ids = rng.integers(1, VOCABULARY, (ROWS, LENGTH + 1))
    valid = np.arange(LENGTH + 1) < rng.integers(3, LENGTH + 2, (ROWS, 1))
    x = {"token_ids": ids[:, :-1], "padding_mask": valid[:, :-1]}
    before = values(model.trainable_variables)
    history = model.fit(
        x,
        ids[:, 1:],
        sample_weight=valid[:, 1:].astype("float32"),
        batch_size=ROWS // 2,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    return before, values(model.trainable_variables), history.history


def test_adapters_on_padded_lines_are_the_whole_batch():
    before, whole, logs = trained()
    _, split, split_logs = trained(micro_batch_size=4)
    gone = max(np.abs(a - b).max() for a, b in zip(whole, before, strict=True))
    assert max(np.abs(a - b).max() for a, b in zip(whole, split, strict=True)) < 1e-5 * gone
    for name, log in logs.items():
        np.testing.assert_allclose(split_logs[name], log, rtol=2e-6, err_msg=name)
