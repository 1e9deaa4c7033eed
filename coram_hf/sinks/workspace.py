"""The hidden folder in which a merge grows: its journal, its resumption, its renaming when it is whole."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coram_hf.errors import MergeError

STATE, JOURNAL = "state.json", "journal"
logger = logging.getLogger("coram_hf")


class Workspace:
    """`.NAME.coram` beside the target NAME: the files of the result, what they are made of, and a journal.

    A journal line is written when the data that it speaks of is on the disk, so whatever a journal says
    is true after a crash. Another process has a journal of its own in the same folder.
    """

    def __init__(self, target: Path, rank: int = 0) -> None:
        self.target = target
        self.folder = target.parent / f".{target.name}.coram"
        self.files = self.folder / "files"
        self._rank = rank
        self._journal: Any = None

    def open(self, state: Mapping[str, Any] | None) -> None:
        """Make the folder, or go on with the one that is there if it was begun from the same state.

        Without a state nothing is ever resumed.
        """
        if self._begun(state):
            logger.warning("going on with the merge that was begun in %s", self.folder)
            return
        if self.folder.exists():
            logger.warning("the inputs or options differ from those of %s: starting again", self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.files.mkdir(parents=True)
        if state is not None:
            _write_synced(self.folder / STATE, _text(state))

    def is_published(self, state: Mapping[str, Any] | None) -> bool:
        """Whether a merge from this state was killed after its last step: only this folder was left."""
        return self.target.is_dir() and not self.files.exists() and self._begun(state)

    def _begun(self, state: Mapping[str, Any] | None) -> bool:
        path = self.folder / STATE
        return state is not None and path.is_file() and path.read_text(encoding="utf-8") == _text(state)

    def entries(self) -> dict[tuple[str, str], Any]:
        """What the journals of all processes say: (phase, unit) -> value; a torn last line is left out."""
        found: dict[tuple[str, str], Any] = {}
        for path in sorted(self.folder.glob(f"{JOURNAL}-*.jsonl")):
            for line in path.read_bytes().split(b"\n"):
                try:
                    phase, unit, value = json.loads(line)
                except ValueError:
                    continue
                found[phase, unit] = value
        return found

    def note(self, entries: Iterable[tuple[str, str, Any]]) -> None:
        """Add lines to the journal of this process, for good."""
        if self._journal is None:
            path = self.folder / f"{JOURNAL}-{self._rank}.jsonl"
            self._journal = path.open("ab")
            self._journal.write(b"\n")
        for entry in entries:
            self._journal.write(json.dumps(entry).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def discard(self) -> None:
        """Leave nothing behind."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def publish(self) -> None:
        """Give the files their final name, in one step, when all of them are on the disk."""
        self.close()
        for path in self.files.rglob("*"):
            if path.is_file():
                _sync(path)
        _sync(self.files)
        if self.target.exists():
            shutil.rmtree(self._replaced, ignore_errors=True)
            os.replace(self.target, self._replaced)
        os.replace(self.files, self.target)
        _sync(self.target.parent)
        self.clean()

    @property
    def _replaced(self) -> Path:
        return self.target.parent / f".{self.target.name}.replaced"

    def clean(self) -> None:
        """Remove all but the target; the state goes last, so that a kill in between is understood."""
        shutil.rmtree(self._replaced, ignore_errors=True)
        shutil.rmtree(self.files, ignore_errors=True)
        for path in self.folder.glob(f"{JOURNAL}-*"):
            path.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)


def check_target(target: Path, overwrite: bool, needed: int, inputs: Iterable[Path]) -> None:
    """Refuse, before anything is read, what could not be written in the end."""
    for path in inputs:
        if overwrite and path.resolve().is_relative_to(target.resolve()):
            raise MergeError(f"{target} holds an input of the merge, {path}; choose another folder")
    if target.exists() and not overwrite:
        raise MergeError(f"{target} exists; choose another folder, or pass overwrite=True (--overwrite)")
    if target.exists() and not target.is_dir():
        raise MergeError(f"{target} is a file; the merged model is a folder")
    parent = target.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise MergeError(f"cannot write to {parent}, where {target.name} is to be made")
    free = shutil.disk_usage(parent).free
    work = target.parent / f".{target.name}.coram"
    begun = sum(path.stat().st_blocks * 512 for path in work.rglob("*") if path.is_file())
    if free + begun < needed:
        raise MergeError(
            f"{target} will take {needed / 2**30:.2f} GB, but only {free / 2**30:.2f} GB are free in {parent}"
        )


def _text(state: Mapping[str, Any]) -> str:
    return json.dumps(state, indent=1, sort_keys=True)


def _write_synced(path: Path, text: str) -> None:
    partial = path.with_suffix(".new")
    partial.write_text(text, encoding="utf-8")
    _sync(partial)
    os.replace(partial, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
