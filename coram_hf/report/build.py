"""Build the plan and the report of a merge."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from coram_hf.amplitude import Amplitude, Strength, balanced_contraction, relative_size
from coram_hf.execution.survey import Survey
from coram_hf.inputs.inputs import Inputs
from coram_hf.methods.protocol import How
from coram_hf.methods.record import Record, total
from coram_hf.report.decorrelation import decorrelation_numbers
from coram_hf.report.kinds import Retained
from coram_hf.report.merge_report import REPORT_NAME, MergeReport, library_versions
from coram_hf.report.plan import MergePlan


def build_plan(
    inputs: Inputs,
    label: str,
    names: Mapping[str, How],
    amplitude: Amplitude,
    survey: Survey,
    carrying: Sequence[str] = (),
) -> MergePlan:
    """The plan of a merge; kappa and lambda only for a method that amplifies.

    `carrying`: lines that would also merge what this one leaves at the base.
    """
    residual = [name for name in inputs.outside if name in names]
    amplifies = any(how.amplified for how in names.values())
    share, left_behind = survey.total_outside_share(), []
    if carrying and share > 0:
        left_behind.append(
            f"{share:.1%} of the experts' update norm lies outside the target matrices and stays at the "
            f"base; the lines {', '.join(carrying)} merge it as well (--line {shlex.quote(carrying[0])})"
        )
    return MergePlan(
        line=label,
        targets=tuple(inputs.targets),
        residual=tuple(residual),
        kept=tuple(name for name in (*inputs.outside, *inputs.frozen) if name not in set(residual)),
        relative_updates=amplitude.relative_updates,
        balance_factors=dict(zip(amplitude.relative_updates, amplitude.factors, strict=True)),
        dispersion=amplitude.dispersion,
        unbalanced_dispersion=amplitude.unbalanced_dispersion,
        kappa=amplitude.kappa if amplifies else None,
        lam=amplitude.lam if amplifies else None,
        outside_share=survey.outside_share(),
        tied=inputs.base.tied,
        sizes={name: inputs.base.original(name).numel() for name in inputs.base},
        kinds={name: inputs.kinds[name] for name in inputs.base},
        vocabulary={name: dict(counts) for name, counts in inputs.vocabulary.counts.items()},
        transplants=inputs.transplants,
        surroundings=dict(inputs.surroundings.said),
        warnings=(*inputs.warnings, *amplitude.warnings, *left_behind),
    )


def build_report(
    inputs: Inputs,
    plan: MergePlan,
    settings: Mapping[str, Any],
    strength: Strength,
    amplitude: Amplitude,
    survey: Survey,
    records: Mapping[str, Record],
    dtype: torch.dtype,
) -> MergeReport:
    """The record of a finished merge."""
    whole = total(records.values())
    square = whole.slices.squared_norm
    c_rms = balanced_contraction(survey.measured, amplitude.factors, square)
    config = {key: value for key, value in settings.items() if key != "method"}
    return MergeReport(
        method=settings["method"],
        line=plan.line,
        config=config,
        n_experts=len(inputs.experts),
        slice_height=config.get("slice_height"),
        dispersion=plan.dispersion,
        unbalanced_dispersion=plan.unbalanced_dispersion,
        relative_updates=plan.relative_updates,
        balance_factors=plan.balance_factors,
        kappa=plan.kappa,
        lam=plan.lam,
        lam_source=None if plan.lam is None else strength.source,
        sqrt_n=amplitude.sqrt_n,
        c_rms=c_rms,
        amplitude=relative_size(plan.lam, c_rms),
        decorrelation=decorrelation_numbers(
            whole.decorrelation, len(inputs.experts), square, amplitude.sqrt_n
        ),
        counts={"targets": len(plan.targets), "residual": len(plan.residual), **whole.slices.counts()},
        outside_share=plan.outside_share,
        left_at_base=0.0 if plan.residual else survey.total_outside_share(),
        rounding_loss=0.0,
        vocabulary=plan.vocabulary,
        surroundings=plan.surroundings,
        expert_kinds={name: expert.kind for name, expert in inputs.experts.items()},
        orthogonality_errors={
            name: expert.orthogonality_error
            for name, expert in inputs.experts.items()
            if expert.orthogonality_error is not None
        },
        warnings=plan.warnings,
        versions=library_versions(),
        sources=inputs.sources(),
        transplants={name: found.lines() for name, found in inputs.transplants.items()},
        options=dict(inputs.told or {}),
        retention=retained(inputs, records, survey).by_kind(),
        kinds=plan.kind_counts,
        worst_condition=whole.slices.worst_condition or None,
        float32_difference=whole.slices.float32_difference,
        model_class=type(inputs.model).__name__,
        library=inputs.library,
        dtype=dtype_name(inputs),
    ).with_rounding(whole.rounding_loss, dtype)


def is_result(folder: Path, inputs: Inputs, settings: Mapping[str, Any]) -> bool:
    """Whether the report in a folder is that of a merge of these inputs with these settings."""
    if not (folder / REPORT_NAME).is_file():
        return False
    report = MergeReport.load(folder)
    found = {"method": report.method, **report.config}
    asked = (dict(settings), inputs.sources(), dict(inputs.told or {}), dtype_name(inputs))
    return (found, report.sources, report.options, report.dtype) == asked


def dtype_name(inputs: Inputs) -> str | None:
    """The name of the requested dtype."""
    return None if inputs.dtype is None else str(inputs.dtype).removeprefix("torch.")


def retained(inputs: Inputs, records: Mapping[str, Record], survey: Survey) -> Retained:
    """How much every parameter moved, and how much the experts moved it."""
    moved = {name: record.moved for name, record in records.items()}
    updates = {name: found.updates for name, found in survey.tensors.items()}
    return Retained(moved, updates, inputs.kinds)
