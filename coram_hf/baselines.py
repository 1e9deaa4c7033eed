"""The methods that CORAM is compared with, on whole models and on single tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from coram_hf.amplitude import contraction
from coram_hf.config import Place, Shared, check_names, options_of, weigh
from coram_hf.errors import CoramError
from coram_hf.geometry import check_tensors, squared_norm, squared_norms
from coram_hf.geometry.cores import one_core
from coram_hf.inputs.opening import ModelSource, ModelSources
from coram_hf.inputs.options import MergeOptions, merge_options
from coram_hf.merger import Merger
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.entry import Entry
from coram_hf.methods.registry import (
    Preset,
    find_method,
    mergebench_presets,
    paper_presets,
    rival_names,
)
from coram_hf.methods.updates import Updates
from coram_hf.result import MergeResult

__all__ = [
    "MERGEBENCH_PRESETS",
    "METHODS",
    "PAPER_PRESETS",
    "PRESETS",
    "Baseline",
    "Preset",
    "Updates",
    "merge",
    "merge_oft",
    "merge_tensor",
    "open_merger",
]

METHODS: Mapping[str, Entry]
PAPER_PRESETS: Mapping[str, Preset]
MERGEBENCH_PRESETS: Mapping[str, Preset]
PRESETS: Mapping[str, Preset]
"""Predefined parameter sets, by their names in the paper's tables."""


def __getattr__(name: str) -> Any:
    """Load methods and presets on first use, because methods of other packages may import this module."""
    made: dict[str, Callable[[], Any]] = {
        "METHODS": lambda: {name: find_method(name) for name in rival_names()},
        "PAPER_PRESETS": paper_presets,
        "MERGEBENCH_PRESETS": mergebench_presets,
        "PRESETS": lambda: paper_presets() | mergebench_presets(),
    }
    if name not in made:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return made[name]()


def open_merger(base: ModelSource, experts: ModelSources, method: str, **options: Any) -> Merger:
    """The merger of any method, including CORAM, with all sources opened and checked.

    Options: the parameters of the method, `weights`, `balance`, `target_modules`, `amplitude`, and those of
    `MergeOptions`.
    """
    entry = find_method(method)
    known = dict.fromkeys([*entry.options, *options_of(Shared), *merge_options(), "keep_update"])
    check_names(options, list(known), f"option of {method}")
    shared = {key: value for key, value in options.items() if key in merge_options()}
    parameters = {key: value for key, value in options.items() if key not in shared}
    return Merger.open(base, experts, entry.choose(parameters), cast(MergeOptions, shared))


def merge(
    base: ModelSource, experts: ModelSources, method: str, *, keep_update: bool = False, **options: Any
) -> MergeResult:
    """Merge models with any method, in memory, with the same report as CoramMerger.

    Options: those of `open_merger`, and `keep_update`, which `with_lambda` needs.
    """
    return open_merger(base, experts, method, **options).merge(keep_update=keep_update)


def merge_oft(
    base: ModelSource,
    experts: ModelSources,
    *,
    weights: Sequence[float] | None = None,
    **options: Any,
) -> MergeResult:
    """OrthoMerge on the skew generators of OFT adapters; `save_adapter` writes the merged adapter.

    Options: those of `MergeOptions`.
    """
    from coram_hf.methods.oft import OftMerge, choose_oft

    choice = choose_oft({"space": "oft", "weights": weights})
    merger = Merger.open(base, experts, choice, cast(MergeOptions, options))
    adapter = cast(OftMerge, merger.method).adapter
    return merger.merge(keep_update=False).with_adapter(adapter)


def merge_tensor(
    base: Tensor,
    experts: Sequence[Tensor],
    method: str,
    *,
    weights: Sequence[float] | None = None,
    amplitude: float | None = None,
    name: str = "",
    **parameters: Any,
) -> Tensor:
    """Merge one tensor; the result is float64 for float64 input and float32 otherwise.

    `amplitude` rescales the update to that multiple of the RMS of the experts' updates. `name` seeds the
    methods that draw random numbers.
    """
    Shared(amplitude=amplitude)
    chosen = find_method(method)
    if not isinstance(chosen, Baseline):
        raise CoramError(f"{method} does not merge single tensors; see coram_hf.geometry.merge_matrix")
    complete = chosen.complete(parameters)
    check_tensors(base, experts)
    n_experts, place = len(experts), Place(name)
    chosen.check_count(n_experts)
    weighing = weigh(weights, n_experts, place)
    detached = [expert.detach() for expert in experts]
    raw = Updates.weighed(base.detach(), detached, weighing, (1.0,) * n_experts, name=name)
    with one_core():
        updates = replace(raw, prepared=chosen.prepared(lambda: iter([raw]), complete))
        update = chosen(updates, chosen.at(complete, n_experts, place))
    if amplitude is not None:
        _, squares = squared_norms(updates.base, updates.experts)
        c_rms = contraction([square**0.5 for square in squares], squared_norm(update) ** 0.5)
        if c_rms is None:
            raise CoramError("the merged update is zero, so it has no amplitude; remove amplitude=")
        update *= amplitude * c_rms
    return update.add_(updates.base)
