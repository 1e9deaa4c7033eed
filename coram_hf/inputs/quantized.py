"""Detect quantised models, and dequantise them if transformers can, else raise."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from coram_hf.errors import CoramError, reason


def dequantized(who: str, model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or a dequantised copy if its weights are quantised."""
    found = scheme(getattr(model.config, "quantization_config", None))
    if getattr(model, "hf_quantizer", None) is None and found is None:
        return model
    try:
        return copy.deepcopy(model).dequantize()
    except (ValueError, NotImplementedError, AttributeError, ImportError, RuntimeError) as error:
        raise CoramError(
            f"{who} is quantised ({found or 'unknown scheme'}) and transformers cannot dequantise it here "
            f"({reason(error)}); merge the unquantised checkpoint"
        ) from error


def stored_quantized(model: PreTrainedModel) -> str | None:
    """The quantisation scheme of a model's checkpoint, even if the model itself has been dequantised."""
    path = Path(model.name_or_path or "") / "config.json"
    if not model.name_or_path or not path.is_file():
        return None
    return scheme(json.loads(path.read_text(encoding="utf-8")).get("quantization_config"))


def scheme(config: Any) -> str | None:
    """The name of a quantization config's scheme, such as bitsandbytes."""
    if config is None:
        return None
    values = config if isinstance(config, dict) else config.to_dict()
    return str(values.get("quant_method", "unknown scheme"))
