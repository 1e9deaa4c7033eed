"""A merge to be killed and resumed.

    python -m helpers.resumable FOLDER

reads lines `NAME STEP` and, for each, starts the merge in a process of its own, which kills itself at this
step of its work on the disk, and says `killed`, or `ended` and the number of its steps. The libraries are
loaded and the card's figure is drawn once, so that a start takes no time.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from helpers.disks import watched
from helpers.figures import draw_once

from coram_hf import CoramConfig
from coram_hf.execution import stream
from coram_hf.hub import card
from coram_hf.merger import CoramMerger

CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree"}
STEP_BYTES = 2**15
"""So many bytes of tensors count as a step."""


def run(folder, name):
    torch.set_num_threads(1)
    sources = [folder / name for name in ("base", "e0", "e1", "e2")]
    config = CoramConfig.from_line("DEC(full)" if "decorrelated" in name else "SS(ca+ave,variance).ties")
    merger = CoramMerger(sources[0], sources[1:], config, progress=False)
    return merger.merge_to(folder / name, max_shard_size="300KB")


class Steps:
    """Counts what is done to the disk below the places whose path has `mark`, and dies at step `last`."""

    def __init__(self, mark: str, last: int) -> None:
        self._mark, self._last = mark, last
        self._written = 0
        self.count = 0

    def step(self) -> None:
        self.count += 1
        if self.count == self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def event(self, event: str, arguments: tuple[object, ...]) -> None:
        """What the interpreter is about to do."""
        if event in CHANGES and self._mark in str(arguments[0]):
            self.step()

    def write(self, size: int) -> None:
        before, self._written = self._written, self._written + size
        if before // STEP_BYTES < self._written // STEP_BYTES:
            self.step()


def die(folder, name, last):
    """Merge, with an entry in the journal for every tensor, and die at a step; returns how many it had."""
    stream.SYNC_SECONDS = 0.0
    steps, sync = Steps(name, last), os.fsync

    def fsync(handle):
        steps.step()
        sync(handle)

    os.fsync = fsync
    sys.addaudithook(steps.event)
    with watched(steps.write):
        run(folder, name)
    return steps.count


def attempt(folder, name, last):
    """What became of a merge: `killed`, `ended` and its number of steps, or `failed`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, f"ended {die(folder, name, last)}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    return "killed" if os.WIFSIGNALED(status) else said or "failed"


if __name__ == "__main__":
    card.draw_updates = draw_once
    run(Path(sys.argv[1]), "warm")
    for line in sys.stdin:
        target, step = line.split()
        print(attempt(Path(sys.argv[1]), target, int(step)), flush=True)
