"""Seconds per million parameters of every baseline beside CORAM `full`, on the same matrices in one run.

    python examples/benchmarks/baselines.py [--hidden 1024] [--experts 5] [--threads 2]

The matrices are those of one Llama block of the given width, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import Tensor

from coram_hf.baselines import PAPER_PRESETS, merge_tensor
from coram_hf.geometry import merge_matrix


def llama_block(hidden: int) -> dict[str, tuple[int, int]]:
    wide = hidden * 11 // 4
    return {
        "q_proj": (hidden, hidden),
        "k_proj": (hidden // 4, hidden),
        "v_proj": (hidden // 4, hidden),
        "o_proj": (hidden, hidden),
        "gate_proj": (wide, hidden),
        "up_proj": (wide, hidden),
        "down_proj": (hidden, wide),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    block: dict[str, tuple[Tensor, list[Tensor]]] = {}
    for name, shape in llama_block(args.hidden).items():
        base = (0.02 * torch.randn(shape)).bfloat16()
        noise = [0.0006 * torch.randn(shape) for _ in range(args.experts)]
        block[name] = (base, [(base + n).bfloat16() for n in noise])
    millions = sum(base.numel() for base, _ in block.values()) / 1e6

    def coram() -> None:
        for base, experts in block.values():
            merge_matrix(base, experts)

    def baseline(label: str) -> None:
        preset = PAPER_PRESETS[label]
        for name, (base, experts) in block.items():
            merge_tensor(base, experts, preset.method, name=name, **preset.parameters)

    coram()
    seconds = {}
    for label in ("CORAM full", *PAPER_PRESETS, "TSV-M"):
        start = time.perf_counter()
        if label == "CORAM full":
            coram()
        elif label == "TSV-M":
            for base, experts in block.values():
                merge_tensor(base, experts, "tsvm")
        else:
            baseline(label)
        seconds[label] = time.perf_counter() - start

    print(f"{millions:.1f}M parameters, hidden {args.hidden}, N = {args.experts}, {args.threads} threads\n")
    print("| method | ms per million parameters | ratio to CORAM full |\n|---|---|---|")
    for label, time_taken in seconds.items():
        print(f"| {label} | {1e3 * time_taken / millions:.1f} | {time_taken / seconds['CORAM full']:.2f} |")
    print("\n" + json.dumps({label: t / millions for label, t in seconds.items()}))


if __name__ == "__main__":
    main()
