"""PEFT adapters as experts: their weights are made one matrix at a time, and no model is changed.

Adapters are never loaded into the user's base. A shadow of it, a second tree of modules over the same
storage, takes their layers; an adapted matrix is then made from a float32 copy of that one layer, by the
layer's own merge. This serves every PEFT method that can merge into weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.oft import OFTLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from coram_hf.errors import CoramError, reason
from coram_hf.inputs.offloaded import is_offloaded
from coram_hf.inputs.oft import (
    is_wide_oft,
    orthogonality_error,
    rotated_weight,
    rotation_blocks,
)
from coram_hf.inputs.weights import Make, Weights


def shadow(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules over the same storage: layers can be replaced, weights must not be written."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def is_adapted(model: nn.Module) -> bool:
    """Whether PEFT has put layers of its own into the model."""
    return any(isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper) for m in model.modules())


def without_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it was before PEFT changed it: itself, or a shadow with the original layers in place."""
    if not is_adapted(model):
        return model
    plain = shadow(model)
    restored: dict[int, nn.Parameter] = {}
    for name, module in list(adapted_modules(plain)):
        parent, _, child = name.rpartition(".")
        original = _original(module)
        inner = dict(_innermost(module).named_parameters())
        for key, parameter in list(original.named_parameters()):
            put(original, key, restored.setdefault(id(inner[key]), parameter))
        setattr(plain.get_submodule(parent), child, original)
    for module in plain.modules():
        for key, held in module._parameters.items():
            module._parameters[key] = restored.get(id(held), held)
    plain._hf_peft_config_loaded = False
    plain.__dict__.pop("peft_config", None)
    for parameter in plain.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return plain


def open_adapters(who: str, model: PeftModel, base: Weights | None = None) -> dict[str, Weights]:
    """Every adapter of a PeftModel as an expert, by the adapter's name.

    `base` has the weights that the model itself lacks.
    """
    inner = cast(PreTrainedModel, model.get_base_model())
    if is_offloaded(inner):
        raise CoramError(f"{who}: adapters over an offloaded model; pass the adapter's folder in its place")
    plain = without_adapters(inner)
    experts = {}
    for adapter, config in model.peft_config.items():
        require_mergeable(f"{who}, adapter {adapter!r}", config)
        absent = {} if base is None else base.overrides
        changed = dict(_overrides(inner, adapter, absent))
        _probe(f"{who}, adapter {adapter!r}", config, changed)
        experts[adapter] = Weights(
            plain,
            {**absent, **changed},
            kind=_method(config),
            adapter=(model, adapter),
            orthogonality_error=_orthogonality(inner, adapter),
        )
    return experts


def adapted_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that PEFT put in place of original ones."""
    for name, child in model.named_children():
        if isinstance(child, BaseTunerLayer | AuxiliaryTrainingWrapper):
            yield prefix + name, child
        else:
            yield from adapted_modules(child, f"{prefix}{name}.")


def has_adapter(layer: nn.Module, adapter: str) -> bool:
    """Whether a layer of PEFT's, or one that it wraps, has parameters of an adapter."""
    chain = [m for m in layer.modules() if isinstance(m, BaseTunerLayer)]
    return any(adapter in getattr(part, key, ()) for part in chain for key in part.adapter_layer_names)


def _wrapped(module: Any) -> nn.Module | None:
    """What a module of PEFT's has put itself around; None for an original one."""
    if isinstance(module, ModulesToSaveWrapper):
        return module.original_module
    if isinstance(module, AuxiliaryTrainingWrapper):
        return cast(Any, module).token_adapter
    return cast(Any, module).base_layer if isinstance(module, BaseTunerLayer) else None


def _innermost(module: nn.Module) -> nn.Module:
    """The module that PEFT wrapped, in whatever state it is."""
    inner = _wrapped(module)
    return module if inner is None else _innermost(inner)


def _original(module: nn.Module) -> nn.Module:
    """The module that PEFT wrapped, with merged adapters taken out again."""
    if isinstance(module, BaseTunerLayer) and _is_merged(module):
        module = _unmerged(copy.deepcopy(module))
    inner = _wrapped(module)
    return module if inner is None else _original(inner)


def _is_merged(layer: nn.Module | None) -> bool:
    return isinstance(layer, BaseTunerLayer) and (bool(layer.merged) or _is_merged(_wrapped(layer)))


def _unmerged(layer: nn.Module) -> nn.Module:
    """The layer with all merged adapters taken out, in place, at every level of nesting."""
    part: Any = layer
    while isinstance(part, BaseTunerLayer):
        if part.merged:
            part.unmerge()
        part = _wrapped(part)
    return layer


def _overrides(model: nn.Module, adapter: str, absent: Mapping[str, Make]) -> Iterator[tuple[str, Make]]:
    """Parameter names that an adapter changes, and how to make their weights; `absent` makes the base's."""
    for name, module in adapted_modules(model):
        if isinstance(module, ModulesToSaveWrapper):
            trained = module.modules_to_save
            if adapter in trained:
                for key, parameter in trained[adapter].named_parameters():
                    yield f"{name}.{key}", parameter.detach
            continue
        layer: Any = module if isinstance(module, BaseTunerLayer) else module.token_adapter
        if has_adapter(layer, adapter):
            for key, _ in _original(layer).named_parameters():
                if is_wide_oft(layer):
                    yield f"{name}.{key}", partial(rotated_weight, layer, adapter, key)
                else:
                    yield f"{name}.{key}", partial(_merged_parameter, layer, adapter, key, name, absent)


def _merged_parameter(layer: Any, adapter: str, key: str, name: str, absent: Mapping[str, Make]) -> Tensor:
    """A parameter of the wrapped module with one adapter merged, in float32 (float64 for float64 weights)."""
    with torch.no_grad():
        clone = copy.deepcopy(layer)
        for own, _ in list(_innermost(clone).named_parameters()):
            if f"{name}.{own}" in absent:
                put(_innermost(clone), own, absent[f"{name}.{own}"]())
        _unmerged(clone)
        wide = any(p.dtype == torch.float64 for p in clone.parameters())
        part: Any = clone.double() if wide else clone.float()
        while isinstance(part, BaseTunerLayer):
            part.merge(adapter_names=[adapter])
            part = cast(Any, part).base_layer
        return cast(nn.Module, part).get_parameter(key).detach()


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Give a module another tensor for one of its parameters."""
    owner, _, key = name.rpartition(".")
    parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
    model.get_submodule(owner)._parameters[key] = parameter


def _method(config: PeftConfig) -> str:
    """The PEFT method of an adapter, such as LORA."""
    return str(getattr(config.peft_type, "value", config.peft_type))


def require_mergeable(who: str, config: PeftConfig) -> None:
    """Refuse methods that change no weights."""
    if config.is_prompt_learning or _method(config) == "ADAPTION_PROMPT":
        raise CoramError(
            f"{who} is a {_method(config)} adapter, which adds virtual tokens or prompts and does not change "
            "weights: there is nothing to merge; use LoRA, OFT or another method that merges into weights"
        )


def _probe(who: str, config: PeftConfig, overrides: dict[str, Callable[[], Tensor]]) -> None:
    """Make one adapted weight, to learn before merging whether the method can."""
    if not overrides:
        raise CoramError(f"{who} changes no weight of the model")
    try:
        next(iter(overrides.values()))()
    except Exception as error:
        raise CoramError(
            f"{who} is a {_method(config)} adapter that PEFT cannot merge into weights ({reason(error)})"
        ) from error


def _orthogonality(model: nn.Module, adapter: str) -> float | None:
    """max |R^T R - I| over the rotations of an OFT adapter, as it makes them itself; None for others."""
    worst = None
    for _, layer in adapted_modules(model):
        if isinstance(layer, OFTLayer) and has_adapter(layer, adapter):
            rotation: Any = layer.oft_R[adapter]
            worst = max(worst or 0.0, orthogonality_error(rotation_blocks(rotation)))
    return worst
