"""Makes `gradient_accumulation.ipynb` of `gradient_accumulation.py`.

Cells are parted by `# %%`; those of `# %% [markdown]` are text, and so is the docstring.

    python examples/make_notebook.py
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "gradient_accumulation.py"
NOTEBOOK = SOURCE.with_suffix(".ipynb")


def cell(number: int, text: str, markdown: bool) -> dict[str, Any]:
    """Returns a cell without output."""
    lines = text.strip("\n").splitlines(keepends=True)
    made: dict[str, Any] = {"cell_type": "markdown", "id": f"cell-{number}", "metadata": {}}
    if not markdown:
        made |= {"cell_type": "code", "execution_count": None, "outputs": []}
    return made | {"source": lines}


def notebook(source: str) -> dict[str, Any]:
    """Returns the notebook of a script."""
    first, *parts = re.split(r"^# %%(?=$| \[)", source, flags=re.MULTILINE)
    title, text = first.strip().strip('"').split("\n", 1)
    cells = [cell(0, f"# {title.rstrip('.')}\n{text}", markdown=True)]
    for number, part in enumerate(parts, 1):
        kind, _, body = part.partition("\n")
        if markdown := "[markdown]" in kind:
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        cells.append(cell(number, body.replace("# %pip", "%pip"), markdown))
    return {
        "cells": cells,
        "metadata": {
            "accelerator": "GPU",
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def as_file(source: str) -> str:
    """Returns the notebook's file."""
    return json.dumps(notebook(source), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    NOTEBOOK.write_text(as_file(SOURCE.read_text()))
