"""Placement: where accelerate keeps each module of a model, and which device computes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from coram_hf.inputs.internals.hooks import align_hook
from coram_hf.inputs.offloaded import offload_folder, offloads_to_disk

Device = int | str | torch.device
DISK = "disk"
OFFLOADED = ("cpu", DISK)
"""Where modules are kept that another device computes with, if there is one."""


@dataclass(frozen=True)
class Placement:
    """A device map, and what follows from it for every parameter.

    device_map: the device, or "disk", of each module by name, as `from_pretrained` takes it.
    main_device: computes with modules that are kept in CPU memory or on the disk.
    folder: where files of modules on the disk go; None: the system's folder for temporary files.
    hooked: the execution devices of accelerate's hooks by module, for a model that has them.
    """

    device_map: Mapping[str, Device]
    main_device: Device
    folder: Path | None = None
    hooked: Mapping[str, torch.device] = field(default_factory=dict)

    @property
    def uses_disk(self) -> bool:
        """Whether any module is kept on the disk."""
        return DISK in self.device_map.values()

    def home(self, name: str) -> torch.device | None:
        """Where a parameter is kept; None: on the disk.

        Hooks belong to modules, so a parameter that the map names itself is kept where it is computed with.
        """
        if self.device_map.get(name) in OFFLOADED:
            return torch.device(self.main_device)
        found = _of_module(self.device_map, name, self.main_device)
        return None if found == DISK else torch.device(found)

    def execution(self, name: str) -> torch.device:
        """The device that computes with a parameter."""
        found = _of_module(self.hooked or self.device_map, name, self.main_device)
        return torch.device(self.main_device if found in OFFLOADED else found)


def _of_module(devices: Mapping[str, Device], name: str, default: Device) -> Device:
    """The entry of a parameter, or of the innermost module around it that has one."""
    while name not in devices and name:
        name = name.rpartition(".")[0]
    return devices.get(name, default)


def _map_of_hooks(model: nn.Module) -> dict[str, Device]:
    """A device map for hooks that were given without one, as by `cpu_offload` and `disk_offload`."""
    found: dict[str, Device] = {}
    for name, module in model.named_modules():
        hook, own = align_hook(module), next(module.parameters(recurse=False), None)
        if hook is not None and hook.offload:
            found[name] = DISK if offloads_to_disk(hook) else "cpu"
        elif own is not None:
            found[name] = str(own.device)
    places = set(found.values())
    return {"": places.pop()} if len(places) == 1 else found


def placed_as(model: nn.Module) -> Placement | None:
    """The placement that accelerate's hooks have given to a model; None for a model without hooks."""
    hooks = {name: hook for name, module in model.named_modules() if (hook := align_hook(module)) is not None}
    hooked = {
        name: torch.device(hook.execution_device)
        for name, hook in hooks.items()
        if hook.execution_device is not None
    }
    if not hooked:
        return None
    offloading = {name: hook for name, hook in hooks.items() if hook.offload}
    main = hooked[next((name for name in offloading if name in hooked), next(iter(hooked)))]
    device_map = getattr(model, "hf_device_map", None)
    if device_map is None:
        device_map = _map_of_hooks(model)
    folders = (offload_folder(hook) for hook in offloading.values())
    return Placement(device_map, str(main), next(filter(None, folders), None), hooked)
