"""The torch engine: no waiting for the device, no recompiling."""

import socket
import subprocess
import sys

import keras
import numpy as np
import pytest
from support import (
    BACKEND,
    LARGE_BATCH,
    MICRO_BATCH,
    N,
    accumulating,
    assert_close,
    dense_model,
    fitted,
    gradients_of,
    micro_batches,
    rows,
    values,
)

if BACKEND != "torch":
    pytest.skip("needs the torch backend", allow_module_level=True)

import torch
import torch._dynamo.utils


def test_a_held_micro_step_reads_nothing_from_the_device():
    reads = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._local_scalar_dense.default:
                reads.append(function)
            return function(*args, **(kwargs or {}))

    model, optimizer = dense_model(), accumulating(keras.optimizers.Adam(0.1))
    optimizer.build(model.trainable_variables)
    per_step = []
    for x, y in list(micro_batches(*rows()))[: 2 * N]:
        gradients = gradients_of(model, x, y)
        reads.clear()
        with Watching():
            optimizer.apply(gradients, model.trainable_variables)
        per_step.append(len(reads))
    held = [n for i, n in enumerate(per_step) if (i + 1) % N and i > 0]
    assert held == [0] * len(held)
    assert per_step[N - 1] > 0  # closing may: the watch works


def test_compiled_steps_do_not_hit_the_recompile_limit():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, _ = fitted(
        accumulating(keras.optimizers.Adam(0.02)), MICRO_BATCH, jit_compile=True, epochs=6
    )
    large, _ = fitted(keras.optimizers.Adam(0.02), LARGE_BATCH, epochs=6)
    assert_close(model.get_weights(), large.get_weights())
    breaks = " ".join(map(str, torch._dynamo.utils.counters["graph_break"]))
    assert "recompile_limit" not in breaks


@pytest.mark.parametrize("arguments", [{}, {"nonfinite": "drop"}])
@pytest.mark.parametrize("weight", [None, 2.0])
def test_sparse_gradients_sum_repeated_rows(arguments, weight):
    variable = keras.Variable(np.zeros((4, 2), "float32"))
    optimizer = accumulating(keras.optimizers.SGD(1.0), 2, **arguments)
    sparse = torch.sparse_coo_tensor([[1, 1, 3]], [[1.0, 1.0]] * 3, (4, 2), check_invariants=True)
    for _ in range(2):
        optimizer.apply([sparse], [variable], weight=weight)
    assert values([variable])[0][:, 0].tolist() == [0, -2, 0, -1]


PROCESS = """
import sys, warnings
import keras, numpy as np, torch.distributed
import keras_ga

port, rank = sys.argv[1:]
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2
)
optimizer = keras_ga.GradientAccumulationOptimizer("sgd", 2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer.build([keras.Variable(np.zeros(2))])
torch.distributed.destroy_process_group()
print([str(w.message) for w in caught if "2 processes" in str(w.message)])
"""


def test_several_processes_are_warned_of():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", PROCESS, port]
    started = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert all("gradients are not averaged" in output for output in outputs)
