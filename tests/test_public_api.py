"""What the package offers by name, how it is documented, and what importing it brings in."""

import ast
import importlib
import importlib.metadata
import importlib.resources
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import types
from pathlib import Path

import keras
import pytest
from support import BACKEND

import keras_ga

# On the built wheel these say what is really shipped.
pytestmark = pytest.mark.quick

PACKAGE = Path(keras_ga.__file__).parent
BACKENDS = ("jax", "tensorflow", "torch")
# Where a backend may be named.
ROOMS = ("engines", "split")


# Names.


def public_modules():
    """The package and its public submodules: those that are reached as `keras_ga.name`."""
    submodules = [
        module
        for name in keras_ga.__all__
        if isinstance(module := getattr(keras_ga, name), types.ModuleType)
    ]
    return [keras_ga, *submodules]


def offered(module):
    """The names a module offers: its `__all__`, or what is defined in it and not private."""
    defined = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return getattr(module, "__all__", defined)


def sort_key(name):
    """Constants, classes, then the rest, as ruff sorts `__all__`."""
    return (not name.isupper(), not name[:1].isupper(), name)


def test_all_is_sorted():
    for module in public_modules():
        if hasattr(module, "__all__"):
            assert list(module.__all__) == sorted(set(module.__all__), key=sort_key), module


def test_all_is_the_public_namespace():
    # A module imported on the way (`keras_ga.optimizer`) is an attribute of the package, too, but
    # only what `__init__` names is offered.
    implementation = {
        name
        for name, value in vars(keras_ga).items()
        if isinstance(value, types.ModuleType) and value.__name__ == f"keras_ga.{name}"
    }
    public = {name for name in vars(keras_ga) if not name.startswith("_")}
    assert public - implementation | {"__version__"} <= set(keras_ga.__all__)
    assert set(keras_ga.__all__) <= public | {"__version__"}


def test_star_import_works():
    for module in public_modules():
        namespace = {}
        exec(f"from {module.__name__} import *", namespace)
        assert set(offered(module)) <= set(namespace), module


# Docstrings.


def is_ours(value):
    return getattr(value, "__module__", "").split(".")[0] == "keras_ga"


def documented():
    """{dotted name: (object, class that it is a member of or None)} of all that is public."""
    found = {}
    for module in public_modules():
        found[module.__name__] = (module, None)
        for name in offered(module):
            value = getattr(module, name)
            if not (is_ours(value) and callable(value)):
                continue
            path = f"{module.__name__}.{name}"
            found[path] = (value, None)
            if isinstance(value, type):
                for member, attribute in vars(value).items():
                    if not member.startswith("_") and is_code(attribute):
                        found[f"{path}.{member}"] = (attribute, value)
    return found


def is_code(attribute):
    return isinstance(attribute, property | classmethod | staticmethod) or inspect.isfunction(
        attribute
    )


DOCUMENTED = documented()
CALLABLES = {
    path: entry
    for path, entry in DOCUMENTED.items()
    if not isinstance(entry[0], property | types.ModuleType)
}
CLASSES = {path: entry for path, entry in DOCUMENTED.items() if isinstance(entry[0], type)}


def parameters(value):
    """Names of what a caller may pass by name, without self or cls."""
    function = getattr(value, "__func__", value)
    signature = inspect.signature(function)
    names = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    is_member = not isinstance(value, type | staticmethod) and "." in function.__qualname__
    return names[1:] if is_member else names


def section(docstring, title):
    """The indented text under `title:`, or None."""
    match = re.search(rf"^{title}:\n((?:(?:    .*)?\n)+)", docstring + "\n", re.MULTILINE)
    return match and match.group(1)


# Keras's protocol for saving, which it documents itself, on any class.
PROTOCOL = ("get_config", "from_config")


def overridden(path):
    """The Keras method that a method overrides, or None."""
    owner = CALLABLES[path][1]
    if owner is None:
        return None
    name = path.rsplit(".", 1)[1]
    for base in owner.__mro__[1:]:
        if name in vars(base) and base.__module__.startswith("keras."):
            return vars(base)[name]
    return None


def function_of(value):
    """The function behind a class (its constructor), a method or a function."""
    return value.__init__ if isinstance(value, type) else getattr(value, "__func__", value)


def raises_itself(function):
    if not inspect.isfunction(function):
        return False
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(function)))
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree))


def test_everything_has_a_summary_of_one_line():
    faults = []
    for path, (value, _) in DOCUMENTED.items():
        first, _, rest = (inspect.getdoc(value) or "").partition("\n")
        if not first.endswith((".", ":")) or (rest and not rest.startswith("\n")):
            faults.append(f"{path}: {first!r}")
    assert not faults


def test_arguments_are_documented():
    """All of them, in the order of the signature; Keras's own text serves for what it has."""
    faults = []
    for path, (value, _) in CALLABLES.items():
        names = parameters(value)
        keras_method = overridden(path)
        if keras_method is not None and set(names) <= set(parameters(keras_method)):
            continue
        if path.endswith(PROTOCOL):
            continue
        text = section(inspect.getdoc(value), "Args") or ""
        described = re.findall(r"^    \*{0,2}(\w+)(?: \(.*\))?:", text, re.MULTILINE)
        known = inspect.signature(function_of(value)).parameters
        if [name for name in described if name in names] != names or set(described) - set(known):
            faults.append(f"{path}({', '.join(names)}): documented are {described}")
    assert not faults


def test_what_is_returned_is_documented():
    faults = []
    for path, (value, _) in CALLABLES.items():
        if isinstance(value, type) or overridden(path) is not None or path.endswith(PROTOCOL):
            continue
        annotation = inspect.signature(function_of(value)).return_annotation
        text = section(inspect.getdoc(value), "Returns")
        if (text is None) != (annotation in (None, "None")):
            faults.append(f"{path} -> {annotation}: documented is {text}")
    assert not faults


def test_what_is_raised_is_documented():
    faults = [
        path
        for path, (value, _) in CALLABLES.items()
        if raises_itself(function_of(value)) and not section(inspect.getdoc(value), "Raises")
    ]
    assert not faults


def test_classes_have_an_example():
    faults = [
        path
        for path, (value, _) in CLASSES.items()
        if not re.search(r"^Example:\n\n?(    )?```python\n", inspect.getdoc(value), re.MULTILINE)
    ]
    assert not faults


# Imports.


def source_files():
    return sorted(path for path in PACKAGE.rglob("*.py"))


def imported(path):
    """(line, top-level module) of every import in a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, node.module.split(".")[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in ("import_module", "__import__", "find_spec") and node.args:
                argument = node.args[0]
                if isinstance(argument, ast.Constant):
                    yield node.lineno, str(argument.value).split(".")[0]


def test_only_the_engines_name_a_backend():
    wrong_room = [
        f"{path.relative_to(PACKAGE)}:{line} imports {module}"
        for path in source_files()
        if path.relative_to(PACKAGE).parts[0] not in ROOMS
        for line, module in imported(path)
        if module in BACKENDS
    ]
    assert not wrong_room
    # Guards the scan: there is something to find.
    engine = PACKAGE / "engines" / f"{BACKEND}.py"
    assert BACKEND in [module for _, module in imported(engine)]


def test_a_backends_file_imports_that_backend_only():
    strangers = [
        f"{path.relative_to(PACKAGE)}:{line} imports {module}"
        for path in source_files()
        if path.stem in BACKENDS
        for line, module in imported(path)
        if module in BACKENDS and module != path.stem
    ]
    assert not strangers


def test_depends_on_keras_and_numpy_alone():
    ours = {"keras_ga", "keras", "numpy", *sys.stdlib_module_names}
    others = {
        f"{path.relative_to(PACKAGE)}:{line} imports {module}"
        for path in source_files()
        for line, module in imported(path)
        if module not in ours
        and not (module in BACKENDS and path.relative_to(PACKAGE).parts[0] in ROOMS)
    }
    assert not others


IMPORT = """
import json, sys
import keras
before = set(sys.modules)
import keras_ga
top = {name.split(".")[0] for name in set(sys.modules) - before}
engines = [name for name in sys.modules if name.startswith("keras_ga.engines.")]
print(json.dumps([sorted(top), engines]))
"""


def test_importing_brings_in_no_other_backend(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        cwd=tmp_path,
        env=dict(os.environ, KERAS_BACKEND=BACKEND),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    new, engines = json.loads(done.stdout.splitlines()[-1])
    assert "keras_ga" in new
    assert not set(new) & (set(BACKENDS) - {BACKEND})
    assert not set(engines) - {f"keras_ga.engines.{BACKEND}"}


# The package.


def test_version_is_the_distributions():
    assert keras_ga.__version__ == importlib.metadata.version("keras-ga")
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", keras_ga.__version__)


def test_types_are_shipped():
    assert importlib.resources.files("keras_ga").joinpath("py.typed").is_file()


def test_every_module_imports():
    """Those of other backends need not: they are not there to be imported."""
    for module in pkgutil.walk_packages(keras_ga.__path__, "keras_ga."):
        if module.name.rsplit(".", 1)[1] not in set(BACKENDS) - {BACKEND}:
            importlib.import_module(module.name)


def test_classes_are_registered_for_saving():
    """So that a `.keras` file loads after `import keras_ga`, without custom objects."""
    for path, (value, _) in CLASSES.items():
        if hasattr(value, "get_config") and not issubclass(value, keras.callbacks.Callback):
            registered = keras.saving.get_registered_name(value)
            assert registered == f"keras_ga>{value.__name__}", path
