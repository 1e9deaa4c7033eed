"""The report as one self-contained HTML page: no network, no other files."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from coram_hf import __version__
from coram_hf.report import charts
from coram_hf.report.calibration import Calibration
from coram_hf.report.diagnostics.sections import SECTIONS as DIAGNOSTICS
from coram_hf.report.diagnostics.sections.branches import SUBSETS
from coram_hf.report.page import shapes
from coram_hf.report.tables import Table
from coram_hf.report.text import readable, show
from coram_hf.report.verdict import verdict

FOLDER = Path(__file__).parent
SECTIONS = {
    "summary": "At a glance",
    "updates": "Updates",
    "dispersion": "Dispersion",
    "contraction": "Contraction",
    "decorrelation": "Decorrelation",
    "branches": "Branches",
    "retention": "Retention",
    "audit": "Audit",
    "ownership": "Ownership",
    "conflict": "Conflict",
    "matrices": "Matrices",
}
"""The sections of the page, by their ids in the template."""
DETAILS = {
    "branches": "For method developers: open it to see which part of the geometry the update comes from.",
    "audit": "For method developers: open it if the merged model is broken and you suspect the numerics.",
    "ownership": "Open it to see whether one expert dominates, or whether two are nearly the same.",
    "matrices": "Open it to look up a single matrix.",
}
"""Sections that start closed, and when to open them."""
INSIDE = {"threshold": "dispersion"}
"""Diagnostics that are shown in the section of another one."""


def page_environment(*folders: Path) -> Environment:
    """Templates of this folder and of others, with our filters; everything in them is escaped."""
    environment = Environment(
        loader=FileSystemLoader([FOLDER, *folders]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"readable": readable, "show": show}
    return environment


def render_page(numbers: Mapping[str, Any]) -> str:
    """The page of a complete diagnosis; all names in it are escaped."""
    others = [section for name, section in DIAGNOSTICS.items() if name not in SECTIONS | INSIDE]
    calibrated = {"calibration": "Calibration"} if numbers["calibration"] else {}
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        page_environment()
        .get_template("page.html")
        .render(
            numbers=numbers,
            sections=[
                *(SECTIONS | calibrated).items(),
                *((section.name, section.name.capitalize()) for section in others),
            ],
            sheets={name: section.tables(numbers) for name, section in DIAGNOSTICS.items()},
            others=others,
            tiles=_tiles(numbers),
            verdict=verdict(numbers["dispersion"]),
            details=DETAILS,
            style=Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
            script=Markup(script),
            script_hash=Markup(f"sha256-{digest}"),
            version=__version__,
            **_figures(numbers),
        )
        .strip()
    )


def _tiles(numbers: Mapping[str, Any]) -> list[tuple[Any, str, str]]:
    """The key numbers, each with its name and meaning."""
    dispersion, contraction = numbers["dispersion"], numbers["contraction"]
    threshold = f"{dispersion['threshold']:g}"
    return [
        (dispersion["D"], "dispersion D", f"largest over smallest update; uneven from {threshold} on"),
        (dispersion["lam"], "lambda", "the factor by which the merged update is enlarged"),
        (dispersion["kappa"], "kappa", "lambda without the part that compensates for averaging"),
        (
            contraction["c_rms"],
            "c_RMS",
            f"how much averaging shrinks the update; about {_root(numbers)} is usual",
        ),
        (
            numbers["conflict"]["rate"],
            "conflict",
            "share of columns on which an expert works against the others",
        ),
    ]


def _root(numbers: Mapping[str, Any]) -> str:
    return f"sqrt(N) = {numbers['contraction']['sqrt_n']:.3g}"


def _figures(numbers: Mapping[str, Any]) -> dict[str, Any]:
    updates, conflict = charts.update_maps(numbers), charts.conflict_map(numbers, "Conflict map")
    size, size_legend = shapes.log_shade(updates)
    share, share_legend = shapes.share_shade(conflict)
    audit, branches = numbers["audit"], numbers["branches"]
    return {
        "updates": {"maps": [shapes.shaded(found, size) for found in updates], "legend": size_legend},
        "sizes": shapes.bars(numbers["dispersion"]["relative_updates"]),
        "kappa": shapes.kappa_figure(charts.kappa_chart(numbers["dispersion"])),
        "calibrations": [
            (model, shapes.curve_figure(found), found.tables())
            for model, found in _calibrations(numbers).items()
        ],
        "coefficients": shapes.bars(numbers["contraction"]["coefficients"]),
        "branch_sizes": shapes.bars({name: branches[name]["norm_ratio"] for name in SUBSETS}),
        "branch_cosines": shapes.bars({name: branches[name]["cosine"] for name in SUBSETS}, 1.0),
        "retention": [
            shapes.shaded(found, shapes.retention_shade) for found in charts.retention_maps(numbers)
        ],
        "retention_legend": shapes.RETENTION_LEGEND,
        "angles": shapes.histogram(audit["rotation_log"]["angles"], lambda angle: f"{angle:.2g}"),
        "conditions": [
            (way, shapes.histogram(at["histogram"], _condition, log=True))
            for way, at in audit["condition"].items()
        ],
        "owners": shapes.bars(numbers["ownership"]["rows"], 1.0),
        "conflict": {"map": shapes.shaded(conflict, share), "legend": share_legend},
        "matrices": _matrix_table(numbers),
        "costs": [
            Table(f"Cost of {model}", ("", ""), list(lines.items()))
            for model, lines in numbers["cost"].items()
        ],
    }


def _calibrations(numbers: Mapping[str, Any]) -> dict[str, Calibration]:
    return {model: Calibration.from_dict(found) for model, found in numbers["calibration"].items()}


def _condition(power: float) -> str:
    return f"{charts.power_of_ten(power):.3g}"


def _matrix_table(numbers: Mapping[str, Any]) -> Table:
    experts, merged = numbers["models"]["experts"], numbers["models"]["merged"]
    header = ["matrix", *(f"r {name}" for name in experts), "c_RMS", "conflict"]
    rows = [
        [
            name,
            *(at["relative_updates"][expert] for expert in experts),
            at["c_rms"],
            at["conflict"],
            *(at["retention"][model] for model in merged),
        ]
        for name, at in numbers["matrices"].items()
    ]
    return Table("Targets", [*header, *(f"kept by {name}" for name in merged)], rows)
