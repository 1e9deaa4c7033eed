"""The memory of a thread that merges, measured in a process of its own: it is small, and is given back."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, gc, json, sys, threading, torch
from pathlib import Path
from coram_hf import CoramConfig
from coram_hf.geometry import merge_rows
from coram_hf.geometry.cores import one_core

generator = torch.Generator().manual_seed(0)
base = (0.02 * torch.randn(1024, 4096, generator=generator)).bfloat16()
experts = [(base + 4e-4 * torch.randn(base.shape, generator=generator)).bfloat16() for _ in range(5)]
config = CoramConfig.from_line(sys.argv[1])

def anonymous():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

def merge():
    for _ in merge_rows(base, experts, config, measure=True):
        pass

gc.collect()
ctypes.CDLL(None).malloc_trim(0)
with one_core():
    before, peak = anonymous(), 0
    thread = threading.Thread(target=merge)
    thread.start()
    while thread.is_alive():
        peak = max(peak, anonymous())
        thread.join(0.002)
print(json.dumps({"peak": peak - before, "after": anonymous() - before}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize(("line", "most"), [("full", 34e6), ("SS(ca+ave,variance)", 48e6)])
def test_a_thread_holds_a_few_chunks_and_gives_them_back(line, most):
    run = subprocess.run([sys.executable, "-c", SCRIPT, line], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert 12e6 < found["peak"] < most
    assert found["after"] < found["peak"] / 2
