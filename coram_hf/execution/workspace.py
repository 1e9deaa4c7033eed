"""The hidden folder of an unfinished merge: its lock, its journal, and its renaming once complete."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coram_hf.errors import CoramError
from coram_hf.execution.journal import Journal
from coram_hf.outputs.files import put_in_place, replaced_folder, write_whole

STATE, JOURNAL = "state.json", "journal"
logger = logging.getLogger("coram_hf")


class Workspace:
    """`.NAME.coram` beside the target NAME: the result's files, kept updates, the inputs' state, a journal.

    An entry is journalled only once its data are on the disk, so the journal can be trusted after a crash.
    Each process has its own journal in the same folder.
    """

    def __init__(self, target: Path, rank: int = 0) -> None:
        self.target = target
        self.folder = target.parent / f".{target.name}.coram"
        self.files = self.folder / "files"
        self.kept = self.folder / "kept"
        self._journal = Journal(self.folder / f"{JOURNAL}-{rank}.jsonl")
        self._lock: int | None = None

    def lock(self) -> None:
        """Lock the target against other merges until `unlock` or the end of the process."""
        while self._lock is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                raise CoramError(
                    f"another merge is writing to {self.target}; wait for it, or stop it"
                ) from None
            if self.folder.exists() and os.fstat(handle).st_ino == self.folder.stat().st_ino:
                self._lock = handle
            else:  # the folder was removed by a merge that has just ended
                os.close(handle)

    def open(self, state: Mapping[str, Any] | None) -> None:
        """Create the folder, or resume an existing one that was begun from the same state.

        Without a state nothing is resumed.
        """
        if self._begun(state) and self.files.is_dir():
            logger.info("resuming the interrupted merge in %s", self.folder)
            return
        if self.files.exists():
            logger.warning("the inputs or options differ from those of %s: starting over", self.folder)
        self._clear()
        self.files.mkdir(parents=True)
        if state is not None:
            write_whole(self.folder / STATE, _text(state), sync=True)

    def _clear(self) -> None:
        """Empty the folder, state first, so that leftovers after a kill are never resumed."""
        (self.folder / STATE).unlink(missing_ok=True)
        for folder in (self.files, self.kept):
            shutil.rmtree(folder, ignore_errors=True)
        for path in self.folder.iterdir():
            path.unlink()

    def is_published(self, state: Mapping[str, Any] | None) -> bool:
        """Whether a merge from this state was published, but killed before this folder was removed."""
        return self.target.is_dir() and not self.files.exists() and self._begun(state)

    def _begun(self, state: Mapping[str, Any] | None) -> bool:
        path = self.folder / STATE
        return state is not None and path.is_file() and path.read_text(encoding="utf-8") == _text(state)

    def entries(self) -> dict[tuple[str, str], Any]:
        """The journal entries of all processes: (phase, unit) -> value."""
        journals = [Journal(path) for path in sorted(self.folder.glob(f"{JOURNAL}-*.jsonl"))]
        return {(phase, unit): value for journal in journals for phase, unit, value in journal}

    def note(self, entries: Iterable[tuple[str, str, Any]]) -> None:
        """Add entries to the journal of this process, and wait until they are on the disk."""
        self._journal.note(entries)

    def unlock(self) -> None:
        """Release the lock."""
        self._journal.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove the folder and everything in it."""
        self._journal.close()
        self._clear()
        self.folder.rmdir()

    def publish(self, overwrite: bool) -> None:
        """Rename the files to the target, in one step, after all of them are on the disk."""
        self._journal.close()
        if self.target.exists() and not overwrite:
            raise FileExistsError(f"{self.target} was created during the merge; move or delete it")
        put_in_place(self.files, self.target)

    def clean(self) -> None:
        """Remove everything but the target, state last, so that a kill in between is recognised."""
        for folder in (replaced_folder(self.target), self.files, self.kept):
            shutil.rmtree(folder, ignore_errors=True)
        for path in self.folder.glob(f"{JOURNAL}-*"):
            path.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)


def check_target(target: Path, overwrite: bool, needed: int, inputs: Iterable[Path]) -> None:
    """Raise if the target cannot be written, before anything is read."""
    if target.is_symlink():
        raise CoramError(f"{target} is a symbolic link; pass the folder itself")
    for path in inputs:
        if overwrite and path.resolve().is_relative_to(target.resolve()):
            raise CoramError(f"{target} contains an input of the merge, {path}; choose another folder")
    if target.exists() and not overwrite:
        raise CoramError(f"{target} exists; choose another folder, or pass overwrite=True (--overwrite)")
    if target.exists() and not target.is_dir():
        raise CoramError(f"{target} is a file; the output must be a folder")
    parent = target.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise CoramError(
            f"cannot write to {parent}, where {target.name} would be created; check its permissions"
        )
    free = shutil.disk_usage(parent).free
    work = target.parent / f".{target.name}.coram"
    begun = sum(path.stat().st_blocks * 512 for path in work.rglob("*") if path.is_file())
    if free + begun < needed:
        raise CoramError(
            f"{target} needs {needed / 2**30:.2f} GB, but only {free / 2**30:.2f} GB are free in {parent}"
        )


def _text(state: Mapping[str, Any]) -> str:
    return json.dumps(state, indent=1, sort_keys=True)
