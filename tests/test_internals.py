"""What other libraries do not document is used in one place only."""

import ast
from pathlib import Path

import pytest

import coram_hf

PACKAGE = Path(coram_hf.__file__).parent
DOCUMENTED = {
    "accelerate",
    "accelerate.utils",
    "peft",
    "peft.utils",
    "transformers",
    "transformers.pytorch_utils",
    "transformers.utils",
}
INTERNALS = PACKAGE / "inputs" / "internals"
ELSEWHERE = [path for path in sorted(PACKAGE.rglob("*.py")) if INTERNALS not in path.parents]


def undocumented(tree: ast.AST) -> set[str]:
    """The modules and private names of transformers, peft and accelerate that a module imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            private = any(alias.name.startswith("_") for alias in node.names)
            found.add(f"{node.module}._" if private else node.module)
    roots = {"transformers", "peft", "accelerate"}
    return {module for module in found if module.partition(".")[0] in roots} - DOCUMENTED


@pytest.mark.parametrize("path", ELSEWHERE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_internals_import_what_is_not_documented(path):
    assert not undocumented(ast.parse(path.read_text(encoding="utf-8")))


def private_attributes(path: Path) -> set[str]:
    """Underscore attributes of other objects; those of `self` are our own."""
    nodes = (n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Attribute))
    foreign = (n for n in nodes if not (isinstance(n.value, ast.Name) and n.value.id == "self"))
    return {n.attr for n in foreign if n.attr.startswith("_") and not n.attr.startswith("__")}


def test_only_the_internals_use_private_attributes_of_models():
    known = set().union(*(private_attributes(path) for path in INTERNALS.glob("*.py")))
    assert len(known) > 3
    assert not {path.name: used for path in ELSEWHERE if (used := private_attributes(path) & known)}
