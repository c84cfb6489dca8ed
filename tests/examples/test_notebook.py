"""The notebook is what its script makes, and its cells show what they say."""

import json
import sys
from pathlib import Path

import keras
import pytest

for needed in ("sklearn", "matplotlib"):
    pytest.importorskip(needed, reason="the examples need the extra `examples`")
EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "gradient_accumulation.ipynb"


def test_it_is_what_the_script_makes(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    import make_notebook

    assert NOTEBOOK.read_text() == make_notebook.as_file(make_notebook.SOURCE.read_text()), (
        "run python examples/make_notebook.py"
    )


@pytest.mark.skipif(
    keras.config.backend() != "tensorflow", reason="once is enough, on Colab's default backend"
)
def test_its_cells_run(monkeypatch, capsys):
    import matplotlib

    matplotlib.use("agg")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    installing, *rest = code
    assert installing.startswith("%pip install")
    namespace = {"__name__": "__main__"}
    for number, source in enumerate(rest):
        # The picture can't be shown here, and is not to be kept.
        source = source.replace("plt.show()", "plt.close()").replace("EPOCHS = 6", "EPOCHS = 2")
        exec(compile(source, f"cell {number}", "exec"), namespace)
    differences = namespace["differences"]
    assert differences["8 x 16, accumulated"] < 1e-5
    assert differences["128 rows, split by 16"] < 1e-5
    assert differences["16 rows, alone"] > 1e-2
    assert "28 updates" in capsys.readouterr().out
