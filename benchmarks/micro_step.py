"""Measures milliseconds per micro-step: what accumulating adds to the forward and backward pass.

In one process, on one model and one batch, these sides take turns:

- floor: forward and backward pass alone (SGD with a rate of 1e-12: one pass over the weights);
- bare: the optimizer makes an update on every micro-step;
- Keras option: `gradient_accumulation_steps=N`;
- optax.MultiSteps: in a jitted loop of one's own (JAX only);
- keras_ga: `GradientAccumulationOptimizer(optimizer, N)`.

In each round each side makes whole windows of N micro-steps, in an order that rotates. Figures
are medians over the rounds; ratios are taken within a round first, so that a machine that slows
down for a while slows both sides.

    python benchmarks/micro_step.py --backend jax --parameters 16M --accumulation-steps 8
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import (
    OUTPUT,
    accelerator,
    circumstances,
    counts,
    one_line,
    screen,
    use_backend,
    write_json,
)
from rich.console import Console
from rich.table import Table

FLOOR, BARE, OPTION, OPTAX, OURS = "floor", "bare", "Keras option", "optax.MultiSteps", "keras_ga"
OTHERS = (OPTION, OPTAX, BARE)
# Counters and flags of a window, which the accumulators come on top of.
SMALL_MIB = 0.1

Step = Callable[[int], None]


def sides(optimizer: str, accumulation_steps: int) -> dict[str, Callable[[], Any]]:
    """Returns what makes each side's optimizer, the same learning rate in all but the floor."""
    import keras

    import keras_ga

    def make(**arguments: Any) -> keras.optimizers.Optimizer:
        return keras.optimizers.get(
            {"class_name": optimizer, "config": {"learning_rate": 1e-4, **arguments}}
        )

    made = {
        FLOOR: lambda: keras.optimizers.SGD(1e-12),
        BARE: make,
        OPTION: lambda: make(gradient_accumulation_steps=accumulation_steps),
        OURS: lambda: keras_ga.GradientAccumulationOptimizer(make(), accumulation_steps),
    }
    if keras.backend.backend() == "jax":
        made[OPTAX] = lambda: _optax(optimizer, accumulation_steps)
    return {name: made[name] for name in (FLOOR, BARE, OPTION, OPTAX, OURS) if name in made}


def _optax(optimizer: str, accumulation_steps: int) -> Any:
    import optax

    inner = {"adam": optax.adam, "muon": optax.contrib.muon}[optimizer](1e-4)
    return optax.MultiSteps(inner, every_k_schedule=accumulation_steps)


def make_step(name: str, make: Callable[[], Any], options: argparse.Namespace, size: int) -> Step:
    """Builds a model of its own for a side, and the train step of it."""
    import keras
    import numpy as np
    from models import dense_stack
    from train_steps import OptaxStep, train_step

    keras.utils.set_random_seed(0)
    model = dense_stack(size)
    random = np.random.default_rng(0)
    shape = (options.batch_size, model.input_shape[-1])
    batch = tuple(random.standard_normal(shape, "float32") for _ in range(2))
    if name == OPTAX:
        return OptaxStep(model, batch, make())
    jit = options.jit or keras.backend.backend() == "jax"
    model.compile(optimizer=make(), loss="mse", jit_compile=jit)
    return train_step(model, batch)


def measure(steps: dict[str, Step], accumulation_steps: int, options: argparse.Namespace) -> dict:
    """Lets the sides take turns, and returns each one's milliseconds per micro-step by round."""
    windows = -(-options.steps_per_round // accumulation_steps)
    micro_steps = windows * accumulation_steps
    for step in steps.values():
        step(2 * accumulation_steps)  # traces, compiles, and has closed a window twice
    milliseconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for round_ in range(options.rounds):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            steps[name](micro_steps)
            milliseconds[name].append((time.perf_counter() - start) * 1000 / micro_steps)
    return milliseconds


def ratio(milliseconds: dict[str, list[float]], name: str, to: str) -> float:
    """Returns the median over the rounds of how many times as long `name` takes as `to`."""
    pairs = zip(milliseconds[name], milliseconds[to], strict=True)
    return statistics.median(a / b for a, b in pairs)


def row(size: int, accumulation_steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one size and one N."""
    from train_steps import memory_plan

    steps = {
        name: make_step(name, make, options, size)
        for name, make in sides(options.optimizer, accumulation_steps).items()
    }
    milliseconds = measure(steps, accumulation_steps, options)
    plans = {n: memory_plan(s.compiled) for n, s in steps.items() if hasattr(s, "compiled")}
    figures = {
        name: {
            "milliseconds": statistics.median(milliseconds[name]),
            "times_floor": ratio(milliseconds, name, FLOOR),
            "milliseconds_by_round": milliseconds[name],
            "memory_mib": plans.get(name),
        }
        for name in steps
    }
    others = {name: ratio(milliseconds, name, OURS) for name in OTHERS if name in steps}
    return {
        "parameters": size,
        "accumulation_steps": accumulation_steps,
        "sides": figures,
        "times_keras_ga": others,
    }


def memory_checks(size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compares planned memory (JAX): one copy of the weights on top of the bare step, at any N."""
    import models
    from train_steps import memory_plan

    def peak(name: str, accumulation_steps: int) -> float:
        make = sides(options.optimizer, accumulation_steps)[name]
        plan = memory_plan(make_step(name, make, options, size).compiled)
        gc.collect()
        return plan["peak"]

    copy = 4 * models.dense_stack(size).count_params() / 2**20
    bare, at_2, at_64 = peak(BARE, 2), peak(OURS, 2), peak(OURS, 64)
    return [
        {
            "parameters": size,
            "check": "keras_ga plans at most the bare step and one float32 copy of the weights",
            "holds": at_2 <= bare + copy + SMALL_MIB,
            "mib": {"keras_ga": at_2, "bare": bare, "copy of the weights": copy},
        },
        {
            "parameters": size,
            "check": "keras_ga plans the same at N = 2 and at N = 64",
            "holds": abs(at_2 - at_64) <= SMALL_MIB,
            "mib": {"N = 2": at_2, "N = 64": at_64},
        },
    ]


def print_tables(console: Console, figures: dict[str, Any]) -> None:
    """Prints a table of all rows, then the memory checks."""
    table = Table(title=title(figures), title_justify="left", caption_justify="left")
    table.caption = caption(figures)
    headings = ("weights", "N", "side", "ms / micro-step", "x floor", "x keras_ga")
    with_memory = figures["backend"] == "jax"
    for heading in headings + ("MiB planned", "of it temporary") * with_memory:
        table.add_column(heading, justify="left" if heading == "side" else "right")
    for row in figures["rows"]:
        for name, side in row["sides"].items():
            times = row["times_keras_ga"].get(name)
            cells = [
                f"{row['parameters'] / 1e6:.3g} M" if name == FLOOR else "",
                str(row["accumulation_steps"]) if name == FLOOR else "",
                name,
                f"{side['milliseconds']:.2f}",
                f"{side['times_floor']:.2f}",
                f"{times:.2f}" if times else "",
            ]
            if with_memory:
                memory = side["memory_mib"]
                cells += [f"{memory['peak']:.0f}", f"{memory['temporaries']:.0f}"]
            table.add_row(*cells, style="bold" if name == OURS else None)
        table.add_section()
    console.print(table)
    for check in figures["memory_checks"]:
        verdict = "holds" if check["holds"] else "[bold red]FAILS[/]"
        mib = ", ".join(f"{name} {value:.1f}" for name, value in check["mib"].items())
        console.print(f"{verdict}: {check['check']} ({mib} MiB)", soft_wrap=True, highlight=False)


def title(figures: dict[str, Any]) -> str:
    """Returns what was measured in a few words."""
    backend = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "torch"}[figures["backend"]]
    compiled = {"jax": "", "tensorflow": " with XLA", "torch": " with torch.compile"}
    eager = {"jax": "", "tensorflow": ", graph", "torch": ", eager"}
    how = (compiled if figures["jit"] else eager)[figures["backend"]]
    return f"{figures['optimizer'].capitalize()} on {backend}{how}"


def caption(figures: dict[str, Any]) -> str:
    """Returns the circumstances that the figures hold for."""
    packages = ("keras", figures["backend"], *(["optax"] * (figures["backend"] == "jax")))
    how = f"batch {figures['batch_size']}, medians of {figures['rounds']} rounds"
    return f"{how}; {one_line(figures, packages)}"


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Milliseconds per micro-step of keras_ga, the bare optimizer, Keras's "
        "built-in accumulation and optax.MultiSteps, against the forward and backward pass alone.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", choices=("jax", "tensorflow", "torch"), default="jax", help="Keras backend")
    add("--jit", action="store_true", help="jit_compile=True (TensorFlow, torch; JAX always is)")
    add("--optimizer", choices=("adam", "muon"), default="adam", help="muon: try 1M first")
    add("--parameters", type=counts, default="1M,16.8M,60M", help="weights of the model")
    add("--accumulation-steps", type=counts, default="2,8,32", help="values of N")
    add("--batch-size", type=int, default=32, help="rows in a micro-batch")
    add("--rounds", type=int, default=7, help="turns of each side")
    add("--steps-per-round", type=int, default=16, help="micro-steps of a turn, at least")
    add("--output", type=Path, default=OUTPUT, help="folder for the JSON file and the picture")
    return parser.parse_args(arguments)


def main() -> None:
    """Measures, prints, writes."""
    options = parse_options()
    use_backend(options.backend)
    console = screen()
    rows, checks = [], []
    with console.status("measuring") as status:
        for size in options.parameters:
            for accumulation_steps in options.accumulation_steps:
                status.update(f"measuring {size / 1e6:.1f} M weights, N = {accumulation_steps}")
                rows.append(row(size, accumulation_steps, options))
                gc.collect()
            if options.backend == "jax":
                checks += memory_checks(size, options)
    figures = {
        "benchmark": "micro_step",
        "backend": options.backend,
        "jit": options.jit,
        "optimizer": options.optimizer,
        "batch_size": options.batch_size,
        "rounds": options.rounds,
        "device": accelerator(options.backend),
        **circumstances(),
        "rows": rows,
        "memory_checks": checks,
    }
    print_tables(console, figures)
    jit = "_jit" if options.jit else ""
    path = options.output / f"micro_step_{options.backend}{jit}_{options.optimizer}.json"
    write_json(figures, path)
    from pictures import draw_micro_steps

    draw_micro_steps(figures, title(figures), caption(figures), path.with_suffix(".png"))
    console.print(f"Figures: {path}\nPicture: {path.with_suffix('.png')}", soft_wrap=True)


if __name__ == "__main__":
    main()
