"""The tables of a report, by section: for the page and for the terminal alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from coram_hf.report.diagnostics.scales import FORMULAS
from coram_hf.report.retention import GROUPS
from coram_hf.report.text import readable, show

SUBSETS = {
    "s": "dS only",
    "q": "Q only",
    "v": "V only",
    "qs": "Q and dS",
    "sv": "dS and V",
    "lr": "Q and V",
    "full": "Q, dS and V",
}
Numbers = Mapping[str, Any]


class Sheet(NamedTuple):
    """One table; cells are names or numbers, None where a number is not defined."""

    title: str
    header: list[str]
    rows: list[list[Any]]


def sheets(numbers: Numbers, section: str) -> list[Sheet]:
    """The tables of one section."""
    return SHEETS[section](numbers)


def _dispersion(numbers: Numbers) -> list[Sheet]:
    found = numbers["dispersion"]
    experts = list(found["relative_updates"])
    layers = list(next(iter(found["by_layer"].values())))
    return [
        Sheet("Update sizes", ["expert", "r_i"], [list(pair) for pair in found["relative_updates"].items()]),
        Sheet(
            "D among the paper's bases",
            ["base", "D"],
            sorted(
                [*map(list, found["paper"].items()), ["this merge", found["D"]]],
                key=lambda row: float(row[1]),
            ),
        ),
        Sheet(
            "r_i by layer",
            ["layer", *experts],
            [[layer, *(found["by_layer"][expert][layer] for expert in experts)] for layer in layers],
        ),
    ]


def _threshold(numbers: Numbers) -> list[Sheet]:
    rows = [[int(d), at["kappa"], at["lam"]] for d, at in numbers["threshold"].items()]
    return [Sheet("Threshold sensitivity", ["D_0", "kappa", "lambda"], rows)]


def _contraction(numbers: Numbers) -> list[Sheet]:
    found = numbers["contraction"]
    coefficients = [[name, value, FORMULAS[name]] for name, value in found["coefficients"].items()]
    return [
        Sheet("Coefficients that need no data", ["coefficient", "value", "formula"], coefficients),
        Sheet("c_RMS by matrix", ["matrix", "c_RMS"], [list(pair) for pair in found["by_matrix"].items()]),
    ]


def _branches(numbers: Numbers) -> list[Sheet]:
    found = numbers["branches"]
    rows = [[name, found[name]["norm_ratio"], found[name]["cosine"], text] for name, text in SUBSETS.items()]
    ratio = numbers["cancellation"]["ratio"]
    return [
        Sheet("Subsets of the factors", ["subset", "|delta| / |delta_TA|", "cosine", "merged"], rows),
        Sheet("Cancellation", ["ratio", "value"], [["|delta_QV| / sqrt(|delta_Q|^2 + |delta_V|^2)", ratio]]),
    ]


def _audit(numbers: Numbers) -> list[Sheet]:
    log, condition = numbers["audit"]["rotation_log"], numbers["audit"]["condition"]
    keys = ("median", "p95", "max", "slices", "rank_deficient")
    return [
        Sheet(
            "Rotation logarithm",
            ["rotations", "mean error", "max error", "theta > 3"],
            [[log["rotations"], log["mean_error"], log["max_error"], log["near_pi"]]],
        ),
        Sheet(
            "Condition numbers of S_0",
            ["slicing", *(key.replace("_", " ") for key in keys)],
            [[way, *(at[key] for key in keys)] for way, at in condition.items()],
        ),
    ]


def _ownership(numbers: Numbers) -> list[Sheet]:
    found = numbers["ownership"]
    experts = list(found["rows"])
    pairs = [
        Sheet(title, ["expert", *experts], [[one, *found[key][one].values()] for one in experts])
        for key, title in (("cosine", "Cosine of the updates"), ("sign_agreement", "Sign agreement"))
    ]
    shares = [*map(list, found["rows"].items()), ["nobody", found["unowned"]]]
    return [Sheet("Rows by owner", ["expert", "share of rows"], shares), *pairs]


def _conflict(numbers: Numbers) -> list[Sheet]:
    found = numbers["conflict"]
    shares = [*map(list, found["by_expert"].items()), ["all", found["rate"]]]
    return [
        Sheet("Conflicting columns by expert", ["expert", "share of columns"], shares),
        Sheet("By layer", ["layer", "share of columns"], [list(pair) for pair in found["by_layer"].items()]),
    ]


def _retention(numbers: Numbers) -> list[Sheet]:
    found = numbers["retention"]
    groups = [group for group in GROUPS if any(group in of for of in found.values())]
    rows = [[group, *(of.get(group) for of in found.values())] for group in groups]
    return [Sheet("Retention by group of modules", ["group", *found], rows)] if found else []


SHEETS: dict[str, Callable[[Numbers], list[Sheet]]] = {
    "dispersion": _dispersion,
    "threshold": _threshold,
    "contraction": _contraction,
    "branches": _branches,
    "audit": _audit,
    "ownership": _ownership,
    "conflict": _conflict,
    "retention": _retention,
}


def print_sheets(tables: Iterable[Sheet]) -> None:
    """Print tables on a terminal, or into a pipe."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 160)
    for sheet in tables:
        table = Table(box=box.SIMPLE_HEAD)
        for i, head in enumerate(sheet.header):
            table.add_column(Text(readable(head, 40)), justify="right" if i else "left")
        for row in sheet.rows:
            table.add_row(*(Text(show(cell)) for cell in row))
        console.print(Text(sheet.title, style="bold"), table)
