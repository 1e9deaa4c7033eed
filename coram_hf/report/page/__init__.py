"""The report as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from coram_hf import __version__
from coram_hf.report.page import charts
from coram_hf.report.sheets import SHEETS, SUBSETS, Sheet, sheets
from coram_hf.report.text import readable, show

FOLDER = Path(__file__).parent
SECTIONS = {
    "summary": "At a glance",
    "updates": "Updates",
    "dispersion": "Dispersion",
    "contraction": "Contraction",
    "branches": "Branches",
    "retention": "Retention",
    "audit": "Audit",
    "ownership": "Ownership",
    "conflict": "Conflict",
    "matrices": "Matrices",
}


def render_page(numbers: Mapping[str, Any]) -> str:
    """The page of a whole diagnosis; everything in it that comes from a name is escaped."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"readable": readable, "show": show}
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        environment.get_template("page.html")
        .render(
            numbers=numbers,
            sections=SECTIONS.items(),
            sheets={section: sheets(numbers, section) for section in SHEETS},
            tiles=_tiles(numbers),
            style=Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
            script=Markup(script),
            script_hash=Markup(f"sha256-{digest}"),
            version=__version__,
            **_figures(numbers),
        )
        .strip()
    )


def _tiles(numbers: Mapping[str, Any]) -> list[tuple[Any, str]]:
    dispersion, contraction, audit = numbers["dispersion"], numbers["contraction"], numbers["audit"]
    worst = max((at["max"] for at in audit["condition"].values() if at["max"] is not None), default=None)
    return [
        (dispersion["D"], "dispersion D"),
        (dispersion["kappa"], "kappa"),
        (dispersion["lam"], "lambda"),
        (contraction["c_rms"], f"c_RMS, beside sqrt(N) = {contraction['sqrt_n']:.3g}"),
        (
            numbers["branches"][numbers["models"]["branch"]]["cosine"],
            "cosine of the merge with the sum of updates",
        ),
        (numbers["cancellation"]["ratio"], "cancellation of Q and V"),
        (numbers["conflict"]["rate"], "share of conflicting columns"),
        (worst, "largest condition number"),
    ]


def _figures(numbers: Mapping[str, Any]) -> dict[str, Any]:
    matrices, experts = numbers["matrices"], numbers["models"]["experts"]
    size, size_legend = charts.log_shade(
        r for at in matrices.values() for r in at["relative_updates"].values()
    )
    share, share_legend = charts.share_shade(at["conflict"] for at in matrices.values())
    audit, branches = numbers["audit"], numbers["branches"]
    return {
        "updates": {
            "maps": [
                charts.heat_map(name, matrices, lambda at, name=name: at["relative_updates"][name], size)  # type: ignore[misc]
                for name in experts
            ],
            "legend": size_legend,
        },
        "sizes": charts.bars(numbers["dispersion"]["relative_updates"]),
        "kappa": charts.kappa_figure(numbers["dispersion"]),
        "coefficients": charts.bars(numbers["contraction"]["coefficients"]),
        "branch_sizes": charts.bars({name: branches[name]["norm_ratio"] for name in SUBSETS}),
        "branch_cosines": charts.bars({name: branches[name]["cosine"] for name in SUBSETS}, 1.0),
        "retention": _retention_maps(numbers),
        "retention_legend": charts.Legend("0", "2 and more"),
        "angles": charts.histogram(audit["rotation_log"]["angles"], lambda angle: f"{angle:.2g}"),
        "conditions": [
            (way, charts.histogram(at["histogram"], lambda power: f"{10**power:.3g}", log=True))
            for way, at in audit["condition"].items()
        ],
        "owners": charts.bars(numbers["ownership"]["rows"], 1.0),
        "conflict": {
            "map": charts.heat_map("Conflict map", matrices, lambda at: at["conflict"], share),
            "legend": share_legend,
        },
        "matrices": _matrix_sheet(numbers),
    }


def _retention_maps(numbers: Mapping[str, Any]) -> list[charts.HeatMap]:
    """Of every merged model, or of the configured merge where there is none."""
    matrices, lam = numbers["matrices"], numbers["contraction"]["lam"]
    if numbers["models"]["merged"]:
        return [
            charts.heat_map(
                name,
                matrices,
                lambda at, name=name: at["retention"][name],  # type: ignore[misc]
                charts.retention_shade,
            )
            for name in numbers["models"]["merged"]
        ]

    def expected(at: Mapping[str, Any]) -> float | None:
        return lam / at["c_rms"] if lam is not None and at["c_rms"] else None

    title = f"{numbers['models']['line']}, as configured"
    return [charts.heat_map(title, matrices, expected, charts.retention_shade)]


def _matrix_sheet(numbers: Mapping[str, Any]) -> Sheet:
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
    return Sheet("Targets", [*header, *(f"kept by {name}" for name in merged)], rows)
