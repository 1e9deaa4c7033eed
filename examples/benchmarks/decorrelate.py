"""The cost of decorrelation: beside a plain merge and our TSV-M, on the same matrices, and of adapters.

    python examples/benchmarks/decorrelate.py [--hidden 512] [--experts 3] [--layers 2] [--files 1B]

First every matrix of one Llama block of the given width, in bfloat16, on one core, as in a merge. Then whole
merges of LoRA adapters, from files to files. Times are processor seconds, best of `--rounds`. With `--files`,
also `ridge` beside a plain merge of full checkpoints, as commands from the shell.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from common import SIZES, beside_python, machine, make, run_command
from threadpoolctl import threadpool_limits
from transformers import LlamaConfig, LlamaForCausalLM

from coram_hf import CoramConfig, CoramMerger
from coram_hf.baselines import merge_tensor
from coram_hf.geometry import merge_matrix

LINES = {
    "plain": CoramConfig(),
    "tsv": CoramConfig(decorrelate="tsv"),
    "ridge": CoramConfig(decorrelate="ridge"),
    "ridge, float32": CoramConfig(decorrelate="ridge", compute_dtype="float32"),
}


def shapes(hidden: int) -> dict[str, tuple[int, int]]:
    wide = 4 * hidden
    return {
        "q_proj": (hidden, hidden),
        "k_proj": (hidden // 4, hidden),
        "gate_proj": (wide, hidden),
        "down_proj": (hidden, wide),
    }


COUNTS = {"q_proj": 2, "k_proj": 2, "gate_proj": 2, "down_proj": 1}
"""How many matrices of each shape a block has."""


def best(work: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The processor seconds of the fastest round, which other work on the machine disturbs least."""
    found = dict.fromkeys(work, float("inf"))
    for _ in range(rounds):
        for name, run in work.items():
            started = time.process_time()
            run()
            found[name] = min(found[name], time.process_time() - started)
    return found


def matrices(hidden: int, n_experts: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds by shape and method, on one core."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with threadpool_limits(1, user_api="blas"):
        return {name: one_matrix(shape, n_experts, rounds) for name, shape in shapes(hidden).items()}


def one_matrix(shape: tuple[int, int], n_experts: int, rounds: int) -> dict[str, float]:
    """Seconds by method, for one matrix."""
    base = (0.02 * torch.randn(shape)).bfloat16()
    experts = [(base + 0.0006 * torch.randn(shape)).bfloat16() for _ in range(n_experts)]
    work: dict[str, Callable[[], object]] = {
        label: partial(merge_matrix, base, experts, config) for label, config in LINES.items()
    }
    return best({**work, "TSV-M": partial(merge_tensor, base, experts, "tsvm")}, rounds)


def adapters(
    folder: Path, hidden: int, layers: int, n_experts: int, rank: int, rounds: int
) -> dict[str, float]:
    """Seconds of whole merges of LoRA adapters, from files to files."""
    from peft import LoraConfig, get_peft_model

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        vocab_size=1000,
    )
    torch.manual_seed(0)
    base = LlamaForCausalLM(config).to(torch.bfloat16)
    base.save_pretrained(folder / "base")
    for i in range(n_experts):
        made = get_peft_model(copy.deepcopy(base), LoraConfig(r=rank, target_modules="all-linear"))
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, 0.02)
        made.save_pretrained(str(folder / f"e{i}"))
    sources = [str(folder / f"e{i}") for i in range(n_experts)]

    def merge(config: CoramConfig) -> None:
        CoramMerger(str(folder / "base"), sources, config, progress=False).merge_to(
            folder / "out", overwrite=True
        )

    return best({label: partial(merge, config) for label, config in LINES.items()}, rounds)


def checkpoints(folder: Path, size: str, n_experts: int) -> dict[str, dict[str, float]]:
    """What whole commands take that merge full checkpoints in bfloat16, from files to files."""
    sources, found = make(folder, size, n_experts), {}
    for label, line in {"plain": "full", "ridge": "DEC(full,ridge)"}.items():
        words = [beside_python("coram-hf"), "--quiet", "merge", *sources, "--line", line]
        found[label] = run_command(*words, "-o", str(folder / "out"))
        shutil.rmtree(folder / "out")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--files", choices=SIZES, help="also merge full checkpoints of this size")
    options = parser.parse_args()

    threads = torch.get_num_threads()
    found = matrices(options.hidden, options.experts, options.rounds)
    block = {label: sum(COUNTS[n] * at[label] for n, at in found.items()) for label in found["q_proj"]}
    torch.set_num_threads(threads)
    folder = Path(tempfile.mkdtemp(prefix="coram-bench-"))
    try:
        low = adapters(folder, options.hidden, options.layers, options.experts, options.rank, options.rounds)
        full = checkpoints(folder / "full", options.files, options.experts) if options.files else {}
    finally:
        shutil.rmtree(folder)

    print(f"hidden {options.hidden}, {options.experts} experts; {machine()}\n")
    print(
        "| full matrices, one core | " + " | ".join(shapes(options.hidden)) + " | block | x plain | x TSV-M |"
    )
    print("|---" * (len(found) + 4) + "|")
    for label, whole in block.items():
        cells = " | ".join(f"{at[label]:.3f} s" for at in found.values())
        ratios = f"{whole / block['plain']:.1f} | {whole / block['TSV-M']:.2f}"
        print(f"| {label} | {cells} | {whole:.2f} s | {ratios} |")
    print(f"\n| adapters of rank {options.rank}, files to files | processor s | x plain |\n|---|---|---|")
    for label, seconds in low.items():
        print(f"| {label} | {seconds:.2f} | {seconds / low['plain']:.2f} |")
    if full:
        print(f"\n| {options.files}, files to files | seconds | processor s | x plain | memory |")
        print("|---" * 5 + "|")
    for label, run in full.items():
        ratio = run["seconds"] / full["plain"]["seconds"]
        cells = f"{run['seconds']:.1f} | {run['cpu']:.1f} | {ratio:.1f} | {run['peak'] / 2**20:.0f} MB"
        print(f"| {label} | {cells} |")
    print("\n" + json.dumps({"matrices": found, "block": block, "adapters": low, "files": full}))


if __name__ == "__main__":
    main()
