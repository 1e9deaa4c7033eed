"""Device maps: where accelerate is to keep the merged model, as given or computed from its size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import check_device_map, get_balanced_memory, get_max_memory
from transformers import PreTrainedModel

from coram_hf.config import check_names
from coram_hf.errors import CoramError, reason
from coram_hf.execution.device import compute_device
from coram_hf.inputs.inputs import Inputs
from coram_hf.inputs.internals.hooks import unsplit_classes
from coram_hf.inputs.options import PlacementOptions, read_max_memory
from coram_hf.inputs.placement import DISK, OFFLOADED, Device, Placement
from coram_hf.outputs.layout import skeleton

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
KEPT = (
    "device_map: the base is a model that accelerate has placed already, and the merged model is placed as "
    "it is; merge(device_map=...) places it elsewhere"
)


def with_placement(inputs: Inputs, options: Mapping[str, Any]) -> Inputs:
    """Inputs with the placement that the options ask for; a base that accelerate has placed keeps its own."""
    own = inputs.placement
    if own is None:
        return replace(inputs, placement=requested(inputs, options))
    _check_max_memory(options)
    folder = options.get("offload_folder")
    placement = own if folder is None else replace(own, folder=Path(folder))
    told = (KEPT,) if options.get("device_map") is not None else ()
    return replace(inputs, placement=placement, warnings=(*inputs.warnings, *told))


def with_result_placement(inputs: Inputs, options: PlacementOptions) -> Inputs:
    """Inputs for one result that is placed by the options, or else as the base is."""
    check_names(options, list(PlacementOptions.__annotations__), "option of a placement")
    if options.get("device_map") is None:
        return with_placement(inputs, options)
    return replace(inputs, placement=requested(inputs, options))


def requested(inputs: Inputs, options: Mapping[str, Any]) -> Placement | None:
    """The placement of the result in the words of `from_pretrained`; None if no device map is given."""
    _check_max_memory(options)
    device_map, folder = options.get("device_map"), options.get("offload_folder")
    if device_map is None:
        return None
    model = skeleton(inputs)
    found = _device_map(model, device_map, read_max_memory(options.get("max_memory")))
    main = next((device for device in found.values() if device not in OFFLOADED), "cpu")
    if folder is None and inputs.placement is not None:
        folder = inputs.placement.folder
    return Placement(found, main, None if folder is None else Path(folder))


def _check_max_memory(options: Mapping[str, Any]) -> None:
    if options.get("max_memory") is not None and options.get("device_map") is None:
        raise CoramError(
            'max_memory has no effect without device_map; pass device_map="auto" (--device-map auto)'
        )


def _device_map(model: PreTrainedModel, given: Any, max_memory: dict[Any, Any] | None) -> dict[str, Device]:
    """The device of each module: as given, or by one of accelerate's strategies."""
    if isinstance(given, str) and given in STRATEGIES:
        return _inferred(model, given, max_memory)
    if max_memory is not None:
        raise CoramError(f"max_memory only applies to device_map={' or '.join(map(repr, STRATEGIES))}")
    devices = dict(given) if isinstance(given, Mapping) else {"": given}
    modules = {name for name, _ in model.named_modules()} | set(model.state_dict())
    check_names(devices, sorted(modules), "module in device_map")
    try:
        check_device_map(model, devices)
    except ValueError as error:
        raise CoramError(f"device_map: {reason(error)}") from error
    return {name: _device(device) for name, device in devices.items()}


def _device(given: Any) -> Device:
    """A device that this machine has, or "disk"."""
    if given == DISK:
        return DISK
    if isinstance(given, bool) or not isinstance(given, int | str | torch.device):
        raise CoramError(
            f"device_map: {given!r} is not a device; pass {', '.join(STRATEGIES)}, a device such as 'cpu', "
            'or a dict from the names of modules to devices or "disk"'
        )
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cuda" if accelerator is None else accelerator.type
    try:
        found = compute_device(f"{kind}:{given}" if isinstance(given, int) else str(given))
    except CoramError as error:
        raise CoramError(f"device_map: {reason(error)}") from error
    return given if isinstance(given, int) else str(found)


def _inferred(model: PreTrainedModel, strategy: str, max_memory: dict[Any, Any] | None) -> dict[str, Device]:
    """The device map that accelerate computes from the sizes of the modules and the memory there is."""
    unsplit = unsplit_classes(model)
    try:
        if strategy == "sequential":
            memory = get_max_memory(max_memory)
        else:
            memory = get_balanced_memory(
                model,
                max_memory=max_memory,
                no_split_module_classes=unsplit,
                low_zero=strategy == "balanced_low_0",
            )
        found = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=unsplit)
    except (ValueError, KeyError, TypeError) as error:
        raise CoramError(f"max_memory: {reason(error)}") from error
    return dict(found)
