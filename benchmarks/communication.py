"""Counts what devices send to each other in one window of N micro-batches; measures no time.

On TensorFlow, a `MirroredStrategy` over two logical devices runs eagerly, in a loop that reduces
nothing besides, and what it asks of its `CrossDeviceOps` is counted. Whether `fit` runs, which
compiles the step, is tried as well. On JAX, the train step is compiled as `fit` does it for
`DataParallel` over eight host devices, and its collectives are read from the HLO: those at the top
run on every micro-step, those in the update's loop or branch once per window.

Bytes are the sizes of the tensors that a collective leaves on one device. What goes over a wire
depends on the algorithm: on a ring each device sends nearly twice those of an all-reduce, and
nearly once those of an all-gather.

    python benchmarks/communication.py --backend tensorflow
    python benchmarks/communication.py --backend jax
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from common import OUTPUT, circumstances, count, one_line, screen, use_backend, write_json
from rich.table import Table

DEVICES = {"tensorflow": 2, "jax": 8}
BARE, LARGE, OPTION, OURS, PARTS = (
    "bare, every micro-batch",
    "bare, large batch",
    "Keras option",
    "keras_ga",
    "keras_ga, in parts",
)
EACH, UPDATE = "each step", "only in the update"
BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8}


def optimizer(side: str, accumulation_steps: int) -> Any:
    """Returns Adam, bare or accumulating in one of the ways."""
    import keras

    import keras_ga

    if side in (BARE, LARGE):
        return keras.optimizers.Adam()
    if side == OPTION:
        return keras.optimizers.Adam(gradient_accumulation_steps=accumulation_steps)
    parts = {"shard_accumulators": "batch"} if side == PARTS else {}
    wrapper = keras_ga.GradientAccumulationOptimizer
    return wrapper(keras.optimizers.Adam(), accumulation_steps, **parts)


def window(options: argparse.Namespace, side: str) -> tuple[int, int]:
    """Returns how many steps a side takes for the window's rows, and the rows of each."""
    if side == LARGE:
        return 1, options.accumulation_steps * options.batch_size
    return options.accumulation_steps, options.batch_size


# TensorFlow.


def counting_operations() -> Any:
    """Returns `CrossDeviceOps` that reduce to one device, and keep what was asked of them."""
    import tensorflow as tf

    class Counting(tf.distribute.CrossDeviceOps):
        def __init__(self) -> None:
            super().__init__()
            self._operations = tf.distribute.ReductionToOneDevice()
            self.sent: Counter[str] = Counter()

        def _count(self, tensors: list[Any]) -> None:
            sizes = [tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors]
            self.sent.update(reductions=1, tensors=len(sizes), bytes=sum(sizes))

        def reduce_implementation(self, reduce_op: Any, value: Any, *arguments: Any) -> Any:
            self._count([value.values[0]])
            return self._operations.reduce_implementation(reduce_op, value, *arguments)

        def batch_reduce_implementation(self, reduce_op: Any, pairs: Any, options: Any) -> Any:
            self._count([value.values[0] for value, _ in pairs])
            return self._operations.batch_reduce_implementation(reduce_op, pairs, options)

        def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
            self.sent.update(broadcasts=1)
            return self._operations.broadcast_implementation(tensor, destinations)

    return Counting()


def mirrored(
    options: argparse.Namespace, side: str, strategy: Any, sent: Counter[str]
) -> dict[str, Any]:
    """Runs one window under the strategy, and returns what it sent; then tries `fit`."""
    import numpy as np
    import tensorflow as tf
    from models import dense_stack

    steps, rows = window(options, side)
    with strategy.scope():
        model = dense_stack(options.parameters)
        its = optimizer(side, steps)
        its.build(model.trainable_variables)
    batch = np.ones((rows, model.input_shape[-1]), "float32")
    part = tf.constant(batch[: rows // strategy.num_replicas_in_sync])

    def on_replica() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(part, training=True) - part))
            loss /= strategy.num_replicas_in_sync
        its.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    by_step = []
    for _ in range(steps):
        sent.clear()
        strategy.run(on_replica)
        by_step.append({k: sent[k] for k in ("reductions", "tensors", "bytes", "broadcasts")})
    total = {key: sum(step[key] for step in by_step) for key in by_step[0]}

    with strategy.scope():
        model = dense_stack(options.parameters)
        model.compile(optimizer(side, steps), loss="mse")
    data = np.tile(batch, (steps, 1))
    try:
        model.fit(data, data, batch_size=rows, verbose=0)
        fit = "runs"
    except RuntimeError as error:
        fit = f"raises {in_short(error)}"
    return {"steps": steps, **total, "by_step": by_step, "fit": fit}


def in_short(error: Exception) -> str:
    """Returns the type of an error and the first sentence of its cause, without colours."""
    paragraphs = re.sub(r"\x1b\[\d*m", "", str(error)).strip().split("\n\n")
    # Keras names the layer first, and what went wrong in it next.
    named_first = paragraphs[0].startswith("Exception encountered") and len(paragraphs) > 1
    sentence = paragraphs[named_first].strip().split(". ")[0]
    return f"{type(error).__name__}: {' '.join(sentence.split())}"


def on_tensorflow(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Counts all sides on logical devices of one CPU."""
    use_backend("tensorflow")
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")  # it advises against running eagerly
    tf.config.set_visible_devices([], "GPU")
    devices = DEVICES["tensorflow"]
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * devices
    tf.config.set_logical_device_configuration(cpu, logical)
    counting = counting_operations()
    names = [f"CPU:{index}" for index in range(devices)]
    strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=counting)
    sides = (BARE, LARGE, OPTION, OURS)
    return {side: mirrored(options, side, strategy, counting.sent) for side in sides}


# JAX.


def collectives(text: str) -> dict[str, dict[str, dict[str, int]]]:
    """Returns number and bytes of collectives by kind, at the top of compiled HLO and elsewhere.

    What is not at the top is in a loop's body or a branch. An operation of several tensors, as XLA
    packs them, is one.
    """
    where, found = "", {EACH: {}, UPDATE: {}}
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    for line in text.splitlines():
        if re.match(r"(ENTRY )?%?\S+ \(.*\) -> .* \{$", line):
            where = EACH if line.startswith("ENTRY") else UPDATE
        operation = re.search(rf" = (.+?) ({kinds})\(", line)
        if operation:
            of_kind = found[where].setdefault(operation[2], {"operations": 0, "bytes": 0})
            of_kind["operations"] += 1
            of_kind["bytes"] += size_in_bytes(operation[1])
    return found


def size_in_bytes(shapes: str) -> int:
    """Returns the bytes of an HLO type, such as `(f32[], bf16[64,8]{1,0})`."""
    size = 0
    for dtype, dimensions in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        elements = BYTES[dtype]
        for dimension in filter(None, dimensions.split(",")):
            elements *= int(dimension)
        size += elements
    return size


def data_parallel(options: argparse.Namespace, side: str) -> dict[str, Any]:
    """Compiles a side's train step for all devices, and returns what it sends in a window."""
    import jax
    import keras
    import numpy as np
    from models import dense_stack
    from train_steps import memory_plan, state_of

    steps, rows = window(options, side)
    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    keras.distribution.set_distribution(distribution)
    model = dense_stack(options.parameters)
    model.compile(optimizer(side, steps), loss="mse")
    model.optimizer.build(model.trainable_variables)
    state = state_of(model)
    array = np.ones((rows, model.input_shape[-1]), "float32")
    layout = distribution.get_data_layout(array.shape)
    batch = (keras.distribution.distribute_tensor(array, layout),) * 2
    # As Keras's trainer has it: every part of the state comes out in the sharding it went in.
    shardings = (None, jax.tree.map(lambda value: value.sharding, state))
    jitted = jax.jit(model.train_step, donate_argnums=0, out_shardings=shardings)
    compiled = jitted.lower(state, batch).compile()
    sent = collectives(compiled.as_text())
    each, update = (sum(kind["bytes"] for kind in kinds.values()) for kinds in sent.values())
    arguments = memory_plan(compiled)["arguments"]
    total = {"bytes": steps * each + update, "arguments_mib_per_device": arguments}
    return {"steps": steps, "collectives": sent, **total}


def on_jax(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Counts all sides on host devices, whose number must be set before JAX is imported."""
    host_devices = f"--xla_force_host_platform_device_count={DEVICES['jax']}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {host_devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    use_backend("jax")
    return {side: data_parallel(options, side) for side in (BARE, LARGE, OPTION, OURS, PARTS)}


# Both.


def print_table(figures: dict[str, Any]) -> None:
    """Prints a row for each side."""
    columns = {
        "tensorflow": ("reductions", "tensors", "MiB", "broadcasts", "fit"),
        "jax": (EACH, UPDATE, "MiB", "arguments, MiB per device"),
    }
    table = Table(
        title=f"Sent in one window: N = {figures['accumulation_steps']}, {figures['devices']} "
        f"devices, {figures['parameters']} weights in {figures['variables']} variables",
        title_justify="left",
    )
    table.caption, table.caption_justify = one_line(figures, ("keras", figures["backend"])), "left"
    table.add_column("side", no_wrap=True)
    for heading in ("steps", *columns[figures["backend"]]):
        texts = heading in ("fit", EACH, UPDATE)
        table.add_column(heading, justify="left" if texts else "right")
    for side, sent in figures["sides"].items():
        mib = f"{sent['bytes'] / 2**20:.2f}"
        if figures["backend"] == "tensorflow":
            counted = (sent["reductions"], sent["tensors"], mib, sent["broadcasts"], sent["fit"])
        else:
            texts = [in_words(kinds) for kinds in sent["collectives"].values()]
            counted = (*texts, mib, f"{sent['arguments_mib_per_device']:.2f}")
        table.add_row(side, str(sent["steps"]), *map(str, counted))
    screen().print(table)


def in_words(kinds: dict[str, dict[str, int]]) -> str:
    """Returns collectives as `8 all-gather, 4.01 MiB`."""
    words = [
        f"{sent['operations']} {kind}, {sent['bytes'] / 2**20:.2f} MiB"
        for kind, sent in kinds.items()
    ]
    return "; ".join(words) or "none"


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line and refuses rows that the devices can't share evenly."""
    parser = argparse.ArgumentParser(
        description="What devices send to each other in one window, on two logical devices "
        "(TensorFlow) or eight host devices (JAX). Needs no GPU and measures no time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", choices=tuple(DEVICES), default="jax", help="Keras backend")
    add("--parameters", type=count, default="1M", help="weights, about")
    add("--accumulation-steps", type=count, default="8", help="N, micro-batches in a window")
    add("--batch-size", type=count, default="32", help="rows of a micro-batch, on all devices")
    add("--output", type=Path, default=OUTPUT, help="folder for the JSON file")
    options = parser.parse_args(arguments)
    if options.accumulation_steps == 1:
        parser.error("--accumulation-steps must be at least 2, because 1 is the bare optimizer")
    devices = DEVICES[options.backend]
    if options.batch_size % devices:
        parser.error(
            f"--batch-size must divide by {devices}, because each device takes as many rows. "
            f"Received: {options.batch_size}"
        )
    return options


def main() -> None:
    """Counts, prints, writes."""
    options = parse_options()
    sides = {"tensorflow": on_tensorflow, "jax": on_jax}[options.backend](options)
    from models import dense_stack  # imports Keras, whose backend is chosen by now

    model = dense_stack(options.parameters)
    figures = {
        "benchmark": "communication",
        "backend": options.backend,
        "devices": DEVICES[options.backend],
        "accumulation_steps": options.accumulation_steps,
        "batch_size": options.batch_size,
        "parameters": model.count_params(),
        "variables": len(model.trainable_variables),
        **circumstances(),
        "sides": sides,
    }
    print_table(figures)
    path = options.output / f"communication_{options.backend}.json"
    write_json(figures, path)
    screen().print(f"Figures: {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
