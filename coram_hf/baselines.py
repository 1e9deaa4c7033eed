"""The methods that CORAM is compared with, one file each, on plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from coram_hf.config import check_weights, normalized_weights
from coram_hf.geometry import check_tensors
from coram_hf.methods.presets import MERGEBENCH_PRESETS, PAPER_PRESETS, PRESETS, Preset
from coram_hf.methods.registry import METHODS, Method, find_method
from coram_hf.methods.updates import Updates

if TYPE_CHECKING:
    from coram_hf.result import MergeResult

__all__ = [
    "MERGEBENCH_PRESETS",
    "METHODS",
    "PAPER_PRESETS",
    "PRESETS",
    "Method",
    "Preset",
    "merge",
    "merge_oft",
    "merge_tensor",
]


def merge_tensor(
    base: Tensor,
    experts: Sequence[Tensor],
    method: str,
    *,
    weights: Sequence[float] | None = None,
    name: str = "",
    **parameters: Any,
) -> Tensor:
    """One merged tensor, float64 for float64 input and float32 otherwise.

    `name` is the tensor's name, for methods that draw random numbers.
    """
    chosen = find_method(method)
    complete = chosen.complete(parameters)
    check_tensors(base, experts)
    shares = method_weights(weights, len(experts), complete)
    updates = Updates(base.detach(), [e.detach() for e in experts], shares, (1.0,) * len(experts), name)
    return chosen(updates, complete).add_(updates.base)


def merge(base: Any, experts: Sequence[Any] | Mapping[str, Any], method: str, **options: Any) -> MergeResult:
    """Merge models by a baseline method, with the engine and the report of CoramMerger.

    Options: `weights`, `balance`, `target_modules`, `keep_update` (for `with_lambda`), those of
    `MergeOptions`, and the parameters of the method.
    """
    from coram_hf.baseline_merger import BaselineMerger

    return BaselineMerger(base, experts, method, **options).merge()


def merge_oft(base: Any, experts: Sequence[Any] | Mapping[str, Any], **options: Any) -> MergeResult:
    """OrthoMerge on the skew generators of OFT adapters; options: `weights`, and those of `MergeOptions`."""
    from coram_hf.oft_merger import OftMerger

    return OftMerger(base, experts, **options).merge()


def method_weights(
    weights: Sequence[float] | None, n_experts: int, parameters: Mapping[str, Any]
) -> tuple[float, ...]:
    """w_i summing to 1, or as given for a method that is told not to normalise."""
    normalized = normalized_weights(weights, n_experts)
    return normalized if weights is None or parameters.get("normalize", True) else check_weights(weights)
