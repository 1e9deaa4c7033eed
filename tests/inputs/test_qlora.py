"""Adapters of quantised bases get a warning that names the base."""

import json

import pytest
from helpers.adapters import adapted
from helpers.models import tiny_llama
from peft import LoraConfig

from coram_hf import CoramMerger

CARD = """---
library_name: peft
---
## Training procedure

The following `bitsandbytes` quantization config was used during training:
- quant_method: bitsandbytes
- load_in_4bit: True
"""


@pytest.fixture
def lora(tmp_path):
    """An adapter folder, and a function that changes its config."""
    adapted(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]), 1).save_pretrained(tmp_path / "lora")

    def change(**values):
        path = tmp_path / "lora" / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return tmp_path / "lora"

    return change


def warnings_of(folder):
    return CoramMerger(tiny_llama(), {"chat": folder}).inspect().warnings


@pytest.mark.parametrize(
    ("base", "scheme"),
    [
        ("unsloth/llama-3-8b-bnb-4bit", "bnb"),
        ("TheBloke/Llama-2-7B-GPTQ", "gptq"),
        ("org/model-AWQ", "awq"),
        ("org/Model-8bit", "8bit"),
        ("org/model-FP8", "fp8"),
    ],
)
def test_the_name_of_the_base_tells(lora, base, scheme):
    found = [w for w in warnings_of(lora(base_model_name_or_path=base)) if "quantised" in w]
    assert len(found) == 1
    assert (
        f"expert 'chat' is an adapter that was trained on a quantised base, {base!r} ({scheme})" in found[0]
    )


@pytest.mark.parametrize("base", ["meta-llama/Llama-3-8B", "org/habit-7b", "org/rabbit8bits", None])
def test_other_names_tell_nothing(lora, base):
    assert not any("quantised" in warning for warning in warnings_of(lora(base_model_name_or_path=base)))


def test_the_card_of_peft_tells(lora):
    folder = lora(base_model_name_or_path="org/base")
    (folder / "README.md").write_text(CARD)
    assert any("'org/base' (bitsandbytes)" in warning for warning in warnings_of(folder))


def test_the_config_of_a_local_base_tells(lora, tmp_path):
    (tmp_path / "secret" / "four").mkdir(parents=True)
    config = {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "secret" / "four" / "config.json").write_text(json.dumps(config))
    found = [
        w
        for w in warnings_of(lora(base_model_name_or_path=str(tmp_path / "secret" / "four")))
        if "quant" in w
    ]
    assert "'four' (bitsandbytes)" in found[0]
    assert "secret" not in found[0]
    (tmp_path / "secret" / "four" / "config.json").write_text("{")
    damaged = lora(base_model_name_or_path=str(tmp_path / "secret" / "four"))
    assert not any("quantised" in warning for warning in warnings_of(damaged))
