"""PEFT adapters as experts: their weights are computed one matrix at a time, and no model is changed.

Adapters are never loaded into the user's base, but into a shadow of it: a second tree of modules over the
same storage. An adapted matrix is then computed from a float32 copy of that one layer, by the layer's own
merge. This works for every PEFT method that can merge into weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from coram_hf.errors import CoramError, reason
from coram_hf.inputs.internals.adapters import (
    forget_adapters,
    has_adapter,
    is_plain_lora,
    is_wrapper,
    lora_factors,
    lora_update,
    oft_rotation,
    rotation_blocks,
    trained_copy,
    tuner_layer,
    tuner_layers,
    wrapped,
)
from coram_hf.inputs.internals.hooks import device_hooks, without_hooks
from coram_hf.inputs.internals.models import put
from coram_hf.inputs.offloaded import loaded_copy, offloaded_tensors
from coram_hf.inputs.oft import is_wide_oft, orthogonality_error, rotated_weight
from coram_hf.inputs.qlora import loaded_quantised, quantised_warning
from coram_hf.inputs.weights import Make, MakeFactors, Weights


def shadow(model: PreTrainedModel, *, hooks: bool = True) -> PreTrainedModel:
    """A copy of the modules over the same storage: layers can be replaced, weights must not be written.

    The hooks of a model that accelerate has placed are shared with it, as they hold what it has offloaded, or
    left out.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    if not hooks:
        return cast(PreTrainedModel, without_hooks(model, memo))
    return copy.deepcopy(model, {**memo, **{id(hook): hook for hook in device_hooks(model)}})


def is_adapted(model: nn.Module) -> bool:
    """Whether PEFT has replaced any of the model's layers."""
    return any(is_wrapper(module) for module in model.modules())


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
    for name, held in list(plain.named_parameters(remove_duplicate=False)):
        if id(held) in restored:
            put(plain, name, restored[id(held)])
    forget_adapters(plain)
    for parameter in plain.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return plain


def open_adapters(who: str, model: PeftModel, base: Weights | None = None) -> dict[str, Weights]:
    """Every adapter of a PeftModel as an expert, by the adapter's name.

    `base` provides the weights that the model itself lacks.
    """
    inner = cast(PreTrainedModel, model.get_base_model())
    held = offloaded_tensors(inner)
    lost = [name for name, tensor in inner.named_parameters() if tensor.is_meta and name not in held]
    if lost:
        raise CoramError(
            f"{who}: tensor {lost[0]!r} has no data, because PEFT put it on the disk with the module that it "
            "adapts; pass the adapter's folder instead"
        )
    plain = without_adapters(inner)
    experts = {}
    found = loaded_quantised(inner)
    for adapter, config in model.peft_config.items():
        require_mergeable(f"{who}, adapter {adapter!r}", config)
        absent = {} if base is None else base.overrides
        changed = dict(_overrides(inner, adapter, absent))
        _probe(f"{who}, adapter {adapter!r}", config, changed)
        experts[adapter] = Weights(
            plain,
            {**absent, **changed},
            warnings=[] if found is None else [quantised_warning(who, inner.name_or_path, found)],
            kind=_method(config),
            adapter=(model, adapter),
            orthogonality_error=_orthogonality(inner, adapter),
            factors=dict(_low_rank(inner, adapter)),
        )
    return experts


def adapted_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules with which PEFT replaced original ones."""
    for name, child in model.named_children():
        if is_wrapper(child):
            yield prefix + name, child
        else:
            yield from adapted_modules(child, f"{prefix}{name}.")


def _innermost(module: nn.Module) -> nn.Module:
    """The module that PEFT wrapped; adapters merged into it stay merged."""
    inner = wrapped(module)
    return module if inner is None else _innermost(inner)


def _original(module: nn.Module) -> nn.Module:
    """The module that PEFT wrapped, with merged adapters unmerged."""
    if any(layer.merged for layer in tuner_layers(module)):
        module = _unmerged(loaded_copy(module))
    inner = wrapped(module)
    return module if inner is None else _original(inner)


def _unmerged(module: nn.Module) -> nn.Module:
    """Unmerge every merged adapter in place, at every level of nesting, and return the module."""
    for layer in tuner_layers(module):
        if layer.merged:
            layer.unmerge()
    return module


def _overrides(model: nn.Module, adapter: str, absent: Mapping[str, Make]) -> Iterator[tuple[str, Make]]:
    """The parameters that an adapter changes, and a function for each; `absent` has those of the base."""
    for name, module in adapted_modules(model):
        trained = trained_copy(module, adapter)
        if trained is not None:
            held = offloaded_tensors(trained, name)
            for key, parameter in trained.named_parameters():
                yield f"{name}.{key}", held.get(key, parameter.detach)
        layer = tuner_layer(module)
        if layer is None or not has_adapter(layer, adapter):
            continue
        for key, _ in _original(layer).named_parameters():
            yield f"{name}.{key}", partial(_merged_parameter, layer, adapter, key, name, absent)


def _merged_parameter(
    layer: nn.Module, adapter: str, key: str, name: str, absent: Mapping[str, Make]
) -> Tensor:
    """A parameter of the wrapped module with one adapter merged, in float32 (float64 for float64 weights).

    PEFT merges into a copy of the layer; the weight of a plain LoRA layer needs none.
    """
    with torch.no_grad():
        if key == "weight" and _is_bare_lora(layer, adapter):
            dtype = _wide(layer)
            base = absent.get(f"{name}.weight", _innermost(layer).get_parameter(key).detach)()
            return base.to(dtype) + lora_update(layer, adapter, dtype)
        clone = loaded_copy(layer)
        inner = _innermost(clone)
        for own, _ in list(inner.named_parameters()):
            if f"{name}.{own}" in absent:
                put(inner, own, absent[f"{name}.{own}"]())
        if is_wide_oft(clone):
            return rotated_weight(clone, adapter, key)
        _unmerged(clone)
        for part in tuner_layers(clone.to(_wide(clone))):
            part.merge(adapter_names=[adapter])
        return _innermost(clone).get_parameter(key).detach()


def _is_bare_lora(layer: nn.Module, adapter: str) -> bool:
    """Whether a layer is plain LoRA, with nothing merged into it, and in memory."""
    merged = any(part.merged for part in tuner_layers(layer))
    return is_plain_lora(layer, adapter) and not merged and not offloaded_tensors(layer)


def _wide(layer: nn.Module) -> torch.dtype:
    """float64 for a layer with float64 parameters, otherwise float32."""
    return torch.float64 if any(p.dtype == torch.float64 for p in layer.parameters()) else torch.float32


def _low_rank(model: nn.Module, adapter: str) -> Iterator[tuple[str, MakeFactors]]:
    """The parameters to which an adapter adds an update of low rank, and a function for its factors."""
    for name, module in adapted_modules(model):
        layer = tuner_layer(module)
        if layer is not None and is_plain_lora(layer, adapter):
            yield f"{name}.weight", partial(lora_factors, layer, adapter)


def _method(config: PeftConfig) -> str:
    """The PEFT method of an adapter, such as LORA."""
    return str(getattr(config.peft_type, "value", config.peft_type))


def require_mergeable(who: str, config: PeftConfig) -> None:
    """Raise for PEFT methods that do not change weights."""
    if config.is_prompt_learning or _method(config) == "ADAPTION_PROMPT":
        raise CoramError(
            f"{who} is a {_method(config)} adapter, which adds virtual tokens or prompts and does not change "
            "weights: there is nothing to merge; use LoRA, OFT or another method that merges into weights"
        )


def _probe(who: str, config: PeftConfig, overrides: dict[str, Callable[[], Tensor]]) -> None:
    """Compute one adapted weight, so that a method that cannot merge fails before the merge starts."""
    if not overrides:
        raise CoramError(f"{who} changes no weight of the model; check its target_modules")
    try:
        next(iter(overrides.values()))()
    except Exception as error:
        raise CoramError(
            f"{who} is a {_method(config)} adapter that PEFT cannot merge into weights ({reason(error)})"
        ) from error


def _orthogonality(model: nn.Module, adapter: str) -> float | None:
    """max |R^T R - I| over the rotations of an OFT adapter, as PEFT computes them; None for other methods."""
    rotations = (oft_rotation(layer, adapter) for _, layer in adapted_modules(model))
    errors = [
        orthogonality_error(rotation_blocks(loaded_copy(found))) for found in rotations if found is not None
    ]
    return max(errors, default=None)
