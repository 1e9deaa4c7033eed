"""Files that are there whole or not at all, and folders for them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coram_hf.errors import CoramError


def output_folder(path: str | Path, names: tuple[str, ...]) -> Path:
    """A folder to write into, without earlier results, so that what it holds in the end is of this run."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise CoramError(f"{folder} is a file; the output is a folder")
    if any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        raise CoramError(f"{folder} holds a model; choose another folder for the output")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).unlink(missing_ok=True)
    return folder


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Another name to write a file under, which gets its own once it is whole.

    A link is followed; what is no file, such as a device or a pipe, is written to as it is.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        yield path
        return
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{path.suffix}")
    try:
        yield partial
        if path.exists():
            partial.chmod(path.stat().st_mode)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str, *, sync: bool = False) -> None:
    """Write a text file so that it is there whole or not at all; `sync` waits for the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="replace")
        if sync:
            sync_path(partial)
    if sync:
        sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
