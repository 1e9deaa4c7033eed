"""All uses of transformers, peft and accelerate beyond their documented interfaces.

Tested with transformers 5.22.2, peft 0.21.2, accelerate 1.15.0 and torch 2.13.0, and with the lower bounds of
pyproject.toml: transformers 5.6.0, peft 0.21.0, accelerate 1.1.0. Each function names what it relies on, so
only this file needs review after an upgrade.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, remove_hook_from_module
from peft import PeftConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.oft.layer import Linear as OFTLinear
from peft.tuners.oft.layer import OFTLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.initialization import no_init_weights

KEY_PREFIX = "base_model.model."
"""The prefix of module names in PEFT's adapter files."""


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace one parameter or buffer of a model.

    Relies on `nn.Module.__setattr__` to keep the order of names and the persistence of buffers.
    """
    owner, _, key = name.rpartition(".")
    holder = model.get_submodule(owner)
    if isinstance(getattr(holder, key), nn.Parameter) and not isinstance(tensor, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=False)
    setattr(holder, key, tensor)


# transformers: building models


def without_initialization() -> AbstractContextManager[None]:
    """Build models without initialising their weights. Relies on transformers.initialization."""
    return no_init_weights()


def custom_class(reference: str, folder: str) -> type[PreTrainedModel]:
    """The class `module.Name` in a folder's custom code. Relies on transformers.dynamic_module_utils."""
    return cast(type[PreTrainedModel], get_class_from_dynamic_module(reference, folder))


def hub_commit(model: PreTrainedModel) -> str | None:
    """The commit that a model was loaded from. Relies on `config._commit_hash`."""
    return getattr(model.config, "_commit_hash", None)


# transformers: names and shapes on disk


@dataclass(frozen=True)
class Conversion:
    """Parameters that transformers builds from several tensors on disk, such as stacked experts.

    Relies on `add_tensor` and `convert` of a WeightConverter, which collects tensors: each run uses a copy.
    """

    model: PreTrainedModel
    target: str
    converter: WeightConverter
    patterns: Mapping[str, str]

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters by name, from the tensors by their keys on disk; meta tensors give meta tensors."""
        fresh: Any = copy.deepcopy(self.converter)
        for key, pattern in self.patterns.items():
            fresh.add_tensor(self.target, key, pattern, tensors[key])
        made = fresh.convert(self.target, model=self.model, config=self.model.config)
        return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}


class DiskNames(NamedTuple):
    """How the tensors of a checkpoint become a model's parameters.

    keys: the key on disk of each parameter that is stored unchanged. unexpected: keys without a parameter.
    """

    keys: dict[str, str]
    conversions: list[Conversion]
    unexpected: list[str]


def disk_names(model: PreTrainedModel, keys: Iterable[str]) -> DiskNames:
    """Match a checkpoint's keys with the model's names by the tables of `from_pretrained`.

    The entries used are stored in the model, so that it is saved in its original layout. Relies
    on conversion_mapping, core_model_loading, `_weight_conversions` and `_keys_to_ignore_on_load_unexpected`.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    plain: dict[str, str] = {}
    converted: dict[str, dict[str, str]] = {}
    unexpected = []
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        if name not in known:
            unexpected.append(key)
        elif pattern is None:
            plain[name] = key
        else:
            converted.setdefault(name, {})[key] = pattern
    conversions = [
        Conversion(model, name, by_pattern[next(iter(patterns.values()))], patterns)
        for name, patterns in converted.items()
    ]
    cast(Any, model)._weight_conversions = [entry for entry in mapping if entry.was_used()]
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    unexpected = [key for key in unexpected if not any(re.search(pattern, key) for pattern in ignored)]
    return DiskNames(plain, conversions, unexpected)


def to_disk(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters under the names and in the shapes that `save_pretrained` gives them.

    Relies on core_model_loading; a tensor that is only renamed stays the same object.
    """
    return cast(dict[str, Tensor], revert_weight_conversion(model, dict(tensors)))


def saved_together(model: PreTrainedModel, names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group parameters that `save_pretrained` converts together.

    Relies on `_weight_conversions`, conversion_mapping and core_model_loading.
    """
    conversions: Any = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    reverse = [entry.reverse_transform() for entry in reversed(conversions)]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        on_disk, pattern = rename_source_key(name, [], converters)
        groups.setdefault(name if pattern is None else on_disk, []).append(name)
    return [tuple(group) for group in groups.values()]


def not_saved(model: PreTrainedModel) -> Collection[str]:
    """Names that `save_pretrained` leaves out. Relies on `_keys_to_ignore_on_save`."""
    return model._keys_to_ignore_on_save or ()


def tied_on_load(model: PreTrainedModel) -> Mapping[str, str]:
    """Names that `from_pretrained` fills, and from which others. Relies on `all_tied_weights_keys`."""
    return cast(Mapping[str, str], model.all_tied_weights_keys)


# accelerate


def device_hooks(model: nn.Module) -> list[object]:
    """The hooks with which accelerate moves parameters. Relies on `_hf_hook` of a module."""
    return [hook for module in model.modules() if (hook := getattr(module, "_hf_hook", None)) is not None]


Hook = AlignDevicesHook


def align_hook(module: nn.Module) -> Hook | None:
    """The hook that places a module, if any. Relies on `_hf_hook`, and on `hooks` of a SequentialHook."""
    hook = getattr(module, "_hf_hook", None)
    found = [part for part in getattr(hook, "hooks", (hook,)) if isinstance(part, AlignDevicesHook)]
    return next((part for part in found if part.offload), found[0] if found else None)


def without_hooks(model: nn.Module, memo: dict[int, Any] | None = None) -> Any:
    """A copy of a module without hooks; `memo` is that of `copy.deepcopy`. Relies on accelerate.hooks."""
    bare: dict[int, Any] = {id(hook): ModelHook() for hook in device_hooks(model)}
    made = copy.deepcopy(model, {**bare, **(memo or {})})
    made.__dict__.pop("hf_device_map", None)
    return remove_hook_from_module(made, recurse=True) if bare else made


def unsplit_classes(model: PreTrainedModel) -> list[str]:
    """The classes of modules that stay on one device. Relies on `_no_split_modules`."""
    return list(model._no_split_modules or ())


def skipped_keys(model: PreTrainedModel) -> Any:
    """Arguments that hooks do not move. Relies on `_skip_keys_device_placement`."""
    return model._skip_keys_device_placement


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
