"""Models offloaded by accelerate: hooks hold their parameters in CPU memory or on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

import torch
from accelerate.utils import align_module_device, has_offloaded_params
from torch import Tensor, nn
from transformers import PreTrainedModel

from coram_hf.inputs.internals import without_initialization


def is_offloaded(model: nn.Module) -> bool:
    """Whether hooks of accelerate, not the modules, hold some of the parameters."""
    return bool(offloaded_tensors(model))


def offloaded_tensors(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """The parameters and buffers held by hooks, as functions that read one each."""
    found: dict[str, Callable[[], Tensor]] = {}
    for prefix, module in model.named_modules():
        if not has_offloaded_params(module):
            continue
        held = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for key, tensor in held:
            if tensor.is_meta:
                found[f"{prefix}.{key}".lstrip(".")] = partial(_read, module, key)
    return found


_aligning = threading.Lock()


def _read(module: nn.Module, key: str) -> Tensor:
    """A copy of a tensor that a hook loads into its module only while in use."""
    with _aligning, align_module_device(module, execution_device=torch.device("cpu")):
        tensor: Tensor = getattr(module, key)
        return tensor.detach().clone()


def materialized(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """A model of the same class in CPU memory, without hooks, filled with the given weights."""
    with without_initialization():
        whole = type(model)(model.config)
    state = whole.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in weights.items():
            state[name].data = tensor.to("cpu", copy=True)
    whole.tie_weights()
    if model.can_generate():
        whole.generation_config = model.generation_config
    whole.name_or_path = model.name_or_path
    return whole.train(model.training)
