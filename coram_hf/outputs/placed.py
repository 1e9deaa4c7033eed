"""Models placed by accelerate: built tensor by tensor, each where it is kept, and never whole in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from coram_hf.inputs.inputs import Inputs
from coram_hf.inputs.internals.hooks import align_hook, skipped_keys
from coram_hf.inputs.internals.models import put
from coram_hf.inputs.offloaded import offload_store
from coram_hf.inputs.placement import Placement
from coram_hf.outputs.layout import skeleton
from coram_hf.outputs.offload import Offloaded, mapped_tensor
from coram_hf.outputs.place import InMemory, Output, memory_like


def placed_model(
    inputs: Inputs, placement: Placement, read: Callable[[str], Tensor], unread: Collection[str] = ()
) -> PreTrainedModel:
    """A model in the format of the result, placed by accelerate and filled with `read(name)`.

    Tensors named in `unread` are left as they are. Tied parameters are kept in memory if one of their modules
    is; modules on the disk then read them from there.
    """
    with torch.inference_mode(False):
        model = skeleton(inputs)
        tied = _tied_groups(model)
        homes = {name: _home(placement, group) for name, group in tied.items()}
        on_disk = [name for name, home in homes.items() if home is None]
        aliases = {alias: name for name in on_disk for alias in tied[name] if alias != name}
        offloaded = None
        if placement.uses_disk:
            offloaded = Offloaded(placement.folder, model, on_disk, aliases, inputs.targets)
        for name, home in homes.items():
            if home is not None:
                _allocate(model, tied[name], home)
            if name in unread:
                continue
            if home is None:
                assert offloaded is not None
                offloaded.write(name, read(name))
            else:
                model.get_parameter(name).data.copy_(read(name))
        _fill_buffers(model, inputs, read)
        return _dispatched(model, placement, offloaded)


def _tied_groups(model: nn.Module) -> dict[str, list[str]]:
    """All names of every parameter, by its first."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in groups.values()}


def _home(placement: Placement, names: Collection[str]) -> torch.device | None:
    """Where a parameter is kept: the first of its modules' places in memory; None: on the disk."""
    return next((home for name in names if (home := placement.home(name)) is not None), None)


def _allocate(model: PreTrainedModel, names: Collection[str], device: torch.device) -> None:
    """Give a parameter, under all its names, memory on a device."""
    made = None
    for name in names:
        if made is None:
            like = model.get_parameter(name)
            made = nn.Parameter(torch.empty_like(like, device=device), like.is_floating_point())
        put(model, name, made)


def _fill_buffers(model: PreTrainedModel, inputs: Inputs, read: Callable[[str], Tensor]) -> None:
    """Buffers are small: all are kept in memory, and accelerate moves them to where they are needed."""
    others, stored = inputs.base.other_buffers(), model.state_dict()
    for name, _ in list(model.named_buffers()):
        put(model, name, (read(name) if name in stored else others[name]).detach().clone())


def _dispatched(model: PreTrainedModel, placement: Placement, offloaded: Offloaded | None) -> PreTrainedModel:
    """The model with accelerate's hooks.

    Besides the files, hooks read from memory what they offload and the model still has: modules in CPU
    memory that an accelerator computes with, and parameters that a module on the disk shares with others.
    """
    main = torch.device(placement.main_device)
    in_memory: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        home = placement.home(name)
        offloading = home is None or (home.type == "cpu" and main.type != "cpu")
        if offloading and not parameter.is_meta:
            in_memory[name] = parameter.data
    return dispatch_model(
        model,
        dict(placement.device_map),
        main_device=None if main.type == "cpu" else placement.main_device,
        state_dict=in_memory or None,
        offload_dir=None if offloaded is None else str(offloaded.parent),
        offload_index=offloaded,
        skip_keys=skipped_keys(model),
    )


class Outputs:
    """Where the tensors of a model are written to: its memory, that of its hooks, or its own files."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._tensors = model.state_dict()
        self._stores: dict[str, Any] = {}
        self._offloaded: Offloaded | None = None
        for prefix, module in model.named_modules():
            hook = align_hook(module)
            if hook is None or not hook.offload:
                continue
            store = offload_store(hook)
            index = getattr(store, "index", None)
            if isinstance(index, Offloaded):
                self._offloaded = index
            own = module.named_parameters(recurse=False)
            self._stores |= {f"{prefix}.{key}".lstrip("."): store for key, _ in own}

    def __getitem__(self, name: str) -> Output:
        tensor = self._tensors[name]
        if not tensor.is_meta:
            return InMemory(tensor)
        held = getattr(self._stores[name], "state_dict", {})
        if name in held:
            return InMemory(held[name])
        assert self._offloaded is not None
        return self._offloaded.output(name)

    @property
    def room(self) -> Callable[[Tensor, torch.dtype], Tensor]:
        """Makes tensors for kept updates: in files beside the model's, if it has any, else in memory."""
        if self._offloaded is None:
            return memory_like
        return partial(mapped_tensor, self._offloaded.parent)
