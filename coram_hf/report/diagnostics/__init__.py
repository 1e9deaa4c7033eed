"""Diagnostics of the paper: each a function on sources, all from one walk over the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from coram_hf.config import CoramConfig, check_names
from coram_hf.engine import Engine
from coram_hf.errors import CoramError
from coram_hf.inputs import Models, ModelSource, ModelSources, open_models
from coram_hf.inputs.options import MergeOptions
from coram_hf.inputs.parent_card import provenance
from coram_hf.outputs.files import write_whole
from coram_hf.report.diagnostics.columns import conflict_numbers, conflict_rate
from coram_hf.report.diagnostics.findings import Findings, walk
from coram_hf.report.diagnostics.kept import retained, retention_numbers
from coram_hf.report.diagnostics.numerics import audit_numbers
from coram_hf.report.diagnostics.rows import ownership_numbers
from coram_hf.report.diagnostics.scales import contraction_numbers
from coram_hf.report.diagnostics.sizes import dispersion_numbers, threshold_numbers
from coram_hf.report.diagnostics.subsets import branch_numbers, cancellation

SECTIONS = {
    "dispersion": dispersion_numbers,
    "threshold": threshold_numbers,
    "contraction": contraction_numbers,
    "branches": branch_numbers,
    "audit": audit_numbers,
    "ownership": ownership_numbers,
    "conflict": conflict_numbers,
    "retention": retention_numbers,
}
GEOMETRY = {"threshold", "contraction", "branches", "audit"}
ENTRIES = {"ownership", "conflict"}


def diagnose(
    base: ModelSource,
    experts: ModelSources,
    config: CoramConfig | None = None,
    *,
    merged: ModelSources = (),
    only: Collection[str] | None = None,
    **options: Unpack[MergeOptions],
) -> dict[str, Any]:
    """All numbers of a report, or those of some sections, as JSON values.

    `config` is the merge that they are about; `merged` are models, folders or Hub ids that came out of any
    method, for retention. Weights are read once, a few chunks at a time.
    """
    asked = set(SECTIONS if only is None else [only] if isinstance(only, str) else only)
    check_names(sorted(asked), list(SECTIONS), "section")
    if asked == {"retention"} and not merged:
        raise CoramError("retention is that of merged models: name at least one, with merged= or --merged")
    config = config or CoramConfig()
    engine = Engine(base, experts, config, config.line, options)
    others = _open_merged(base, merged, options) if merged and "retention" in asked else None
    findings = walk(engine, others, geometry=bool(asked & GEOMETRY), entries=bool(asked & ENTRIES))
    numbers: dict[str, Any] = {"models": _models(findings)}
    numbers |= {name: measure(findings) for name, measure in SECTIONS.items() if name in asked}
    if "branches" in asked:
        numbers["cancellation"] = cancellation(findings)
    if only is None:
        numbers["matrices"] = _matrices(findings)
    plain: dict[str, Any] = _plain(numbers)
    return plain


def dispersion(
    base: ModelSource, experts: ModelSources, config: CoramConfig | None = None, **options: Any
) -> Any:
    """r_i by expert and layer, D, and where it stands among the paper's bases."""
    return diagnose(base, experts, config, only=["dispersion"], **options)["dispersion"]


def threshold(
    base: ModelSource, experts: ModelSources, config: CoramConfig | None = None, **options: Any
) -> Any:
    """kappa and lambda of the rule by the threshold D_0."""
    return diagnose(base, experts, config, only=["threshold"], **options)["threshold"]


def contraction(
    base: ModelSource, experts: ModelSources, config: CoramConfig | None = None, **options: Any
) -> Any:
    """c_RMS beside sqrt(N), and other coefficients that need no data; see `scales.FORMULAS`."""
    return diagnose(base, experts, config, only=["contraction"], **options)["contraction"]


def branches(
    base: ModelSource, experts: ModelSources, config: CoramConfig | None = None, **options: Any
) -> Any:
    """Size and direction of the update that every subset of the factors makes."""
    return diagnose(base, experts, config, only=["branches"], **options)["branches"]


def audit(base: ModelSource, experts: ModelSources, config: CoramConfig | None = None, **options: Any) -> Any:
    """Errors of the rotation logarithm, and condition numbers of the base's slices."""
    return diagnose(base, experts, config, only=["audit"], **options)["audit"]


def ownership(
    base: ModelSource, experts: ModelSources, config: CoramConfig | None = None, **options: Any
) -> Any:
    """Shares of rows by expert, and pairwise cosine and sign agreement."""
    return diagnose(base, experts, config, only=["ownership"], **options)["ownership"]


def conflict(
    base: ModelSource, experts: ModelSources, config: CoramConfig | None = None, **options: Any
) -> Any:
    """Shares of columns on which experts work against the mean update."""
    return diagnose(base, experts, config, only=["conflict"], **options)["conflict"]


def retention(base: ModelSource, experts: ModelSources, merged: ModelSources, **options: Any) -> Any:
    """How much of the experts' update merged models keep, by group of modules."""
    return diagnose(base, experts, merged=merged, only=["retention"], **options)["retention"]


def write_json(numbers: Mapping[str, Any], path: str | Path) -> None:
    """Write the numbers of a report."""
    write_whole(Path(path), json.dumps(numbers, indent=2, allow_nan=False) + "\n")


def _open_merged(base: ModelSource, merged: ModelSources, options: MergeOptions) -> Models:
    """Merged models beside the base, checked as experts are."""
    told: Any = {key: options[key] for key in ("trust_remote_code", "allow_pickle") if key in options}
    try:
        return open_models(base, merged, **told)
    except CoramError as error:
        raise CoramError(f"among the merged models, {error}") from error


def _models(findings: Findings) -> dict[str, Any]:
    engine = findings.engine
    return {
        "line": engine.config.line,
        "branch": engine.config.branch,
        "class": type(engine.base).__name__,
        "base": provenance(engine.models.base)["source"],
        "experts": findings.experts,
        "merged": list(findings.moved),
        "targets": len(findings.targets),
        "parameters": sum(engine.models.base.original(name).numel() for name in findings.targets),
        "warnings": [*engine.models.warnings, *engine.amplitude.warnings],
    }


def _matrices(findings: Findings) -> dict[str, dict[str, Any]]:
    """What is known of every target by itself."""
    return {
        name: {
            **findings.places[name]._asdict(),
            "relative_updates": findings.relative(anatomy),
            "c_rms": findings.c_rms(anatomy),
            "conflict": conflict_rate(anatomy),
            "retention": retained(findings, name),
        }
        for name, anatomy in findings.targets.items()
    }


def _plain(value: Any) -> Any:
    """JSON values; an infinite number becomes the string "inf", as in a merge report."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
