"""The rules of the house: layers stay apart, modules stay short, tests leave private names alone."""

import ast
import re
import subprocess
import sys

import pytest
from helpers.paths import ROOT, TESTS

TEST_FILES = sorted(TESTS.rglob("*.py"))
PRIVATE = re.compile(r"_[A-Za-z]\w*(?<!_)")
DOTTED_PRIVATE = re.compile(r"\b[A-Za-z]\w*\.(_[A-Za-z]\w*)(?<!_)\b")
PUBLIC_ALL_THE_SAME = {"_exit", "_replace", "_asdict", "_fields", "_make"}
"""`os._exit`, and the methods of named tuples, which have an underscore to be no field."""


def imported_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {module.partition(".")[0] for module in run.stdout.split()}


@pytest.mark.parametrize("package", ["coram_hf.geometry", "coram_hf.amplitude"])
def test_the_mathematics_imports_nothing_of_hugging_face(package):
    assert not imported_by(f"import {package}") & {
        "transformers",
        "peft",
        "accelerate",
        "huggingface_hub",
        "safetensors",
    }


def test_importing_the_package_is_light():
    assert not imported_by("import coram_hf") & {"torch", "transformers", "numpy"}


def test_public_names_resolve():
    import coram_hf

    assert all(getattr(coram_hf, name).__name__ == name for name in coram_hf.__all__)
    with pytest.raises(AttributeError, match="CoramMerge"):
        _ = coram_hf.CoramMerge


def imports(tree):
    """What a module imports, in functions and for types, too: the line, the module, and its names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or ""), tuple(a.name for a in node.names)


def own_names(tree):
    """The names by which a module knows its own classes, and those of `self`."""
    return {"self", "cls"} | {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def is_own(value, own):
    """Whether an object is the one at hand, its class, or what it inherits."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in own


def is_private(name):
    return PRIVATE.fullmatch(name) is not None and name not in PUBLIC_ALL_THE_SAME


def private_uses(tree):
    """Uses of what other objects keep for themselves, by attribute or by a string: the line, and the name."""
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value, own):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("etattr", "hasattr", "delattr")):
            named = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if any(isinstance(name, str) and is_private(name) for name in named):
                yield node.lineno, ast.unparse(node)


def found_in(files, find):
    """What `find` yields for the syntax trees of files, with the place of each."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in files
        for line, what in find(ast.parse(path.read_text(encoding="utf-8")))
    ]


def test_no_test_file_imports_another():
    def others(tree):
        for line, module, names in imports(tree):
            for name in (*module.split("."), *names):
                if name.startswith("test_") or name in ("conftest", "tests"):
                    yield line, name

    assert not found_in(TEST_FILES, others)


def test_no_test_uses_a_private_name():
    """Neither by attribute or import, nor in a string that names what is patched or what a child runs."""

    def private(tree):
        yield from private_uses(tree)
        for line, module, names in imports(tree):
            yield from ((line, f"{module}.{name}") for name in names if is_private(name))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = DOTTED_PRIVATE.findall(node.value)
                yield from ((node.lineno, name) for name in names if is_private(name))

    assert not found_in(TEST_FILES, private)


PACKAGE = ROOT / "coram_hf"
MODULES = sorted(PACKAGE.rglob("*.py"))
FLOORS = [
    {"errors", "config"},
    {"geometry"},
    {"amplitude"},
    {"inputs"},
    {"methods"},
    {"outputs"},
    {"execution"},
    {"report"},
    {"hub"},
    {"calibration"},
    {"result"},
    {"merger"},
    {"assembly"},
    {"baselines"},
    {"callback"},
    {"evaluation"},
    {"cli", "demo", "studio"},
]
"""A module imports from its own floor and from those before it."""

LONGEST = 300
INTERNALS = PACKAGE / "inputs" / "internals"
OPERATOR = PACKAGE / "geometry" / "onednn.py"  # of torch, which has no public name for it
"""The only modules that know private names, which are those of transformers and peft."""


def entry(path):
    """What a module is called on the top floor of the package: its file, or the folder that it is in."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor(name):
    """The number of the floor that an entry of the package is on."""
    return next((number for number, names in enumerate(FLOORS) if name in names), None)


def entries_imported(path, tree):
    """The entries of the package that a module imports, by line; public names of the root are `__init__`."""
    here = ("coram_hf", *path.relative_to(PACKAGE).with_suffix("").parts)
    for line, module, names in imports(tree):
        level = len(module) - len(module.lstrip("."))
        start = here[: len(here) - level] if level else ()
        root, *inside = (*start, *filter(None, module.lstrip(".").split(".")))
        if root == "coram_hf":
            known = {entry(other) for other in MODULES}
            for name in inside[:1] or set(names) - {"__version__"}:
                yield line, name if name in known else "__init__"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_the_floors(path):
    name = entry(path)
    if name in ("__init__", "__main__"):
        pytest.skip("the front door, which leads everywhere")
    own = floor(name)
    assert own is not None, f"{name} is on no floor: {FLOORS}"
    wrong = {
        (line, other)
        for line, other in entries_imported(path, ast.parse(path.read_text(encoding="utf-8")))
        if (found := floor(other)) is None or found > own
    }
    assert not wrong


def test_modules_are_short():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES
    }
    assert not {path: length for path, length in lengths.items() if length > LONGEST}


def literals(node):
    """The strings in a constant, or in a collection of them."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def test_only_methods_ask_which_method_it_is():
    """Elsewhere no name of a method is compared with, in an expression or in a `match`."""
    from coram_hf.baselines import METHODS

    names = {"coram", *METHODS}

    def asked(tree):
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                compared = set().union(*(literals(part) for part in (node.left, *node.comparators)))
            elif isinstance(node, ast.MatchValue):
                compared = literals(node.value)
            else:
                continue
            if compared & names:
                yield node.lineno, ast.unparse(node)

    assert not found_in([path for path in MODULES if entry(path) != "methods"], asked)


def test_objects_keep_their_private_names():
    places = [path for path in MODULES if INTERNALS not in path.parents and path != OPERATOR]
    assert not found_in(places, private_uses)
