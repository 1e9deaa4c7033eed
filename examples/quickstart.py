"""Merge three experts of a tiny Llama, offline and in seconds: the README's example, runnable.

    python examples/quickstart.py [FOLDER]

The models are random and the experts are noise around their base: this shows the calls, not a skill.
"""

from __future__ import annotations

import copy
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from coram_hf import CoramConfig, CoramMerger


def make_expert(base: LlamaForCausalLM, size: float, seed: int) -> LlamaForCausalLM:
    """A stand-in for fine-tuning: every weight moves by `size` of its scale."""
    expert = copy.deepcopy(base)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in expert.parameters():
            parameter += size * parameter.std() * torch.randn_like(parameter)
    return expert


def make_base() -> LlamaForCausalLM:
    """A tiny Llama of random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="coram-")
    base = make_base()
    experts = {
        name: make_expert(base, size, seed)
        for seed, (name, size) in enumerate({"math": 0.05, "code": 0.03, "chat": 0.04}.items())
    }

    merger = CoramMerger(base, experts, CoramConfig.from_line("SS(ca+ave,variance)"))
    plan = merger.inspect()
    print(f"D = {plan.dispersion:.2f}, kappa = {plan.kappa}, lambda = {plan.lam:.3f}")
    print(f"{len(plan.targets)} target matrices, {len(plan.kept)} tensors kept from the base")

    result = merger.merge()
    print(f"c_RMS = {result.report.c_rms:.3f} beside sqrt(N) = {result.report.sqrt_n:.3f}")
    result.save_pretrained(folder)
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    print(f"saved and reloaded from {folder}: {type(reloaded).__name__}, {reloaded.dtype}")


if __name__ == "__main__":
    main()
