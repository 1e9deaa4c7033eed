"""What the cards of base and experts say about them, where they are at hand."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import metadata_load

from coram_hf.sources.files import fingerprint
from coram_hf.sources.loaded import LoadedModel

FIELDS = ("license", "language", "datasets")


def provenance(weights: LoadedModel) -> dict[str, Any]:
    """Where weights come from: source, commit, a hash of what was read, and the card's license and data."""
    folder = weights.folder or Path(weights.model.name_or_path or "/nowhere")
    return {
        "source": weights.location,
        "commit": weights.commit,
        "files": _files_hash(weights.files),
        **_card(folder),
    }


def _files_hash(files: list[Path]) -> str | None:
    """sha256 over names, sizes and first megabytes (which hold the headers) of the files."""
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        found = fingerprint(path)
        digest.update(f"{path.name} {found['size']} {found['head']}\n".encode())
    return digest.hexdigest()


def _card(folder: Path) -> dict[str, Any]:
    path = folder / "README.md"
    if not path.is_file():
        return {}
    try:
        data = metadata_load(path) or {}
    except Exception:  # other people's YAML
        return {}
    return {key: [str(v) for v in _list(data[key])] for key in FIELDS if data.get(key)}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
