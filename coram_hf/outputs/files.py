"""Atomic file writes, and output folders."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from coram_hf.errors import CoramError


def check_output_folder(path: str | Path) -> None:
    """Raise if a folder for results is a file, or contains a model."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise CoramError(f"{folder} is a file; the output must be a folder")
    if any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        raise CoramError(f"{folder} contains a model; choose another folder for the output")


def output_folder(path: str | Path, names: tuple[str, ...]) -> Path:
    """Create a folder to write to, and remove earlier results from it."""
    check_output_folder(path)
    folder = Path(path)
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


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A hidden folder to write to, renamed to the target once complete; an existing target is replaced."""
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    partial.mkdir(parents=True)
    try:
        yield partial
        put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def filled_folder(target: Path, carried: Collection[str], stale: re.Pattern[str]) -> Iterator[Path]:
    """A hidden folder to write to, whose files appear in the target once all of them are complete.

    A target that is missing or empty is replaced in one step. Otherwise its files are replaced one by one,
    those whose names match `stale` are removed, and all others stay. `carried`: files of the target that are
    copied in first if they exist, to be rewritten or removed.
    """
    if not target.is_dir() or not any(target.iterdir()):
        with new_folder(target) as partial:
            yield partial
        return
    partial = target / f".{uuid.uuid4().hex}"
    partial.mkdir()
    try:
        known = [name for name in carried if (target / name).is_file()]
        for name in known:
            shutil.copy(target / name, partial)
        yield partial
        made = {path.relative_to(partial) for path in partial.rglob("*") if path.is_file()}
        _share(partial)
        for path in made:
            sync_path(partial / path)
        for path in sorted(made, key=lambda path: path.suffix != ".safetensors"):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / path, target / path)
        old = [path.name for path in target.iterdir() if stale.fullmatch(path.name)]
        for name in {*known, *old} - {str(path) for path in made}:
            (target / name).unlink()
        sync_path(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _share(folder: Path) -> None:
    """Let those read the weights who may read the folder; safetensors lets only their owner."""
    for path in folder.rglob("*.safetensors"):
        path.chmod(path.stat().st_mode | folder.stat().st_mode & 0o666)


def put_in_place(folder: Path, target: Path) -> None:
    """Rename a complete folder to the target, after everything in it is on the disk."""
    _share(folder)
    for path in (*folder.rglob("*"), folder):
        sync_path(path)
    old = replaced_folder(target)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
    os.replace(folder, target)
    sync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def replaced_folder(target: Path) -> Path:
    """Where an existing target is moved while another folder takes its place."""
    return target.parent / f".{target.name}.replaced"


def sync_path(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
