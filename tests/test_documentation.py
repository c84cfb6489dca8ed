"""Every Python block in the README, in docs/ and in public docstrings runs as it stands.

Each runs in a namespace of its own, in an empty folder, with warnings as errors. Two comments on
the line before a block steer that (in Markdown they are invisible):

    <!-- no-run -->           shown, not run (`python no-run` after the backticks does the same)
    <!-- backend: jax -->     needs that backend (`<!-- backend: jax, torch -->`: one of those)
"""

import ast
import re
import textwrap
import tomllib
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import pytest
from support import BACKEND

import keras_ga

ROOT = Path(__file__).parent.parent
PACKAGE = Path(keras_ga.__file__).parent

FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`]*)$")
COMMENT = re.compile(r"<!--\s*(?P<text>.*?)\s*-->\s*$")


class Block(NamedTuple):
    """A fenced block: its code, as it would be pasted, and what was said about it."""

    path: Path
    line: int
    """Of its first line of code, from 1."""
    code: str
    info: str
    comment: str


def fenced_blocks(text, path, first_line=1):
    """All fenced blocks of a Markdown text that starts at `first_line` of a file."""
    blocks, lines = [], text.splitlines()
    comment, opened = "", None
    for number, line in enumerate(lines):
        match = FENCE.match(line)
        if opened is not None:
            start, opening = opened
            closes = match and not match["info"] and match["fence"].startswith(opening["fence"])
            if closes:
                code = textwrap.dedent("\n".join(lines[start:number])) + "\n"
                blocks.append(Block(path, first_line + start, code, opening["info"], comment))
                comment, opened = "", None
        elif match:
            opened = (number + 1, match)
        elif line.strip():
            found = COMMENT.search(line)
            comment = found["text"] if found else ""
    if opened is not None:
        raise ValueError(f"{path}:{first_line + opened[0] - 1}: a fence is never closed")
    return blocks


def is_python(block):
    return block.info.split()[:1] in (["python"], ["py"])


def public_docstrings(path):
    """(docstring, its first line) of a module and of all that is public in it."""

    def visit(node):
        docstring = node.body and node.body[0]
        if (
            isinstance(docstring, ast.Expr)
            and isinstance(docstring.value, ast.Constant)
            and isinstance(docstring.value.value, str)
        ):
            yield docstring.value.value, docstring.lineno
        for child in node.body:
            named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if named and not child.name.startswith("_"):
                yield from visit(child)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")))


def all_blocks():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        if page.exists():
            yield from fenced_blocks(page.read_text(encoding="utf-8"), page)
    for source in sorted(PACKAGE.rglob("*.py")):
        for docstring, line in public_docstrings(source):
            yield from fenced_blocks(docstring, source, line)


def place(block):
    """`file:line`, from the repository's root where it is in it."""
    for root in (ROOT, PACKAGE.parent):
        if block.path.is_relative_to(root):
            return f"{block.path.relative_to(root)}:{block.line}"
    return f"{block.path}:{block.line}"


def reason_to_skip(block):
    if "no-run" in block.info.split() or block.comment == "no-run":
        return "shown, not run"
    if block.comment.startswith("backend:"):
        backends = block.comment.removeprefix("backend:").replace(",", " ").split()
        if BACKEND not in backends:
            return f"needs {' or '.join(backends)}"
    return None


BLOCKS = [block for block in all_blocks() if is_python(block)]


@pytest.fixture
def a_place_of_its_own(tmp_path, monkeypatch):
    """An empty folder to run in, and Keras's global settings as they were."""
    monkeypatch.chdir(tmp_path)
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    yield
    keras.config.set_dtype_policy(policy)
    keras.config.set_floatx(floatx)
    keras.distribution.set_distribution(None)


def run(block):
    # Line numbers are those of the file, so that a traceback shows the place.
    code = compile("\n" * (block.line - 1) + block.code, str(block.path), "exec")
    exec(code, {"__name__": "__main__"})


@pytest.mark.parametrize("block", BLOCKS, ids=place)
@pytest.mark.usefixtures("a_place_of_its_own")
def test_block_runs(block):
    reason = reason_to_skip(block)
    if reason:
        pytest.skip(reason)
    run(block)


def test_docstrings_are_found():
    """Guards the search: the class's own example is among the blocks."""
    found = [block for block in BLOCKS if block.path == PACKAGE / "optimizer.py"]
    assert any("model.fit(" in block.code for block in found)


@pytest.mark.usefixtures("a_place_of_its_own")
def test_a_train_step_of_ones_own_is_the_large_batch():
    """The class that the page shows for this backend, on micro-batches of 8, 8 and 5 rows."""
    shown = [block for block in BLOCKS if block.comment == f"backend: {BACKEND}"]
    block = next(block for block in shown if "class Regression" in block.code)
    names = {"__name__": "__main__"}
    exec(block.code, names)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(21, 4)), rng.normal(size=(21, 1))
    ends = []
    for batch_size, kind in ((21, keras.Sequential), (8, names["Regression"])):
        keras.utils.set_random_seed(0)
        model = kind([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        if batch_size == 8:
            optimizer = keras_ga.GradientAccumulationOptimizer(optimizer, 3)
        model.compile(optimizer, loss="mse")
        model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        ends.append(model.get_weights())
    np.testing.assert_allclose(ends[1][0], ends[0][0], atol=1e-6)


# That pages leave nothing out.


@pytest.mark.parametrize("name", sorted(set(keras_ga.__all__) - {"__version__"}))
def test_every_public_name_is_on_the_api_page(name):
    assert f"::: keras_ga.{name}" in (ROOT / "docs" / "api.md").read_text().splitlines()


def test_every_callback_of_keras_is_on_the_callbacks_page():
    page = (ROOT / "docs" / "callbacks.md").read_text()
    table = {name for line in page.splitlines() for name in re.findall(r"`(\w+)`", line)}
    assert {name for name in vars(keras.callbacks) if name[0].isupper()} <= table


# That what pages name is there.

PAGES = [path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md") if path.exists()]
PAGES += sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_every_file_named_exists(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(((?!https?:|#)[^)#\s]+)", text)
    named = re.findall(r"`(?:python )?((?:tests|examples|benchmarks|keras_ga|docs)/[\w/.]+)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.skipif(not PAGES, reason="needs the checkout")
def test_badges_say_what_the_package_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    keras_floor = project["dependencies"][0].removeprefix("keras>=")
    badges = re.findall(r"^\[!\[(.+?)\]\(", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert badges == [
        f"Python {project['requires-python'].removeprefix('>=')}+",
        f"Keras {keras_floor}+",
        "TensorFlow, JAX, torch",
        f"License: {project['license'].replace('-', ' ')}",
    ]
    assert {"tensorflow", "jax", "torch"} <= set(project["optional-dependencies"])


# The search itself.


MARKDOWN = """\
# Title

```python
first = 1
```

<!-- no-run -->
```python
second = 2
```

<!-- no-run -->
A paragraph in between.

```python no-run
third = 3
```

```console
$ pip install keras-ga
```

=== "JAX"

    <!-- backend: jax, torch -->

    ```python
    if True:
        fourth = 4
    ```

~~~~python
fifth = '''
```
'''
~~~~
"""


def test_blocks_of_a_page():
    blocks = fenced_blocks(MARKDOWN, Path("page.md"), first_line=11)
    assert [block.info for block in blocks] == [
        "python",
        "python",
        "python no-run",
        "console",
        "python",
        "python",
    ]
    assert [is_python(block) for block in blocks] == [True, True, True, False, True, True]
    assert [block.line for block in blocks] == [14, 19, 26, 30, 38, 43]
    assert [block.comment for block in blocks] == [
        "",
        "no-run",
        "",
        "",
        "backend: jax, torch",
        "",
    ]
    assert blocks[4].code == "if True:\n    fourth = 4\n"
    assert blocks[5].code == "fifth = '''\n```\n'''\n"


def test_what_is_skipped():
    first, second, third, _, fourth, _ = fenced_blocks(MARKDOWN, Path("page.md"))
    assert reason_to_skip(first) is None
    assert reason_to_skip(second) == reason_to_skip(third) == "shown, not run"
    expected = "needs jax or torch" if BACKEND == "tensorflow" else None
    assert reason_to_skip(fourth) == expected


def test_an_open_fence_is_an_error():
    with pytest.raises(ValueError, match=r"page\.md:3: a fence is never closed"):
        fenced_blocks("a\n\n```python\nx = 1\n", Path("page.md"))


def test_private_objects_are_left_out(tmp_path):
    source = tmp_path / "source.py"
    source.write_text(
        '"""Module."""\nclass Public:\n    """Class."""\n    def method(self):\n'
        '        """Method."""\n    def _hidden(self):\n        """Hidden."""\n'
        'class _Private:\n    """Private."""\n'
    )
    assert list(public_docstrings(source)) == [("Module.", 1), ("Class.", 3), ("Method.", 5)]


def test_a_failure_names_the_line():
    block = Block(Path("page.md"), 7, "one = 1\none / 0\n", "python", "")
    with pytest.raises(ZeroDivisionError) as caught:
        run(block)
    assert caught.traceback[-1].lineno + 1 == 8
    assert str(caught.traceback[-1].path).endswith("page.md")


def test_warnings_are_errors():
    block = Block(Path("page.md"), 1, "import warnings\nwarnings.warn('no')\n", "python", "")
    with pytest.raises(UserWarning):
        run(block)
