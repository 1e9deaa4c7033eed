"""Models offloaded by accelerate: hooks hold their parameters in CPU memory or on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from coram_hf.errors import CoramError
from coram_hf.inputs.internals.hooks import Hook, align_hook, without_hooks
from coram_hf.inputs.internals.models import put, tied_on_load


def offloaded_tensors(model: nn.Module, path: str = "") -> dict[str, Callable[[], Tensor]]:
    """The parameters and buffers held by hooks, as functions that read one each.

    `path`: where a part of a model is, for messages.
    """
    found: dict[str, Callable[[], Tensor]] = {}
    for prefix, module in model.named_modules():
        hook = align_hook(module)
        if hook is None or not hook.offload:
            continue
        held = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for key, tensor in held:
            if tensor.is_meta:
                name = f"{prefix}.{key}".lstrip(".")
                found[name] = partial(_read, hook, key, f"{path}.{name}".lstrip("."))
    return found


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """The other names of tied parameters, and the first name of each.

    Hooks leave a tensor of its own under every name of an offloaded parameter, so transformers is asked.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    tied = {name: first.setdefault(id(parameter), name) for name, parameter in every.items()}
    offloaded = offloaded_tensors(model)
    for alias, source in tied_on_load(model).items():
        if {alias, source} <= every.keys() and {alias, source} & offloaded.keys():
            names = {tied[alias], tied[source]}
            canonical = next(name for name in every if name in names)
            tied |= {name: canonical for name, found in tied.items() if found in names}
    return {name: found for name, found in tied.items() if found != name}


def _read(hook: Hook, key: str, name: str) -> Tensor:
    """A tensor that a hook loads into its module only while in use; it must not be written."""
    try:
        tensor: Tensor = hook.weights_map[key]
    except KeyError:
        raise CoramError(
            f"tensor {name!r} is offloaded, but the offload folder has no data for it; load the model again"
        ) from None
    return tensor.detach().to("cpu")


def offload_store(hook: Hook) -> Any:
    """What a hook reads offloaded weights from: a dict, or an OffloadedWeightsLoader.

    A PrefixedDataset in between adds the name of the module.
    """
    return getattr(hook.weights_map, "dataset", hook.weights_map)


def offloads_to_disk(hook: Hook) -> bool:
    """Whether a hook reads files."""
    return bool(getattr(offload_store(hook), "index", None))


def offload_folder(hook: Hook) -> Path | None:
    """The folder that a model was offloaded to."""
    folder = getattr(offload_store(hook), "save_folder", None)
    return None if folder is None else Path(folder)


def loaded_copy(module: nn.Module) -> nn.Module:
    """A copy of a module without hooks, with the tensors that hooks hold for it."""
    made: nn.Module = without_hooks(module)
    for name, read in offloaded_tensors(module).items():
        put(made, name, read().clone())
    return made
