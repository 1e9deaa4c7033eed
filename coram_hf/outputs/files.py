"""Atomic file writes, and output folders."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coram_hf.errors import CoramError


def output_folder(path: str | Path, names: tuple[str, ...]) -> Path:
    """Create a folder to write to, and remove earlier results from it."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise CoramError(f"{folder} is a file; the output must be a folder")
    if any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        raise CoramError(f"{folder} contains a model; choose another folder for the output")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).unlink(missing_ok=True)
    return folder


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to, renamed to the given one once the file is complete.

    Links are followed; anything but a regular file, such as a device or a pipe, is written to directly.
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
    """Write a text file atomically; `sync` waits until it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="replace")
        if sync:
            sync_path(partial)
    if sync:
        sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
