"""GGUF files as sources, read and dequantised by transformers; the whole model is then in memory."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from coram_hf.errors import CoramError, reason
from coram_hf.inputs.locate import is_gguf
from coram_hf.inputs.weights import Weights


def open_gguf(who: str, path: Path) -> Weights:
    """The weights of a GGUF file, in float32."""
    if find_spec("gguf") is None:
        raise CoramError(f"{who}: reading {path.name} needs the package gguf; run: pip install gguf")
    try:
        model = dense_model(path)
    except Exception as error:  # damaged files and unknown architectures fail in many ways
        raise CoramError(f"{who}: transformers cannot read the GGUF file {path} ({reason(error)})") from error
    warning = (
        f"{who} is read from the GGUF file {path.name} and dequantised to float32: its quantisation "
        "errors count as part of its weights"
    )
    return Weights(model, files=[path], warnings=[warning])


def dense_model(path: Path) -> PreTrainedModel:
    """The model of a GGUF file with plain float32 weights.

    What transformers loads from such a file counts as quantised and cannot be saved, so its weights are put
    into a model made from its config.
    """
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    loaded = AutoModelForCausalLM.from_pretrained(
        path.parent,
        config=copy.deepcopy(config),
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    with init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model.eval()


def gguf_tokenizer(weights: Weights) -> PreTrainedTokenizerBase | None:
    """The tokenizer inside the GGUF file that weights were read from, if it has one."""
    if len(weights.files) != 1 or not is_gguf(weights.files[0]):
        return None
    path = weights.files[0]
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        return found
    except Exception:  # many files have no tokenizer, or one that transformers cannot build
        return None
