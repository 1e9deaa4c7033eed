"""Internals of accelerate: the hooks with which it places and moves the parameters of modules."""

from __future__ import annotations

import copy
from typing import Any, TypeAlias

from accelerate.hooks import AlignDevicesHook, ModelHook, remove_hook_from_module
from torch import nn
from transformers import PreTrainedModel


def device_hooks(model: nn.Module) -> list[object]:
    """The hooks with which accelerate moves parameters. Relies on `_hf_hook` of a module."""
    return [hook for module in model.modules() if (hook := getattr(module, "_hf_hook", None)) is not None]


Hook: TypeAlias = AlignDevicesHook


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
