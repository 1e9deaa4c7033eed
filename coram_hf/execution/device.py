"""The devices on which parameters are merged."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from coram_hf.errors import CoramError
from coram_hf.inputs.inputs import Parameter


def to_device(parameter: Parameter, device: torch.device) -> Parameter:
    """Let a parameter be merged on a device, and let this thread compute there: the only way to a device.

    Its weights follow a few rows or a matrix at a time, as the method needs them.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    parameter.device = device
    return parameter


def compute_device(device: str | torch.device | None, local_rank: int = 0) -> torch.device | None:
    """The device of the geometry: as given; "auto": an accelerator if there is one; None: the base's."""
    if device is None or isinstance(device, torch.device):
        return device
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    name = device if device != "auto" else found.type if found is not None else "cpu"
    try:
        chosen = torch.device(name)
    except (RuntimeError, TypeError):
        chosen = torch.device("meta")
    if chosen.type not in ("cpu", "cuda", "mps", "xpu"):
        raise CoramError(f"device: unknown value {device!r}; valid: cpu, cuda, cuda:1, mps, auto")
    if chosen.type != "cpu" and (found is None or found.type != chosen.type):
        raise CoramError(f"device: {chosen.type!r} is not available on this machine; found {found or 'cpu'}")
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return chosen


def check_precision(devices: Iterable[torch.device], compute_dtype: str) -> None:
    """Raise if float64 is requested on Apple's mps, which lacks it."""
    if compute_dtype == "float64" and any(device.type == "mps" for device in devices):
        raise CoramError(
            'device "mps" has no float64; pass compute_dtype="float32" (--compute-dtype), or '
            'device="cpu" (--device)'
        )
