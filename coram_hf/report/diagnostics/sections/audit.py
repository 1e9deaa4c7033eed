"""Audit: how well rotations survive their logarithm, and how well slices are conditioned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coram_hf.report.diagnostics.section import Numbers, Section
from coram_hf.report.tables import Table

if TYPE_CHECKING:
    from coram_hf.report.diagnostics.findings import Findings


def numbers(findings: Findings) -> dict[str, Any]:
    """The paper's table of the geometric operators.

    rotation_log: mean and largest |exp(log Q) - Q| / |Q| over all slices and experts, and how many rotations
    turn by more than 3. condition: sigma_max / sigma_min of S_0 by kind of slicing; histogram: its log10.
    tiny: how many slices have a sigma_min of S_0 below 1e-8.
    """
    from coram_hf.geometry.anatomy import CONTRAST
    from coram_hf.report.diagnostics.distributions import conditioning, rotation_log

    whole, spread = findings.whole, findings.config.spread
    conditions = {
        spread or "contiguous": whole.conditions,
        "contiguous" if spread else CONTRAST: whole.contrast,
    }
    return {
        "rotation_log": rotation_log(whole.errors, whole.angles),
        "condition": conditioning({way: conditions[way] for way in sorted(conditions)}),
        "frameless": whole.frameless,
        "tiny": whole.tiny,
    }


def tables(numbers: Numbers) -> list[Table]:
    """Errors of the logarithm, condition numbers by kind of slicing, and slices that are nearly singular."""
    found = numbers["audit"]
    log, condition = found["rotation_log"], found["condition"]
    keys = ("median", "p95", "max", "slices", "rank_deficient")
    return [
        Table(
            "Rotation logarithm",
            ["rotations", "mean error", "max error", "theta > 3"],
            [[log["rotations"], log["mean_error"], log["max_error"], log["near_pi"]]],
        ),
        Table(
            "Condition numbers of S_0",
            ["slicing", *(key.replace("_", " ") for key in keys)],
            [[way, *(at[key] for key in keys)] for way, at in condition.items()],
        ),
        Table("Slices", ["without a frame", "sigma_min < 1e-8"], [[found["frameless"], found["tiny"]]]),
    ]


SECTION = Section(
    "audit",
    "Errors of the rotation logarithm, and condition numbers of the slices.",
    numbers,
    tables,
    geometry=True,
)
