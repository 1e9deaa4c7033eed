"""Folders of sentence-transformers: a checkpoint, and the modules that turn its outputs into an embedding."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coram_hf.errors import CoramError
from coram_hf.inputs.agreement import AUTO, choose, grouped, listed
from coram_hf.inputs.files import read_json
from coram_hf.inputs.weights import Weights

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
LENGTH = "sentence_*_config.json"
"""The file with the maximum length of texts, beside the checkpoint."""
MODULE_FILES = (MODULES, SETTINGS, LENGTH, "[0-9]*_*/*")
"""What is downloaded with a model from the Hub."""
OLD_MODE, OLD_WIDTH = "pooling_mode_", "word_embedding_dimension"
TELLING = (
    "embedding_dimension",
    "pooling_mode",
    "in_features",
    "out_features",
    "bias",
    "activation_function",
)
"""Settings of modules that change the embedding."""


class Module(NamedTuple):
    """One step from text to embedding: its class, and its folder inside the model's."""

    type: str
    path: str

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.type.rpartition(".")[2]


def checkpoint_folder(folder: Path) -> Path:
    """The folder of the checkpoint: that of the first module of a sentence-transformers model, or itself."""
    if (folder / "config.json").is_file() or not (folder / MODULES).is_file():
        return folder
    first = read_modules(folder)[0]
    if not (folder / first.path / "config.json").is_file():
        raise CoramError(
            f"{folder} is a sentence-transformers model whose first module is a {first.name}; only those "
            "whose first module is a transformers model can be merged"
        )
    return folder / first.path


def read_modules(folder: Path) -> list[Module]:
    """The modules of a sentence-transformers folder, in their order."""
    path = folder / MODULES
    content = read_json(path)
    entries = content if isinstance(content, list) else []
    found = [
        Module(str(entry["type"]), entry["path"])
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("path"), str) and "type" in entry
    ]
    if not found or len(found) != len(entries):
        raise CoramError(f"{path} must list modules with a type and a path")
    for module in found:
        if not (folder / module.path).resolve().is_relative_to(folder.resolve()):
            raise CoramError(f"{path} names the folder {module.path!r}, which is outside the model's")
    return found


def choose_modules(
    base: Weights, experts: Mapping[str, Weights]
) -> tuple[Path | None, dict[str, str], list[str]]:
    """The folder whose modules the merge gets, what the plan says about them, and warnings.

    They are the base's, or those of experts that agree, if the base has none; their weights are not merged.
    """
    own = _root(base)
    roots = {name: root for name, weights in experts.items() if (root := _root(weights)) is not None}
    if own is None and not roots:
        return None, {}, []
    described = {name: _description(root) for name, root in roots.items()}
    if own is None:
        known: dict[str, Any] = {name: described.get(name) for name in experts}
        choice = choose("modules", AUTO, None, known, lambda path: None, "sentence-transformers modules")
        if choice.owner == "":
            parties = " | ".join(listed(names) for _, names in grouped(described))
            lost = f"the experts' sentence-transformers modules differ ({parties}), and the base has none: "
            return None, {}, [f"{lost}the merge has none; copy an expert's module files beside the weights"]
        root = roots[str(choice.owner)]
        return root, {"sentence-transformers": f"{_shown(root)}, {choice.said}"}, []
    ours, warnings = _description(own), []
    for name, theirs in described.items():
        others = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
        if others:
            warnings.append(
                f"expert {name!r} has different sentence-transformers settings from the base "
                f"({', '.join(others)}); the base's are kept"
            )
    return own, {"sentence-transformers": f"{_shown(own)}, the base's"}, warnings


def copy_modules(root: Path, folder: Path) -> None:
    """Copy modules and settings; the checkpoint, wherever it was, is at the top of the new folder."""
    content = read_json(root / MODULES)
    modules = read_modules(root)
    for path in ((root / SETTINGS), *sorted((root / modules[0].path).glob(LENGTH))):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    for module in modules[1:]:
        if module.path and (root / module.path).is_dir():
            shutil.copytree(root / module.path, folder / module.path, dirs_exist_ok=True)
    content[0]["path"] = ""
    (folder / MODULES).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _root(weights: Weights) -> Path | None:
    """The sentence-transformers folder that weights come from."""
    folder = weights.folder or Path(weights.model.name_or_path or "/nowhere")
    if (folder / MODULES).is_file():
        return folder
    inside = folder.name[:1].isdigit() and (folder.parent / MODULES).is_file()
    return folder.parent if inside and checkpoint_folder(folder.parent) == folder else None


def _description(root: Path) -> dict[str, Any]:
    """Everything besides the checkpoint that affects the embedding, by the names that warnings use.

    Versions of the library write more or fewer settings, so only those that matter are compared.
    """
    modules = read_modules(root)
    found: dict[str, Any] = {"modules": [module.name for module in modules]}
    for path in (root / modules[0].path).glob(LENGTH):
        found["max_seq_length"] = read_json(path).get("max_seq_length")
    if (root / SETTINGS).is_file():
        settings = read_json(root / SETTINGS)
        found["prompts"] = {key: text for key, text in (settings.get("prompts") or {}).items() if text}
        found["similarity"] = settings.get("similarity_fn_name") or "cosine"
    for module in modules[1:]:
        for path in sorted(p for p in (root / module.path).rglob("*") if module.path and p.is_file()):
            known = _settings(path) if path.suffix == ".json" else None
            found[f"{module.name} {path.name}"] = _hash(path) if known is None else known
    return {key: value for key, value in found.items() if value}


def _settings(path: Path) -> dict[str, Any]:
    """The settings of a module, under their current names."""
    content = read_json(path)
    found = {key: content[key] for key in TELLING if key in content}
    found |= {"embedding_dimension": content[OLD_WIDTH]} if OLD_WIDTH in content else {}
    modes = [key.removeprefix(OLD_MODE) for key, on in content.items() if key.startswith(OLD_MODE) and on]
    plain = [mode.removesuffix("_tokens").removesuffix("_token") for mode in modes]
    return found | ({"pooling_mode": plain[0] if len(plain) == 1 else plain} if plain else {})


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _shown(root: Path) -> str:
    return ", ".join(module.name for module in read_modules(root))
