"""Internals of peft: wrapped layers, and the factors and rotations in them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
from peft import PeftConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.oft.layer import Linear as OFTLinear
from peft.tuners.oft.layer import OFTLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

# peft: wrapped layers


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is PEFT's replacement of an original one. Relies on AuxiliaryTrainingWrapper."""
    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def wrapped(module: Any) -> nn.Module | None:
    """The module that a PEFT module directly wraps; None for an original module.

    Relies on `original_module` (modules_to_save), `token_adapter` (trainable tokens) and `base_layer`.
    """
    if isinstance(module, ModulesToSaveWrapper):
        return module.original_module
    if isinstance(module, AuxiliaryTrainingWrapper):
        return cast(Any, module).token_adapter
    return cast(Any, module).base_layer if isinstance(module, BaseTunerLayer) else None


def trained_copy(module: nn.Module, adapter: str) -> nn.Module | None:
    """The full copy of a module that an adapter has trained, if any. Relies on `modules_to_save`."""
    copies = module.modules_to_save.items() if isinstance(module, ModulesToSaveWrapper) else ()
    return dict(copies).get(adapter)


def tuner_layer(module: nn.Module) -> Any:
    """The layer of a wrapper that merges adapters; None for a wrapper of trained copies.

    Relies on `token_adapter` of the wrapper for trainable tokens.
    """
    if isinstance(module, BaseTunerLayer):
        return module
    return None if isinstance(module, ModulesToSaveWrapper) else cast(Any, module).token_adapter


def tuner_layers(layer: nn.Module | None) -> Iterator[Any]:
    """A layer that merges adapters and those nested in it, outermost first. Relies on BaseTunerLayer."""
    while isinstance(layer, BaseTunerLayer):
        yield layer
        layer = wrapped(layer)


def has_adapter(layer: nn.Module, adapter: str) -> bool:
    """Whether an adapter has parameters in a layer or inside it. Relies on `adapter_layer_names`."""
    parts = [module for module in layer.modules() if isinstance(module, BaseTunerLayer)]
    return any(adapter in getattr(part, key, ()) for part in parts for key in part.adapter_layer_names)


def forget_adapters(model: PreTrainedModel) -> None:
    """Clear transformers' record of a model's adapters. Relies on `_hf_peft_config_loaded`."""
    model._hf_peft_config_loaded = False
    model.__dict__.pop("peft_config", None)


def parameter_mark(config: PeftConfig) -> str:
    """The prefix of a PEFT method's parameter names, such as lora_. Relies on peft.mapping."""
    return PEFT_TYPE_TO_PREFIX_MAPPING.get(PeftType(config.peft_type), "")


# peft: LoRA


def is_plain_lora(layer: nn.Module, adapter: str) -> bool:
    """Whether an adapter adds B A to a linear layer, unlike variants such as DoRA, and nested layers.

    Relies on peft.tuners.lora.layer and on `lora_variant`.
    """
    known = type(layer) is LoraLinear and adapter in layer.lora_A and adapter not in layer.lora_variant
    return known and not isinstance(wrapped(layer), BaseTunerLayer)


def lora_factors(layer: Any, adapter: str) -> tuple[Tensor, Tensor]:
    """B (outputs x r), scaled, and A (r x inputs) of a plain LoRA layer, in float64. Relies on `scaling`."""
    B, A = (part[adapter].weight.detach().double() for part in (layer.lora_B, layer.lora_A))
    return B * layer.scaling[adapter], A


def lora_update(layer: Any, adapter: str, dtype: torch.dtype) -> Tensor:
    """What PEFT adds to the weight of a plain LoRA layer, bit for bit. Relies on `fan_in_fan_out`."""
    B, A = (part[adapter].weight.detach().to(dtype) for part in (layer.lora_B, layer.lora_A))
    update = B @ A
    return (update.mT if layer.fan_in_fan_out else update) * layer.scaling[adapter]


# peft: OFT


def is_oft_linear(layer: nn.Module) -> bool:
    """Whether a layer is an OFT layer around a linear one. Relies on peft.tuners.oft.layer."""
    return isinstance(layer, OFTLinear)


def oft_rotation(layer: nn.Module, adapter: str) -> nn.Module | None:
    """The rotation of an OFT adapter for a layer, if any. Relies on `oft_R`."""
    rotations = layer.oft_R.items() if isinstance(layer, OFTLayer) else ()
    return dict(rotations).get(adapter)


def rotation_blocks(rotation: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    """R of every block (blocks, b, b), as the adapter's own layer computes it.

    Relies on `_project_batch` and `_cayley_batch` of an OFTRotationModule, and on its settings.
    """
    clone: Any = copy.deepcopy(rotation).to(dtype)
    with torch.no_grad():
        generator = clone._project_batch(clone.weight, eps=clone.eps) if clone.coft else clone.weight
        return clone._cayley_batch(
            generator, clone.block_size, clone.use_cayley_neumann, clone.num_cayley_neumann_terms
        )
