"""The paper's diagnostics: one function for each, and all of them from one walk over the weights.

The command line reads the sections' help from here, so torch is imported only when something is measured.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coram_hf.config import CoramConfig, check_names
from coram_hf.errors import CoramError
from coram_hf.report.diagnostics.section import Section
from coram_hf.report.diagnostics.sections import SECTIONS
from coram_hf.report.diagnostics.sections.conflict import rate
from coram_hf.report.diagnostics.sections.retention import kept
from coram_hf.report.text import json_values

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from coram_hf.inputs.inputs import Inputs
    from coram_hf.inputs.opening import ModelSource, ModelSources
    from coram_hf.inputs.options import MergeOptions
    from coram_hf.report.diagnostics.findings import Findings


def diagnose(
    base: ModelSource,
    experts: ModelSources,
    config: CoramConfig | None = None,
    *,
    merged: ModelSources = (),
    only: Collection[str] | None = None,
    **options: Unpack[MergeOptions],
) -> dict[str, Any]:
    """All numbers of a report, or those of the sections in `only`, as JSON values.

    `merged` are models, folders or Hub ids of merges by any method, for retention. `config` describes the
    merge in question: by default the first of them that a report of CORAM's lies beside, or else the paper's
    line `full`. Weights are read once, a few chunks at a time.
    """
    from coram_hf.execution.opening import open_here

    asked, told = _sections(only, merged), config or CoramConfig()
    inputs = open_here(base, experts, options, told.target_modules, keep=told.keep)
    return _numbers(inputs, config, asked, merged, options, whole=only is None)


def diagnose_inputs(
    inputs: Inputs, config: CoramConfig | None = None, *, merged: ModelSources = (), progress: bool = True
) -> dict[str, Any]:
    """All numbers of a report on inputs that are open already, such as a merger's."""
    return _numbers(inputs, config, _sections(None, merged), merged, {"progress": progress}, whole=True)


def _sections(only: Collection[str] | None, merged: ModelSources) -> list[Section]:
    """The requested sections; raises for an unknown one, and if all of them need merged models."""
    names = set(SECTIONS if only is None else [only] if isinstance(only, str) else only)
    check_names(sorted(names), list(SECTIONS), "section")
    asked = [section for name, section in SECTIONS.items() if name in names]
    if asked and all(section.merged for section in asked) and not merged:
        raise CoramError(
            f"{asked[0].name} is measured on merged models; pass at least one with merged= or --merged"
        )
    return asked


def _numbers(
    inputs: Inputs,
    config: CoramConfig | None,
    asked: Collection[Section],
    merged: ModelSources,
    options: MergeOptions,
    *,
    whole: bool,
) -> dict[str, Any]:
    from coram_hf.report.diagnostics.findings import walk

    wanted = bool(merged) and any(section.merged for section in asked)
    findings = walk(
        inputs,
        config,
        _open_merged(inputs, merged, options) if wanted else None,
        geometry=any(section.geometry for section in asked),
        entries=any(section.entries for section in asked),
        progress=options.get("progress", True),
    )
    numbers: dict[str, Any] = {"models": findings.models()}
    numbers |= {section.name: section.numbers(findings) for section in asked}
    numbers |= {name: extra(findings) for section in asked for name, extra in section.extras.items()}
    if whole:
        numbers["matrices"] = _matrices(findings)
        numbers["calibration"] = findings.calibrations
        numbers["cost"] = findings.costs
    plain: dict[str, Any] = json_values(numbers)
    return plain


def dispersion(
    base: ModelSource, experts: ModelSources, config: CoramConfig | None = None, **options: Any
) -> Any:
    """r_i by expert and layer, D, and where it stands among the paper's bases."""
    return _alone("dispersion", base, experts, config, options)


def threshold(
    base: ModelSource, experts: ModelSources, config: CoramConfig | None = None, **options: Any
) -> Any:
    """kappa and lambda of the rule by the threshold D_0."""
    return _alone("threshold", base, experts, config, options)


def contraction(
    base: ModelSource, experts: ModelSources, config: CoramConfig | None = None, **options: Any
) -> Any:
    """c_RMS beside sqrt(N), and other coefficients that need no data; see `sections.contraction.FORMULAS`."""
    return _alone("contraction", base, experts, config, options)


def decorrelation(
    base: ModelSource, experts: ModelSources, config: CoramConfig | None = None, **options: Any
) -> Any:
    """Overlap of the experts' inputs before and after; see `sections.decorrelation.FORMULAS`."""
    return _alone("decorrelation", base, experts, config, options)


def branches(
    base: ModelSource, experts: ModelSources, config: CoramConfig | None = None, **options: Any
) -> Any:
    """Size and direction of the update that each subset of the factors makes."""
    return _alone("branches", base, experts, config, options)


def audit(base: ModelSource, experts: ModelSources, config: CoramConfig | None = None, **options: Any) -> Any:
    """Errors of the rotation logarithm, and condition numbers of the base's slices."""
    return _alone("audit", base, experts, config, options)


def ownership(
    base: ModelSource, experts: ModelSources, config: CoramConfig | None = None, **options: Any
) -> Any:
    """Shares of rows by expert, and pairwise cosine and sign agreement."""
    return _alone("ownership", base, experts, config, options)


def conflict(
    base: ModelSource, experts: ModelSources, config: CoramConfig | None = None, **options: Any
) -> Any:
    """Shares of columns on which experts work against the mean update."""
    return _alone("conflict", base, experts, config, options)


def retention(
    base: ModelSource,
    experts: ModelSources,
    merged: ModelSources,
    config: CoramConfig | None = None,
    **options: Any,
) -> Any:
    """How much of the experts' update merged models keep, by kind of parameter."""
    return _alone("retention", base, experts, config, {"merged": merged, **options})


def _alone(
    name: str,
    base: ModelSource,
    experts: ModelSources,
    config: CoramConfig | None,
    options: Mapping[str, Any],
) -> Any:
    """The numbers of one section."""
    return diagnose(base, experts, config, only=[name], **options)[name]


def write_json(numbers: Mapping[str, Any], path: str | Path) -> None:
    """Write the numbers of a report to a JSON file."""
    from coram_hf.outputs.files import write_whole

    write_whole(Path(path), json.dumps(numbers, indent=2, allow_nan=False) + "\n")


def _open_merged(inputs: Inputs, merged: ModelSources, options: MergeOptions) -> Inputs:
    """Open merged models beside the open base, checked as experts are."""
    from coram_hf.inputs.opening import open_inputs

    told: Any = {key: options[key] for key in ("trust_remote_code", "allow_pickle") if key in options}
    try:
        return open_inputs(inputs.base, merged, told, need_targets=False)
    except CoramError as error:
        raise CoramError(f"among the merged models, {error}") from error


def _matrices(findings: Findings) -> dict[str, dict[str, Any]]:
    """The numbers of every single target."""
    return {
        name: {
            **findings.places[name]._asdict(),
            "kind": findings.inputs.kinds[name],
            "relative_updates": findings.relative(anatomy),
            "c_rms": findings.c_rms(anatomy),
            "conflict": rate(anatomy),
            "retention": kept(findings, name),
        }
        for name, anatomy in findings.targets.items()
    }
