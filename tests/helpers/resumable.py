"""A merge to be killed and gone on with.

    python resumable.py FOLDER

reads lines `NAME SECONDS` and, for each, starts the merge in a process of its own, kills it after so many
seconds, and says whether it was killed. The libraries are loaded once, so that a start takes no time.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from coram_hf import CoramConfig, folder_merge
from coram_hf.execution import stream as streaming
from coram_hf.merger import CoramMerger


def run(folder, name):
    torch.set_num_threads(1)
    sources = [folder / name for name in ("base", "e0", "e1", "e2")]
    config = CoramConfig.from_line("SS(ca+ave,variance).ties")
    merger = CoramMerger(sources[0], sources[1:], config, progress=False)
    return merger.merge_to(folder / name, max_shard_size="300KB")


def run_slowly(folder, name):
    """A merge whose journal is written at once, in steps long enough to be killed in."""
    streaming.SYNC_SECONDS = 0.0
    merge_unit = folder_merge.FolderMerge._merge_unit

    def slow(*arguments):
        time.sleep(0.004)
        return merge_unit(*arguments)

    folder_merge.FolderMerge._merge_unit = slow
    run(folder, name)


def attempt(folder, name, seconds):
    """Whether a merge had to be killed."""
    child = os.fork()
    if child == 0:
        try:
            run_slowly(folder, name)
        finally:
            os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


if __name__ == "__main__":
    for line in sys.stdin:
        target, limit = line.split()
        print("killed" if attempt(Path(sys.argv[1]), target, float(limit)) else "ended", flush=True)
