"""Internals of transformers: building models, and their names and shapes on disk."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

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
