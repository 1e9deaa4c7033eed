"""Merge a model under a quarter of its size in memory, and generate with the result at once.

    python examples/placement.py [FOLDER]

Accelerate keeps what fits in CPU memory there, and the rest in FOLDER/offload. The models are random and the
experts are noise around their base: this shows placement, not a skill.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coram_hf import CoramConfig, CoramMerger


def make_models(folder: Path) -> int:
    """Save a base and two experts; return the bytes of one model."""
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=12,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    base = LlamaForCausalLM(config).to(torch.bfloat16)
    base.save_pretrained(folder / "base")
    for name, size in {"math": 0.05, "code": 0.03}.items():
        expert = LlamaForCausalLM(config).to(torch.bfloat16)
        with torch.no_grad():
            for own, parameter in zip(expert.parameters(), base.parameters(), strict=True):
                own.copy_(parameter + size * parameter.std(correction=0) * torch.randn_like(parameter))
        expert.save_pretrained(folder / name)
    return sum(parameter.nbytes for parameter in base.parameters())


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="coram-"))
    size = make_models(folder)
    merger = CoramMerger(
        folder / "base",
        {"math": folder / "math", "code": folder / "code"},
        CoramConfig.from_line("full.ta"),
        device_map="auto",
        max_memory={"cpu": size // 4},
        offload_folder=folder / "offload",
        progress=False,
    )
    result = merger.merge()
    held = sum(parameter.nbytes for parameter in result.model.parameters() if not parameter.is_meta)
    print(f"of {size / 1e6:.1f} MB, {held / 1e6:.1f} MB are in memory; max_memory was {size / 4e6:.1f} MB")
    for device in ("cpu", "disk"):
        modules = [name for name, kept in result.model.hf_device_map.items() if kept == device]
        print(f"  {device}: {', '.join(modules)}")

    prompt = torch.arange(1, 9).unsqueeze(0)
    for merged in (result, result.with_lambda(1.0)):
        answer = merged.model.generate(prompt, max_new_tokens=8, do_sample=False)
        print(f"generated at lambda {merged.report.lam:.2f}: {answer[0, 8:].tolist()}")
    result.save_pretrained(folder / "merged")
    print(f"saved in {folder / 'merged'}")


if __name__ == "__main__":
    main()
