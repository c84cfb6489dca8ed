"""Measures the memory of an effective batch of 64 on a decoder of BLOOM-560M's size, as planned.

JAX compiles the train step ahead of time for abstract arrays, and XLA reports what the step would
take: arguments (weights, Adam's slots, accumulators) and temporaries (activations, gradients).
Nothing is allocated and nothing runs, so that no GPU is needed, and about 1 GB of memory here. The
effective batch stays the same; micro-batches of 64, 32, ..., 1 rows make it in 1, 2, ..., 64
micro-steps. Micro-batch 64 is the bare optimizer.

The plan is the CPU compiler's: it computes some bfloat16 operations in float32, so that
activations take more than they would on a GPU.

    python benchmarks/memory_plan.py
    python benchmarks/memory_plan.py --layers 12 --width 768 --heads 12 --vocabulary 20000
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import OUTPUT, circumstances, counts, one_line, screen, use_backend, write_json
from rich.table import Table

OPTION, OURS = "Keras option", "keras_ga"


def optimizer(side: str, accumulation_steps: int) -> Any:
    """Returns Adam, accumulating in one of the two ways; bare where there is one micro-batch."""
    import keras

    import keras_ga

    if accumulation_steps == 1:
        return keras.optimizers.Adam(1e-5)
    if side == OPTION:
        return keras.optimizers.Adam(1e-5, gradient_accumulation_steps=accumulation_steps)
    return keras_ga.GradientAccumulationOptimizer(keras.optimizers.Adam(1e-5), accumulation_steps)


def abstract_state(build: Callable[[], Any]) -> tuple[Any, Any]:
    """Returns the model that `build` makes, and its state as shapes and dtypes without values.

    Under `jax.eval_shape` initializers are traced and not run. The model's variables hold dead
    tracers afterwards; its train step never looks at them, since it gets the state as arguments.
    """
    import jax
    from train_steps import state_of

    models = []

    def state() -> Any:
        model = build()
        model.optimizer.build(model.trainable_variables)
        models.append(model)
        return state_of(model)

    shapes = jax.eval_shape(state)
    return models[0], shapes


def plan(options: argparse.Namespace, side: str, micro_batch: int) -> dict[str, float]:
    """Compiles one train step, and returns its planned memory in MiB."""
    import jax
    import keras
    from models import decoder
    from train_steps import memory_plan

    steps = options.batch_size // micro_batch

    def build() -> keras.Model:
        model = decoder(
            number_of_layers=options.layers,
            width=options.width,
            heads=options.heads,
            vocabulary=options.vocabulary,
            sequence=options.sequence,
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer(side, steps), loss=loss)
        return model

    model, state = abstract_state(build)
    batch = (
        jax.ShapeDtypeStruct((micro_batch, options.sequence), "int32"),
        jax.ShapeDtypeStruct((micro_batch,), "int32"),
    )
    jitted = jax.jit(model.train_step, donate_argnums=0)
    figures = memory_plan(jitted.lower(state, batch).compile())
    parameters = sum(shape.size for shape in state[0])
    del model, state, jitted  # so that what was traced for them can go, too
    keras.backend.clear_session()
    jax.clear_caches()
    gc.collect()
    return {**figures, "parameters": parameters}


def rows(options: argparse.Namespace, on_start: Callable[[str], None]) -> list[dict[str, Any]]:
    """Plans every micro-batch on both sides, the largest first."""
    found = []
    for micro_batch in sorted(options.micro_batches, reverse=True):
        steps = options.batch_size // micro_batch
        made: dict[str, Any] = {}
        for side in (OURS, OPTION):
            on_start(f"compiling micro-batch {micro_batch}, {side}")
            # With one micro-batch both are the bare optimizer.
            alike = steps == 1 and made
            made[side] = made[OURS] if alike else plan(options, side, micro_batch)
        found.append({"micro_batch": micro_batch, "accumulation_steps": steps, "sides": made})
    return found


def summary(figures: dict[str, Any]) -> str:
    """Says in one sentence how far memory falls, and what cannot fall."""
    rows = figures["rows"][0], figures["rows"][-1]
    first, last = (f"{row['sides'][OURS]['peak'] / 1024:.1f} GiB" for row in rows)
    sizes = [f"in micro-batches of {row['micro_batch']}" for row in rows]
    if rows[0]["accumulation_steps"] == 1:
        sizes[0] = "at once"
    return f"batch {figures['batch_size']}: {first} {sizes[0]}, {last} {sizes[1]}"


def print_table(figures: dict[str, Any]) -> None:
    """Prints a row for each micro-batch."""
    size = figures["rows"][0]["sides"][OURS]["parameters"]
    table = Table(title=f"{size / 1e6:.0f} M weights, {summary(figures)}", title_justify="left")
    table.caption, table.caption_justify = one_line(figures, ("keras", "jax")), "left"
    table.add_column("micro-batch", justify="right")
    table.add_column("N", justify="right")
    for heading in ("keras_ga, GiB", "arguments", "temporaries", "Keras option, GiB"):
        table.add_column(heading, justify="right")
    for row in figures["rows"]:
        ours, option = row["sides"][OURS], row["sides"][OPTION]
        cells = (ours["peak"], ours["arguments"], ours["temporaries"], option["peak"])
        gib = [f"{mib / 1024:.2f}" for mib in cells]
        table.add_row(str(row["micro_batch"]), str(row["accumulation_steps"]), *gib)
    console = screen()
    console.print(table)
    console.print(
        "Weights and Adam's two slots, in float32, take "
        f"{12 * size / 2**30:.1f} GiB whatever the batch, and accumulators (N > 1) "
        f"{4 * size / 2**30:.1f} GiB more.",
        highlight=False,
    )


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line and refuses micro-batches that do not make the batch."""
    parser = argparse.ArgumentParser(
        description="Planned memory of one effective batch in micro-batches of falling size, for a "
        "decoder of BLOOM-560M's size (mixed_bfloat16, Adam). Compiles only; needs no GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=int, default=24, help="transformer blocks")
    add("--width", type=int, default=1024, help="units in a block")
    add("--heads", type=int, default=16, help="attention heads")
    add("--vocabulary", type=int, default=250_880, help="tokens")
    add("--sequence", type=int, default=512, help="tokens in a row")
    add("--batch-size", type=int, default=64, help="effective batch, rows")
    add("--micro-batches", type=counts, default="64,32,16,8,4,2,1", help="rows in a micro-batch")
    add("--output", type=Path, default=OUTPUT, help="folder for the JSON file and the picture")
    options = parser.parse_args(arguments)
    for micro_batch in options.micro_batches:
        if options.batch_size % micro_batch:
            parser.error(
                f"--micro-batches must divide --batch-size {options.batch_size}, because it is "
                f"made of whole micro-batches. Received: {micro_batch}"
            )
    return options


def main() -> None:
    """Plans, prints, writes."""
    options = parse_options()
    use_backend("jax")
    import keras
    from pictures import draw_memory_plan

    keras.config.set_dtype_policy("mixed_bfloat16")
    console = screen()
    with console.status("compiling") as status:
        found = rows(options, status.update)
    model = {name: getattr(options, name) for name in ("layers", "width", "heads", "vocabulary")}
    figures = {
        "benchmark": "memory_plan",
        "model": {**model, "sequence": options.sequence, "dtype": "mixed_bfloat16"},
        "batch_size": options.batch_size,
        **circumstances(),
        "rows": found,
    }
    print_table(figures)
    path = options.output / "memory_plan.json"
    write_json(figures, path)
    size = found[0]["sides"][OURS]["parameters"]
    title = f"Planned memory, {size / 1e6:.0f} M weights, {summary(figures)}"
    caption = f"mixed_bfloat16, Adam; {one_line(figures, ('keras', 'jax'))}"
    draw_memory_plan(figures, title, caption, path.with_suffix(".png"))
    console.print(f"Figures: {path}\nPicture: {path.with_suffix('.png')}", soft_wrap=True)


if __name__ == "__main__":
    main()
