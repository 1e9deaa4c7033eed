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
