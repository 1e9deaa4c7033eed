"""Where base and experts come from, and what their model cards say."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import metadata_load

from coram_hf.inputs.files import fingerprint
from coram_hf.inputs.weights import Weights

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FIELDS = ("license", "language", "datasets")


def provenance(weights: Weights) -> dict[str, Any]:
    """Where weights come from: source, commit, a hash of the files, and the card's license and datasets.

    For a local folder only its name is given: paths are omitted for privacy.
    """
    folder = weights.folder or Path(weights.model.name_or_path or "/nowhere")
    location = weights.location or ""
    on_hub = weights.commit is not None or (bool(HUB_ID.fullmatch(location)) and not Path(location).is_dir())
    return {
        "source": location if on_hub else Path(location).name or None,
        "hub": on_hub,
        "commit": weights.commit,
        "files": _files_hash(weights.files),
        **_card(folder),
    }


def _files_hash(files: list[Path]) -> str | None:
    """sha256 of the names, sizes and first megabytes (where the headers are) of the files."""
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
    except Exception:  # other people's YAML fails in many ways
        return {}
    return {key: found for key in FIELDS if (found := [v for v in _list(data.get(key)) if _is_plain(v)])}


def _is_plain(value: Any) -> bool:
    """Whether a value in a card is a short string and not a local path."""
    return isinstance(value, str) and 0 < len(value) <= 200 and not value.startswith(("/", "~", ".", "\\"))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
