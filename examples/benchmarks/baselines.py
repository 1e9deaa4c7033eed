"""Seconds per million parameters of every baseline beside CORAM `full`, on the same matrices in one run.

    python examples/benchmarks/baselines.py [--hidden 1024] [--experts 5] [--threads 2]

The matrices are those of one Llama block of the given width, in bfloat16. TSV-M and OrthoMerge stand beside
the decompositions alone, on the same matrices: the SVDs that they are defined by (of N updates and two stacks
of singular vectors; of N products W_0^T W_i), and those of the smaller side that they are reduced to here.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from coram_hf.baselines import PAPER_PRESETS, merge_tensor
from coram_hf.geometry import merge_matrix
from coram_hf.geometry.cores import one_core


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


Block = dict[str, tuple[Tensor, list[Tensor]]]


def svds(block: Block, method: str) -> None:
    """The SVDs that a method is defined by, in float64, and nothing else of it."""
    for base, experts in block.values():
        origin = base.double()
        for expert in experts:
            of = expert.double() - origin if method == "tsvm" else origin.mT @ expert.double()
            torch.linalg.svd(of, full_matrices=False)
        if method == "tsvm":  # the polar factors of the stacked U and V
            torch.linalg.svd(origin, full_matrices=False)
            torch.linalg.svd(origin[: min(origin.shape), : min(origin.shape)])


def reduced(block: Block, method: str) -> None:
    """The decompositions of the smaller side, and the products and QR factors that they take."""
    for base, experts in block.values():
        origin = base.double()
        origin = origin.mT if method == "tsvm" and origin.shape[0] < origin.shape[1] else origin
        for expert in experts:
            other = expert.double()
            if method == "tsvm":
                tau = other - base.double()
                torch.linalg.eigh(tau @ tau.mT if base.shape[0] < base.shape[1] else tau.mT @ tau)
            elif base.shape[0] < base.shape[1]:
                (_, lower), (_, second) = torch.linalg.qr(origin.mT), torch.linalg.qr(other.mT)
                torch.linalg.svd(lower @ second.mT)
            else:
                torch.linalg.svd(origin.mT @ other)
        if method == "tsvm":
            for _ in range(2):
                torch.linalg.eigh(origin.mT @ origin)


def seconds_of(run: Callable[[], object]) -> float:
    """Processor seconds, on one core."""
    with one_core():
        start = time.process_time()
        run()
        return time.process_time() - start


def decompositions(block: Block) -> dict[str, dict[str, float]]:
    """Processor seconds of TSV-M and OrthoMerge, and of their decompositions alone."""
    found = {}
    for label, method in (("TSV-M", "tsvm"), ("OrthoMerge TA+G", "orthomerge")):
        whole = partial(merge_block, block, method)
        parts = {
            "method": whole,
            "svds": partial(svds, block, method),
            "reduced": partial(reduced, block, method),
        }
        found[label] = {name: seconds_of(run) for name, run in parts.items()}
    return found


def merge_block(block: Block, method: str) -> None:
    for base, experts in block.values():
        merge_tensor(base, experts, method)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    block: Block = {}
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
    bare = decompositions(block)
    print("\n| method | CPU s | its SVDs | x | reduced decompositions | x |\n|---|---|---|---|---|---|")
    for label, found in bare.items():
        whole, columns = found["method"], (found["svds"], found["reduced"])
        ratios = " | ".join(f"{alone:.2f} | {whole / alone:.2f}" for alone in columns)
        print(f"| {label} | {whole:.2f} | {ratios} |")
    results = {"per_million": {label: t / millions for label, t in seconds.items()}, "decompositions": bare}
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
