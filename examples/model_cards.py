"""Write the example cards of model_cards/: the paper's suites on tiny stand-ins, and the quickstart's merge.

    python examples/model_cards.py [FOLDER]

The stand-ins are random models of the suites' classes, with experts whose updates are about as uneven as
the paper says. The configurations, names and Hub ids are the suites'; every number is the stand-ins' own, and
the commits are placeholders.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import OFTConfig, get_peft_model
from quickstart import make_base, make_expert
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from coram_hf import CoramConfig, CoramMerger, MergeReport
from coram_hf.hub import render_card
from coram_hf.hub.card import BEGIN

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NOTE = (
    "*An example: the configuration of one of the paper's suites, on tiny random stand-ins. The numbers are "
    "the stand-ins' own, and the commits are placeholders.*"
)
GRID = 0.1
"""The paper rounds the rule's lambda to multiples of this."""
OFT_FOLDER = "SphereLab/Llama-3.1-8B_OFT_adapters:llama3-1_8b_finetune_{}_adapter"


@dataclass(frozen=True)
class Suite:
    """One suite of the paper: its base, its experts as sources with the size of their updates, its line."""

    base: str
    experts: dict[str, tuple[str, float]]
    line: str
    model: Any


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def gemma() -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=16, query_pre_attn_scalar=16))


def qwen_vl() -> PreTrainedModel:
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": SHAPE["hidden_size"],
        "fullatt_block_indexes": [0],
    }
    rope = {"type": "mrope", "mrope_section": [2, 3, 3], "rope_type": "default"}
    tokens = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122}
    text = {**SHAPE, "rope_scaling": rope, "bos_token_id": 1, "eos_token_id": 2}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, vision_end_token_id=123, **tokens)
    )


def mergebench(base: str, sizes: tuple[float, ...]) -> dict[str, tuple[str, float]]:
    names = ("instruction", "math", "coding", "multilingual", "safety")
    return {name: (f"MergeBench/{base}_{name}", size) for name, size in zip(names, sizes, strict=True)}


SUITES = {
    "T1": Suite(
        "meta-llama/Llama-3.1-8B",
        {
            name: (OFT_FOLDER.format(name), size)
            for name, size in {
                "magicoder": 0.03,
                "numinamath": 0.05,
                "commonsense": 0.02,
                "socialiqa": 0.015,
                "scienceqa": 0.025,
            }.items()
        },
        "SS(ca+ave,energy)",
        llama,
    ),
    "T2": Suite(
        "meta-llama/Llama-3.2-3B",
        mergebench("Llama-3.2-3B", (0.026, 0.01, 0.015, 0.02, 0.012)),
        "SS(ca+ave,variance).ties",
        llama,
    ),
    "T3": Suite(
        "Qwen/Qwen2.5-VL-7B-Instruct",
        {
            "ocr": ("allenai/olmOCR-2-7B-1025", 0.01),
            "spatial": ("sensenova/SenseNova-SI-1.1-Qwen2.5-VL-7B", 0.013),
            "medical": ("FreedomIntelligence/HuatuoGPT-Vision-7B-Qwen2.5VL", 0.011),
        },
        "lr.ta",
        qwen_vl,
    ),
    "T4": Suite(
        "google/gemma-2-9b",
        mergebench("gemma-2-9b", (0.16, 0.01, 0.05, 0.08, 0.03)),
        "ca+ave",
        gemma,
    ),
}


def oft_expert(base: PreTrainedModel, size: float, seed: int) -> Any:
    """A stand-in for an OFT adapter."""
    config = OFTConfig(oft_block_size=16, target_modules=r".*_proj", use_cayley_neumann=False)
    model = get_peft_model(copy.deepcopy(base), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "oft_R" in name:
                parameter.normal_(std=size / 5)
    return model


def stand_ins(suite: Suite) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A random base of the suite's class, and experts with updates of the suite's sizes."""
    torch.manual_seed(0)
    base = suite.model().to(torch.bfloat16)
    make = oft_expert if "OFT" in next(iter(suite.experts.values()))[0] else make_expert
    return base, {name: make(base, size, i) for i, (name, (_, size)) in enumerate(suite.experts.items())}


def suite_report(suite: Suite) -> MergeReport:
    """The report of a suite's merge on stand-ins, under the suite's names."""
    base, experts = stand_ins(suite)
    config = CoramConfig.from_line(suite.line, lambda_step=GRID)
    report = CoramMerger(base, experts, config, progress=False).merge(keep_update=False).report
    names = {"": suite.base, **{name: source for name, (source, _) in suite.experts.items()}}
    sources = {name: {"source": source, "commit": "0" * 40} for name, source in names.items()}
    reads = ("tokenizer", "chat_template", "processor") if "VL" in suite.base else ("tokenizer",)
    return replace(report, sources=sources, companions=reads)


def quickstart_report() -> MergeReport:
    """The report of the merge that examples/quickstart.py makes."""
    base = make_base()
    sizes = {"math": 0.05, "code": 0.03, "chat": 0.04}
    experts = {name: make_expert(base, size, seed) for seed, (name, size) in enumerate(sizes.items())}
    config = CoramConfig.from_line("SS(ca+ave,variance)")
    return CoramMerger(base, experts, config, progress=False).merge(keep_update=False).report


def write_cards(folder: Path) -> None:
    """Write every example card into a folder."""
    cards = {name: render_card(suite_report(suite)) for name, suite in SUITES.items()}
    cards["quickstart"] = render_card(quickstart_report())
    folder.mkdir(parents=True, exist_ok=True)
    for name, card in cards.items():
        text = card.content
        if name in SUITES:
            text = text.replace(BEGIN, f"{NOTE}\n\n{BEGIN}", 1)
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
        print(f"wrote {folder / name}.md")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_cards(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "model_cards")
