"""Merge checkpoints from files to files, and print time and memory beside the kernel alone.

    python examples/benchmarks/streaming.py [--sizes 0.3B 1B] [--experts 3] [--folder DIR]

Llama-shaped bf16 checkpoints of random weights are made in the folder (10 GB for 1B), merged in a process of
their own whose anonymous memory is sampled, and compared with the time of the geometry alone on the same
matrices, in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SIZES = {
    "0.1B": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 32000},
    "0.3B": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 10, "vocab_size": 128256},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
}


def make(folder: Path, size: str, experts: int) -> list[Path]:
    """A base and its experts on disk."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

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
    return [folder / "base", *(folder / f"e{i}" for i in range(experts))]


class AnonymousMemory:
    """The largest RssAnon of this process while it is open."""

    def __enter__(self) -> AnonymousMemory:
        self.peak, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            status = Path("/proc/self/status").read_text()
            self.peak = max(self.peak, int(status.split("RssAnon:")[1].split()[0]) * 1024)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def merge(sources: list[str], out: str) -> dict[str, float]:
    """The merge from files to files."""
    from coram_hf import CoramMerger

    with AnonymousMemory() as memory:
        started = time.perf_counter()
        CoramMerger(sources[0], sources[1:], progress=False).merge_to(out, max_shard_size="1GB")
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "peak": memory.peak}


def kernel(sources: list[str]) -> dict[str, float]:
    """The geometry alone, on the same matrices, read once before."""
    from coram_hf import CoramConfig, CoramMerger
    from coram_hf.geometry import merge_rows

    engine = CoramMerger(sources[0], sources[1:], progress=False)._engine
    total, largest = 0.0, 0
    for name in engine.models.base:
        tensor = engine.models.base.original(name)
        largest = max(largest, tensor.numel() * tensor.element_size())
    for name in engine.targets:
        base, experts = engine.models.tensors(name)
        for tensor in (base, *experts):
            tensor.float().sum()
        started = time.perf_counter()
        for _ in merge_rows(base, experts, CoramConfig()):
            pass
        total += time.perf_counter() - started
    return {"seconds": total, "largest": largest}


def in_process(role: str, *arguments: str) -> dict[str, float]:
    """Run one part in a process of its own."""
    run = subprocess.run(
        [sys.executable, __file__, "--role", role, *arguments], capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["0.3B", "1B"], choices=list(SIZES))
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--role", choices=["merge", "kernel"], help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.role:
        found = merge(arguments[:-1], arguments[-1]) if options.role == "merge" else kernel(arguments)
        print(json.dumps(found))
        return
    print("  size     merge    kernel  ratio  peak anonymous  largest tensor")
    for size in options.sizes:
        folder = Path(tempfile.mkdtemp(prefix="coram-bench-", dir=options.folder))
        try:
            sources = [str(path) for path in make(folder, size, options.experts)]
            os.sync()  # what is still on its way to the disk would be written beside the merge
            alone = in_process("kernel", *sources)
            whole = in_process("merge", *sources, str(folder / "out"))
        finally:
            shutil.rmtree(folder)
        print(
            f"{size:>6} {whole['seconds']:>7.1f} s {alone['seconds']:>7.1f} s "
            f"{whole['seconds'] / alone['seconds']:>6.2f} {whole['peak'] / 2**20:>12.0f} MB "
            f"{alone['largest'] / 2**20:>12.0f} MB"
        )


if __name__ == "__main__":
    main()
