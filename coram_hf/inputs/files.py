"""The weight files of a checkpoint folder: found, checked, and opened as memory maps."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from coram_hf.errors import CoramError
from coram_hf.inputs.mapped import mapped_tensors

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of the floating-point types of safetensors."""
LONGEST_HEADER = 10**8
"""The largest header that safetensors reads, in bytes."""


def weight_files(folder: Path, allow_pickle: bool) -> list[Path]:
    """The weight files of a checkpoint: safetensors if there are any, else pickles if they are allowed."""
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        found = [folder / single] if _exists(folder / single) else _indexed(folder / index)
        if found and single == WEIGHTS_NAME and not allow_pickle:
            raise pickle_refused(folder, found[0].name)
        if found:
            return found
    raise CoramError(
        f"{folder} contains no weights: neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}"
    )


def stored_bytes(folder: Path, itemsize: int | None = None) -> int:
    """The bytes of a checkpoint's tensors, with floats of `itemsize` bytes; 0 if it has no safetensors.

    Only headers are read. A head that the config ties to the embedding is not counted.
    """
    files = [path for path in folder.glob("*.safetensors") if _exists(path)]
    config = read_json(folder / "config.json") if _exists(folder / "config.json") else {}
    sizes: list[int] = [
        tensor_bytes(key, entry["dtype"], entry["data_offsets"], itemsize, config)
        for path in files
        for key, entry in _header(path).items()
        if key != "__metadata__"
    ]
    return sum(sizes)


def tensor_bytes(
    name: str, dtype: str, offsets: Sequence[int], itemsize: int | None, config: Mapping[str, Any]
) -> int:
    """The bytes of a tensor between two offsets of its file, with floats of `itemsize` bytes."""
    if name == "lm_head.weight" and config.get("tie_word_embeddings"):
        return 0
    begin, end = offsets
    width = FLOATS.get(dtype)
    return (end - begin) * itemsize // width if itemsize and width else end - begin


def _header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file; empty if it is damaged, which is an error once it is opened."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(min(length, LONGEST_HEADER)))
            return header
    except (OSError, ValueError):
        return {}


def pickle_refused(where: object, name: str) -> CoramError:
    """The error for pickled weights without allow_pickle."""
    return CoramError(
        f"{where} contains pickled weights ({name}), which can run code when they are loaded; "
        "convert them to safetensors, or pass allow_pickle=True (--allow-pickle) to load tensors only"
    )


def read_tensors(folder: Path, files: list[Path]) -> dict[str, Tensor]:
    """Every tensor by its name on disk, as a memory map that is read only when it is used."""
    tensors: dict[str, Tensor] = {}
    owners: dict[str, Path] = {}
    for path in files:
        for key, tensor in _open(path):
            if key in owners:
                raise CoramError(
                    f"tensor {key!r} is in two files of {folder}, {owners[key].name} and {path.name}"
                )
            tensors[key], owners[key] = tensor, path
    index = folder / (SAFE_WEIGHTS_INDEX_NAME if files[0].suffix == ".safetensors" else WEIGHTS_INDEX_NAME)
    if _exists(index) and files[0].name not in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        for key, name in _weight_map(index).items():
            if key not in owners:
                raise CoramError(f"{index}: tensor {key!r} should be in {name}, but is missing there")
    return tensors


def fingerprint(path: Path) -> dict[str, Any]:
    """A file's size, modification time, and hash of its first megabyte, which holds a safetensors header."""
    status = path.stat()
    with path.open("rb") as file:
        head = hashlib.sha256(file.read(2**20)).hexdigest()
    return {"file": str(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns, "head": head}


def read_json(path: Path) -> Any:
    """Read a JSON file; raise if it is damaged or contains a key twice."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique(path))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CoramError(f"{path} cannot be read as JSON: {error}") from error


def _unique(path: Path) -> Any:
    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CoramError(f"{path} contains the key {twice!r} twice")
        return found

    return check


def _exists(path: Path) -> bool:
    try:
        return path.resolve(strict=True).is_file()
    except FileNotFoundError:
        return False
    except (OSError, RuntimeError) as error:
        raise CoramError(f"{path} cannot be opened: {error}") from error


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(v, str) for v in names.values()):
        raise CoramError(f"{index} must contain a weight_map from tensor names to file names")
    return names


def _indexed(index: Path) -> list[Path]:
    """The shards that an index lists, which must be in the same folder; empty without an index."""
    if not _exists(index):
        return []
    shards = []
    for name in dict.fromkeys(_weight_map(index).values()):
        if Path(name).name != name or name in ("", ".", "..") or "\\" in name or not name.isprintable():
            raise CoramError(f"{index} names {name!r}, which is not the name of a file in the same folder")
        if Path(name).suffix != Path(index.name.removesuffix(".index.json")).suffix:
            raise CoramError(f"{index} names {name!r}, which has a different file extension")
        if not _exists(index.parent / name):
            raise CoramError(f"{index} names the shard {name!r}, which is missing")
        shards.append(index.parent / name)
    return shards


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle file, memory-mapped unless its format is older than torch 1.6."""
    mapped = zipfile.is_zipfile(path)
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(content, dict):
        raise CoramError("not a dictionary of tensors")
    if not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items()):
        raise CoramError("not a dictionary of tensors by name")
    return content


def _open(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        if path.suffix == ".safetensors":
            yield from mapped_tensors(path)
        else:
            yield from _read_pickle(path).items()
    except (SafetensorError, OSError, ValueError, RuntimeError, EOFError, AttributeError) as error:
        raise CoramError(f"{path} is damaged or not a weight file: {' '.join(str(error).split())}") from error
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":
            raise
        raise CoramError(
            f"{path} contains more than tensors: {' '.join(str(error).split())[:200]}"
        ) from error
