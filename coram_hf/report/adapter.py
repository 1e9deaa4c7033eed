"""The report of a merge that is stored as an adapter, and what its card says about the matrices."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from coram_hf.report.kinds import Retained
from coram_hf.report.merge_report import MergeReport

if TYPE_CHECKING:
    from coram_hf.config import AdapterOptions
    from coram_hf.outputs.lora import LowRank


def oft_report(report: MergeReport) -> MergeReport:
    """The report of a merge of OFT adapters as one, which stores it exactly."""
    return replace(report, adapter={"type": "OFT"}).with_rounding(0.0, torch.float32)


def lora_report(
    report: MergeReport,
    options: AdapterOptions,
    kept: Mapping[str, LowRank],
    retained: Retained,
    stored: Collection[str],
) -> MergeReport:
    """The report of a merge as a LoRA adapter, with the rank and the relative error of every matrix.

    `stored`: the parameters that the adapter covers; those that a residual pathway merged stay at the base.
    """
    square = math.fsum(found.square for found in kept.values())
    lost = math.fsum(found.lost for found in kept.values())
    adapter: dict[str, Any] = {"type": "LORA", "rank": options.rank, "energy": options.energy}
    changes: dict[str, Any] = {}
    left_out = report.counts.get("residual", 0) if report.lam is not None else 0
    if left_out:
        outside = math.fsum(sum(u) for name, u in retained.updates.items() if name not in stored)
        whole = math.fsum(sum(u) for u in retained.updates.values())
        changes["counts"] = {**report.counts, "residual": 0}
        changes["left_at_base"] = math.sqrt(outside / whole) if whole else 0.0
        changes["warnings"] = (
            *report.warnings,
            f"{left_out} tensors that the residual pathway merged stay at the base, because the adapter "
            "holds target matrices only; save the whole model to keep them",
        )
    moved = {name: moved for name, moved in retained.moved.items() if name in stored}
    return replace(
        report,
        **changes,
        retention=replace(retained, moved=moved).by_kind(),
        adapter={**adapter, "error": math.sqrt(lost / square)},
        adapter_ranks={module: kept[module].rank for module in sorted(kept)},
        adapter_errors={module: kept[module].error for module in sorted(kept)},
    ).with_rounding(0.0, torch.float32)


def worst_matrices(report: MergeReport, count: int) -> list[tuple[str, int, float]]:
    """Module, rank and error of the matrices that the adapter stores least exactly."""
    ordered = sorted(report.adapter_errors, key=lambda module: -report.adapter_errors[module])
    return [(name, report.adapter_ranks[name], report.adapter_errors[name]) for name in ordered[:count]]
