"""The heads of experts beside a merged backbone: one folder each, which loads with the expert's class."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from coram_hf.errors import CoramError
from coram_hf.inputs.heads import Head
from coram_hf.inputs.inputs import Inputs
from coram_hf.inputs.internals.models import put
from coram_hf.inputs.kinds import head_names
from coram_hf.inputs.offloaded import tied_names
from coram_hf.inputs.weights import backbone_prefix
from coram_hf.outputs.layout import without_data

FOLDER, HEAD = "heads", "head.safetensors"
NOT_OF_HEADS = (
    "config.json",
    "generation_config.json",
    SAFE_WEIGHTS_INDEX_NAME,
    "README.md",
    "coram_report.json",
)
"""Files of the backbone that a head does not share."""


def save_heads(inputs: Inputs, folder: Path) -> None:
    """Write `heads/NAME` for every kept head; the backbone's files are linked, not written again."""
    weights = sorted(folder.glob("*.safetensors")) if inputs.heads else []
    others = [path for path in folder.iterdir() if path.is_file() and path.name not in NOT_OF_HEADS]
    for name, head in inputs.heads.items():
        place = folder / FOLDER / folder_name(name, inputs.heads)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in _tensors(head, inputs).items()}
        prefix, known = backbone_prefix(head.weights.model), head.weights.model.state_dict()
        own = {key.removeprefix(prefix) for key in tensors}
        own |= {key for key in head_names(inputs.model) if f"{prefix}{key}" not in known}
        index: dict[str, str] = {}
        for number, path in enumerate(weights, start=1):
            linked = f"backbone-{number:05d}.safetensors"
            index |= dict.fromkeys(_link(path, place / linked, own), linked)
        save_file(tensors, place / HEAD, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, HEAD)
        text = json.dumps({"metadata": {}, "weight_map": dict(sorted(index.items()))}, indent=2)
        (place / SAFE_WEIGHTS_INDEX_NAME).write_text(text + "\n", encoding="utf-8")
        config = copy.deepcopy(head.config)
        config.architectures = [head.model_class.__name__]
        _fit(config, inputs)
        config.save_pretrained(place)
        for path in others:
            if path.suffix != ".safetensors":
                shutil.copyfile(path, place / path.name)


def _link(path: Path, place: Path, without: set[str]) -> list[str]:
    """Link a file, or copy it where the disk has no links; returns the names of its tensors.

    A file with tensors that the head replaces or does not use, such as a pooler, is copied without them.
    """
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        if without.intersection(names):
            kept = {name: file.get_tensor(name) for name in names if name not in without}
            save_file(kept, place, metadata={"format": "pt"})
            return list(kept)
    try:
        os.link(path, place)
    except OSError:
        shutil.copyfile(path, place)
    return names


def folder_name(name: str, heads: Mapping[str, Head]) -> str:
    """The name of an expert as a folder name."""
    safe = {other: re.sub(r"[^\w.-]+", "_", other).strip(".") or "expert" for other in heads}
    twice = list(safe.values()).count(safe[name]) > 1
    return f"{safe[name]}-{list(heads).index(name) + 1}" if twice else safe[name]


def with_head(model: PreTrainedModel, inputs: Inputs, name: str) -> PreTrainedModel:
    """The merged backbone with the head of one expert, as a model of the expert's class.

    It shares the backbone's memory with the merged model.
    """
    if name not in inputs.heads:
        raise CoramError(f"no head of {name!r} was kept, found {list(inputs.heads)}; merge with heads='keep'")
    head = inputs.heads[name]
    found, prefix = without_data(head.weights.model), backbone_prefix(head.weights.model)
    merged = {f"{prefix}{key}": tensor for key, tensor in model.state_dict().items()}
    merged |= _tensors(head, inputs)
    tied = tied_names(found)
    for key, like in found.state_dict().items():
        tensor = merged.get(tied.get(key, key))
        put(found, key, torch.zeros_like(like, device=model.device) if tensor is None else tensor)
    for key, buffer in head.weights.other_buffers().items():
        put(found, key, buffer.to(model.device))
    _fit(found.config, inputs)
    return found.eval()


def _tensors(head: Head, inputs: Inputs) -> dict[str, Tensor]:
    """The parameters of a head, in the dtype of the result if one was asked for."""
    found, dtype = head.tensors(), inputs.dtype
    return {n: t if dtype is None or not t.is_floating_point() else t.to(dtype) for n, t in found.items()}


def _fit(config: PreTrainedConfig, inputs: Inputs) -> None:
    """Give an expert's config what the merged backbone has: its vocabulary, and its dtype if asked for."""
    if inputs.new_size is not None:
        config.get_text_config().vocab_size = inputs.new_size
    if inputs.dtype is not None:
        config.dtype = inputs.dtype
