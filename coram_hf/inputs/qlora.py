"""Adapters that were trained on a quantised base, and so also compensate for its quantisation errors."""

from __future__ import annotations

import re
from pathlib import Path

from peft import PeftConfig
from transformers import PreTrainedModel

from coram_hf.errors import CoramError
from coram_hf.inputs.files import read_json
from coram_hf.inputs.quantized import scheme

CARD = re.compile(r"The following `([\w-]+)` quantization config was used during training")
"""What PEFT writes on the card of an adapter."""
NAMES = re.compile(r"(?i)(?<![a-z0-9])(bnb|gptq|awq|aqlm|hqq|fp8|nf4|int[48]|[48]-?bit)(?![a-z0-9])")
"""Words in the names of quantised models."""


def trained_quantised(folder: Path, config: PeftConfig) -> str | None:
    """The quantisation of the base that an adapter was trained on, if its files show one."""
    base = config.base_model_name_or_path or ""
    card = folder / "README.md"
    found = CARD.search(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    if found is not None:
        return found[1]
    if getattr(config, "init_lora_weights", None) == "loftq":
        return "loftq"
    stored = Path(base) / "config.json"
    if base and stored.is_file():
        return _stored_scheme(stored)
    named = NAMES.search(base.rpartition("/")[2])
    return named[1].lower() if named else None


def _stored_scheme(path: Path) -> str | None:
    try:
        content = read_json(path)
    except CoramError:
        return None
    return scheme(content.get("quantization_config")) if isinstance(content, dict) else None


def quantised_warning(who: str, base: str | None, found: str) -> str:
    """The warning about an adapter of a quantised base, which names that base."""
    name = base or "a model"
    shown = Path(name).name if name.startswith(("/", "~", ".")) else name
    return (
        f"{who} is an adapter that was trained on a quantised base, {shown!r} ({found}): it also "
        "compensates for quantisation errors, which the base of this merge does not have; compare the merge "
        "with one into the dequantised training base"
    )


def loaded_quantised(model: PreTrainedModel) -> str | None:
    """The quantisation of a model in memory, as it was when its adapter was trained or loaded."""
    return scheme(getattr(model.config, "quantization_config", None))
