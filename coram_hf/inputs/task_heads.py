"""Adapters of classifiers: the head that such an adapter was trained with, over the backbone of the base."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import transformers
from peft import PeftConfig
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.inputs.internals.marks import KEY_PREFIX
from coram_hf.inputs.internals.models import put, without_initialization
from coram_hf.inputs.offloaded import tied_names
from coram_hf.inputs.weights import Weights, backbone_prefix

TASKS = {
    "SEQ_CLS": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "TOKEN_CLS": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "QUESTION_ANS": "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
}
"""Tasks of PEFT with a head of their own, and transformers' classes for them, by config."""


def with_task_head(base: Weights, config: PeftConfig, state: Mapping[str, Tensor]) -> Weights:
    """The base with the kind of head that an adapter was trained with; unchanged if it already has it.

    Its parameters are the base's own; those of the head are zeros, until the adapter replaces them.
    """
    task = str(getattr(config.task_type, "value", config.task_type))
    classes: Any = getattr(transformers, TASKS[task]) if task in TASKS else {}
    cls = classes.get(type(base.model.config), None)
    head = {name: tensor for name, tensor in map(_plain, state.items()) if ".lora_" not in name}
    if cls is None or (isinstance(base.model, cls) and _fits(base.model, head)):
        return base
    widths = {len(tensor) for tensor in head.values() if tensor.ndim > 0} or {2}
    built = (_built(base, cls, labels) for labels in sorted(widths))
    model = next((model for model in built if _fits(model, head)), None)
    return base if model is None else _over(base, model)


def _plain(item: tuple[str, Tensor]) -> tuple[str, Tensor]:
    key, tensor = item
    return key.removeprefix(KEY_PREFIX).replace(".modules_to_save.", ".").replace(".base_layer.", "."), tensor


def _fits(model: PreTrainedModel, head: Mapping[str, Tensor]) -> bool:
    """Whether a model has the parameters that an adapter stores as a whole, in their shapes."""
    own = dict(model.named_parameters())
    return all(name in own and own[name].shape == tensor.shape for name, tensor in head.items())


def _built(base: Weights, cls: type[PreTrainedModel], labels: int) -> PreTrainedModel:
    config = copy.deepcopy(base.model.config)
    config.num_labels = labels
    with torch.device("meta"), without_initialization():
        model = cls(config)
        model.tie_weights()
    return model.eval()


def _over(base: Weights, model: PreTrainedModel) -> Weights:
    """A model over the memory of the base's backbone; what the base lacks is zeros."""
    outer, inner = backbone_prefix(model), backbone_prefix(base.model)
    overrides, fresh, dtype = {}, [], base.model.dtype
    tied = tied_names(model)
    for name, like in list(model.named_parameters()):
        own = inner + name.removeprefix(outer)
        if name.startswith(outer) and own in base:
            put(model, name, base.original(own))
            if own in base.overrides:
                overrides[name] = partial(base.__getitem__, own)
        elif name not in tied:
            put(model, name, torch.zeros(like.shape, dtype=dtype))
            fresh.append(name)
    buffers = {f"{outer}{name.removeprefix(inner)}": b for name, b in base.other_buffers().items()}
    for name, _ in list(model.named_buffers()):
        own = inner + name.removeprefix(outer)
        put(model, name, base[own] if own in base else buffers[name])
    model.name_or_path = base.model.name_or_path
    found = Weights(model, overrides, files=base.files, fresh=fresh)
    found.location, found.commit, found.folder = base.location, base.commit, base.folder
    return found
