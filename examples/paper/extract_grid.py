"""Reads the paper's complete grid from its LaTeX source: `extract_grid.py coram.tex > grid.json`.

Scores are in percent, as printed. `further`: scores of other tables at lambdas that the grid does not give;
`optima`: the best lambdas in the tables of optima, by line.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

TABLES = {
    "tab:grid_conflict": None,
    "tab:grid_spread_t1": "T1",
    "tab:grid_spread_t2": "T2",
    "tab:grid_spread_t3": "T3",
    "tab:grid_spread_t4": "T4",
    "tab:grid_rp": None,
    "tab:grid_ssrp_t2": "T2",
    "tab:grid_ssrp_t3": "T3",
    "tab:grid_ssrp_t4": "T4",
}
"""The tables of the grid, and the suite of those that have one; the others name it in their first column."""
BASES = {"T1": "Llama-3.1-8B", "T2": "Llama-3.2-3B", "T3": "Qwen2.5-VL-7B", "T4": "Gemma-2-9B"}
RULE = {"T1": 2.60, "T2": 2.60, "T3": 2.00, "T4": 1.10}
"""The rule's lambda as the paper rounds it to its grid (tab:main_mapping)."""
ROW = re.compile(
    r"^\s*(?:(T\d)?\s*&)?\s*\\texttt\{(?P<line>[^}]*)\}\s*&\s*(?P<n>\d+)\s*&\s*(?P<low>[\d.]+)--(?P<high>[\d.]+)"
    r"\s*&\s*(?P<at>[\d.]+)\s*&\s*(?P<best>[\d.]+)\s*&\s*(?P<rule>[\d.]+)\s*\\\\",
    re.MULTILINE,
)


def table(source: str, label: str) -> str:
    """The rows of the table with this label."""
    end = source.index(f"\\label{{{label}}}")
    return source[source.rindex("\\begin{tabular}", 0, end) : end]


def cells(row: str) -> list[str]:
    """The cells of a row, without markup."""
    plain = re.sub(r"\\texttt\{([^}]*)\}|\\[,;]|\\\((.*?)\\\)", lambda m: m[1] or m[2] or "", row)
    return [cell.strip() for cell in plain.replace("$+$", "+").split("&")]


def grid(source: str) -> dict[str, list[dict[str, object]]]:
    """Every line of the grid by suite, with the table that it stands in."""
    found: dict[str, list[dict[str, object]]] = {suite: [] for suite in BASES}
    for label, only in TABLES.items():
        suite = only
        for match in ROW.finditer(table(source, label)):
            suite = match[1] or suite
            assert suite is not None, f"{label}: a row before the first suite"
            found[suite].append(
                {
                    "line": match["line"].replace("$+$", "+"),
                    "table": label,
                    "evaluated": int(match["n"]),
                    "range": [float(match["low"]), float(match["high"])],
                    "best": {"lam": float(match["at"]), "average": float(match["best"])},
                    "rule": {"lam": RULE[suite], "average": float(match["rule"])},
                }
            )
    return found


def bases(source: str) -> dict[str, dict[str, float]]:
    """N, D and c_RMS of every base (tab:crms)."""
    found = {}
    for row in table(source, "tab:crms").replace("\n", " ").split("\\\\"):
        values = cells(row.rpartition("\\midrule")[2])
        if len(values) == 6 and values[1].isdigit():
            name, n, dispersion, c_rms = values[:4]
            found[name] = {"experts": int(n), "dispersion": float(dispersion), "c_rms": float(c_rms)}
    return found


def held_out(source: str) -> dict[str, dict[str, object]]:
    """The scores at the predicted lambda (tab:loo): suite, line, lambda, score."""
    found = {}
    for row in table(source, "tab:loo").split("\\\\"):
        match = re.search(
            r"(T\d) \(\\texttt\{(\w+)\}\)\s*& [\d.]+ & .*?([\d.]+) & ([\d.]+) & [\d.]+ & [\d.]+", row
        )
        if match:
            suite, line, lam, score = match.groups()
            found[suite] = {"line": line, "lam": float(lam), "average": float(score), "table": "tab:loo"}
    return found


def optima(source: str, suite: str) -> dict[str, float]:
    """The best lambdas in the table of a suite's optima (tab:optt1 to tab:optt4), by line."""
    body = table(source, f"tab:opt{suite.lower()}").rpartition("\\midrule")[2].partition("\\bottomrule")[0]
    found = {}
    for row in body.replace("\n", " ").split("\\\\"):
        values = cells(row)
        for name, lam in zip(values[::3], values[1::3], strict=False):
            if name and lam:
                found[name] = float(lam)
    return found


def kappa_ranges(source: str) -> dict[str, list[float]]:
    """The stated ranges of kappa_opt, from the text below tab:t4_lambda_distribution."""
    text = source[source.index("\\label{tab:t4_lambda_distribution}") :]
    ranges = re.findall(
        r"kappa_\{\\mathrm\{opt\}\}\\in\[([\d.]+),([\d.]+)\]\s*\\quad\\text\{on (T\d)\}", text
    )
    high = re.search(r"\\kappa\\in\[([\d.]+),([\d.]+)\]", text)
    single = re.search(
        r"Gemma-2-2B configuration gives\s*\\\(\s*\\kappa_\{\\mathrm\{opt\}\}\\approx(\d+\.\d+)", text
    )
    assert high is not None
    assert single is not None
    found = {suite: [float(low), float(top)] for low, top, suite in ranges}
    return found | {"T4": [float(high[1]), float(high[2])], "Gemma-2-2B": [float(single[1])] * 2}


def main() -> None:
    """Print the grid as JSON."""
    source = Path(sys.argv[1]).read_text(encoding="utf-8")
    lines, measured, ranges, further = grid(source), bases(source), kappa_ranges(source), held_out(source)
    suites = {
        suite: {
            "base": base,
            **measured[base],
            "kappa_range": ranges[suite],
            "further": [further[suite]] if suite in further else [],
            "optima": optima(source, suite),
            "lines": lines[suite],
        }
        for suite, base in BASES.items()
    }
    suites["Gemma-2-2B"] = {
        "base": "Gemma-2-2B", **measured["Gemma-2-2B"], "kappa_range": ranges["Gemma-2-2B"],
        "further": [], "optima": {}, "lines": [],
    }  # fmt: skip
    head = {
        "source": "CORAM: Coherent Orthogonal Rotation for Model Merging, supplement, section D, tables "
        "tab:grid_conflict to tab:grid_ssrp_t4; N, D and c_RMS from tab:crms",
        "unit": "percent",
    }
    print(compact(head | {"suites": suites}))


def compact(value: object, depth: int = 0) -> str:
    """JSON with a row per line of the grid."""
    if not isinstance(value, dict | list) or depth > 3 or value in ([], {}):
        return json.dumps(value)
    pad = "\n" + " " * (depth + 1)
    named = isinstance(value, dict)
    parts = [f"{json.dumps(k)}: {compact(v, depth + 1)}" for k, v in value.items()] if named else [
        compact(one, 4) for one in value
    ]  # fmt: skip
    start, end = "{}" if named else "[]"
    return start + pad + f",{pad}".join(parts) + pad[:-1] + end


if __name__ == "__main__":
    main()
