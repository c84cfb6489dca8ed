"""Measures what `import keras_ga` adds to `import keras`, in milliseconds.

Fresh processes take turns: one imports keras alone, one imports keras and then keras_ga. The
figure is the second import's own time, a median; the whole times stand beside it.

    python benchmarks/import_time.py --backend jax
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from common import OUTPUT, circumstances, one_line, screen, write_json
from rich.table import Table

PROGRAM = """
import json, sys, time
start = time.perf_counter()
import keras
keras_done = time.perf_counter()
if {with_keras_ga}:
    import keras_ga
print(json.dumps([keras_done - start, time.perf_counter() - keras_done]))
"""


def import_times(backend: str, with_keras_ga: bool) -> tuple[float, float]:
    """Returns the milliseconds of both imports in a fresh process; the second may be none."""
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(with_keras_ga=with_keras_ga)],
        env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    first, second = json.loads(process.stdout)
    return 1000 * first, 1000 * second


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(
        description="Milliseconds that `import keras_ga` adds to `import keras`.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", choices=("jax", "tensorflow", "torch"), default="jax", help="Keras backend")
    add("--rounds", type=int, default=9, help="processes of each kind")
    add("--output", type=Path, default=OUTPUT, help="folder for the JSON file")
    options = parser.parse_args()

    import_times(options.backend, with_keras_ga=True)  # compiles and caches both packages
    alone, both, added = [], [], []
    for _ in range(options.rounds):
        alone.append(import_times(options.backend, with_keras_ga=False)[0])
        keras_time, keras_ga_time = import_times(options.backend, with_keras_ga=True)
        both.append(keras_time + keras_ga_time)
        added.append(keras_ga_time)
    figures = {
        "benchmark": "import_time",
        "backend": options.backend,
        "rounds": options.rounds,
        **circumstances(),
        "milliseconds": {
            "keras": statistics.median(alone),
            "keras and keras_ga": statistics.median(both),
            "added by keras_ga": statistics.median(added),
        },
        "milliseconds_by_round": {"keras": alone, "keras and keras_ga": both, "added": added},
    }
    table = Table("import", "ms, median", title=f"Imports on {options.backend}")
    for name, milliseconds in figures["milliseconds"].items():
        table.add_row(name, f"{milliseconds:.1f}")
    screen().print(table, one_line(figures, ("keras-ga", "keras", options.backend)))
    write_json(figures, options.output / f"import_time_{options.backend}.json")


if __name__ == "__main__":
    main()
