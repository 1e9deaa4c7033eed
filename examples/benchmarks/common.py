"""What the benchmarks share: checkpoints of random weights, a watch on memory, and processes of their own."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SIZES = {
    "50M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 11, "vocab_size": 16000},
    "0.1B": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 32000},
    "0.3B": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 10, "vocab_size": 128256},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
}
"""Llama shapes by their number of parameters; the vocabulary is an eighth to a half of it."""


def make(folder: Path, size: str, experts: int) -> list[str]:
    """A base and its experts on disk, in bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    heads = SIZES[size]["hidden_size"] // 64
    config = LlamaConfig(
        **SIZES[size], num_attention_heads=heads, num_key_value_heads=heads // 4, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "base", max_shard_size="1GB")
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    for i in range(experts):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(base[name] + 0.02 * base[name].float().std() * torch.randn(p.shape))
        model.save_pretrained(folder / f"e{i}", max_shard_size="1GB")
    os.sync()  # what is still on its way to the disk would be written beside the merge
    return [str(folder / "base"), *(str(folder / f"e{i}") for i in range(experts))]


class Watch:
    """Seconds, processor seconds, bytes read, and the largest RssAnon of this process while it is open."""

    def __enter__(self) -> Watch:
        self.peak, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        self._started = time.perf_counter(), time.process_time(), _read_bytes()
        return self

    def _look(self) -> None:
        while not self._done.wait(0.01):
            status = Path("/proc/self/status").read_text()
            self.peak = max(self.peak, int(status.split("RssAnon:")[1].split()[0]) * 1024)

    def __exit__(self, *_: object) -> None:
        wall, processor, read = self._started
        self.seconds = time.perf_counter() - wall
        self.processor = time.process_time() - processor
        self.read = _read_bytes() - read
        self._done.set()
        self._thread.join()

    def found(self) -> dict[str, float]:
        return {"seconds": self.seconds, "cpu": self.processor, "peak": self.peak, "read": self.read}


def a_core_each(run: Callable[[Any], object], items: Sequence[Any]) -> float:
    """Seconds to run every item, each on a core of its own."""
    from coram_hf.execution.tasks import in_threads

    started = time.perf_counter()
    for _ in in_threads(run, items, len(items)):
        pass
    return time.perf_counter() - started


def beside_python(name: str, python: str = sys.executable) -> str:
    """A command that is installed beside an interpreter."""
    return str(Path(python).parent / name)


def run_command(*words: str, keep_output: bool = False) -> dict[str, Any]:
    """Run a command as a shell does, and measure it: seconds, processor seconds, and bytes to and from disks.

    peak: the largest RssAnon that was seen. output: what it printed, if it is kept.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        started, peak = time.perf_counter(), 0
        child = subprocess.Popen(words, stdout=output if keep_output else subprocess.DEVNULL, stderr=errors)
        try:
            while (ended := os.wait4(child.pid, os.WNOHANG))[0] == 0:
                status = Path(f"/proc/{child.pid}/status").read_text()
                peak = max([peak, *(int(part.split()[0]) * 1024 for part in status.split("RssAnon:")[1:])])
                time.sleep(0.01)
        except BaseException:
            child.kill()
            child.wait()
            raise
        seconds, (_, code, used) = time.perf_counter() - started, ended
        child.returncode = os.waitstatus_to_exitcode(code)
        if child.returncode:
            errors.seek(0)
            raise SystemExit(f"{' '.join(words)}\n{errors.read().decode()}")
        output.seek(0)
        found = {"seconds": seconds, "cpu": used.ru_utime + used.ru_stime, "peak": peak}
        found |= {"read": 512 * used.ru_inblock, "written": 512 * used.ru_oublock}
        return {**found, "output": output.read().decode()} if keep_output else found


def _read_bytes() -> int:
    """Bytes that this process had the disk deliver."""
    return int(Path("/proc/self/io").read_text().split("\nread_bytes:")[1].split()[0])


def in_process(script: str, *arguments: str, python: str = sys.executable) -> dict[str, Any]:
    """What a script prints in its last line, as JSON, in a process of its own."""
    run = subprocess.run([python, script, *arguments], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join([python, script, *arguments])}\n{run.stderr}")
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def machine() -> str:
    """The machine in a line."""
    import torch
    import transformers

    text = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line), "?")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{os.cpu_count()} cores of {model}, {memory:.0f} GB, {platform.system()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
