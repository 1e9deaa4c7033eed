"""Print the tables of the study from its results, and write them into the READMEs.

    python examples/suite/tables.py

Averages are over tasks; intervals are 95 % of a bootstrap over questions, drawn within each suite and task.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from study import CALIBRATIONS, CORAM_LINES, RESULTS, RIVALS, average
from suites import HERE, SUITES

from coram_hf.evaluation.intervals import Interval, bootstrap
from coram_hf.report.tables import markdown as table

Row = Mapping[str, Any]
STEPS = {
    "base": "the base",
    "linear": "linear average",
    "full": "CORAM, the paper's rule (`full`)",
    "DEC(full)": "+ decorrelated (`DEC(full)`)",
    "recommended": "+ balanced where uneven, neutral scale (`recommended`)",
    "calibrated": "+ calibrated on 16 prompts per expert",
    "experts": "each expert on its own task",
}
OURS = "recommended"
FRONT = {
    "base": "the base",
    **{name: name for name in RIVALS},
    **{row: f"CORAM `{row}`" for row in ("full", "DEC(full)", OURS)},
    "calibrated": "CORAM, calibrated",
    "experts": "the experts",
}
"""The rows of the picture on the front page, with their titles there."""

OTHERS = {"linear": "linear"}
COLUMNS = {
    "full": "the paper's rule",
    "DEC(full)": "+ decorrelated",
    OURS: "+ balance, scale: **recommended**",
    "calibrated": "+ **calibrated**",
    "experts": "the experts",
}
"""The columns of the table there: before the best rival, and after it."""


def read(part: str) -> dict[str, dict[str, Row]]:
    """The scored rows of every suite, by name."""
    found = {}
    for name in SUITES:
        path = RESULTS / part / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.open()] if path.is_file() else []
        found[name] = {row["row"]: row for row in rows}
    return {name: rows for name, rows in found.items() if rows}


def outcomes(row: Row, share: float = 1.0) -> dict[str, list[float]]:
    """The outcomes of every task, scaled so that means over questions add up to `share` of the average."""
    tasks = row["outcomes"]
    return {task: [share * int(bit) / len(tasks) for bit in text] for task, text in tasks.items()}


def interval(row: Row) -> Interval:
    return bootstrap(outcomes(row))


def difference(suites: Mapping[str, Mapping[str, Row]], ours: str, theirs: str) -> Interval:
    """How far one row is above another, averaged over suites, on the same questions."""
    strata = {}
    for name, rows in suites.items():
        mine, other = (outcomes(rows[row], 1 / len(suites)) for row in (ours, theirs))
        for task, values in mine.items():
            strata[f"{name} {task}"] = [a - b for a, b in zip(values, other[task], strict=True)]
    return bootstrap(strata)


def percent(found: Interval, sign: str = "") -> str:
    return f"{100 * found.estimate:{sign}.1f}±{50 * (found.high - found.low):.1f}"


def signed(found: Interval) -> str:
    return f"{100 * found.estimate:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def complete(suites: Mapping[str, Mapping[str, Row]]) -> dict[str, Mapping[str, Row]]:
    """The suites of which all rows of the overviews are scored; only these are compared."""
    return {name: rows for name, rows in suites.items() if {*STEPS, *RIVALS} <= rows.keys()}


def bands(suites: Mapping[str, Mapping[str, Row]], row: str) -> Interval:
    """The interval of a row's average over suites."""
    parts = {name: outcomes(rows[row], 1 / len(suites)) for name, rows in suites.items()}
    return bootstrap(
        {f"{name} {task}": values for name, found in parts.items() for task, values in found.items()}
    )


def overview(suites: Mapping[str, Mapping[str, Row]], names: Mapping[str, str]) -> str:
    """Rows by suite, their average over suites, and how far the recommended merge is above each."""
    suites = complete(suites)
    header = ["", *(SUITES[name].title for name in suites), "average", f"{OURS} is above by"]
    lines = []
    for row, title in names.items():
        known = {name: rows[row] for name, rows in suites.items()}
        mean = sum(average(found) for found in known.values()) / len(known)
        above = "" if row in (OURS, "experts") else signed(difference(suites, OURS, row))
        cells = [percent(interval(found)) for found in known.values()]
        lines.append([title, *cells, f"{100 * mean:.1f}", above])
    return table(header, lines)


def details(rows: Mapping[str, Row]) -> str:
    """Every row of one suite by task, with its loss on neutral text."""
    tasks = list(next(iter(rows.values()))["outcomes"])
    lines = []
    for name, row in rows.items():
        shares = [100 * text.count("1") / len(text) for text in row["outcomes"].values()]
        numbers = [
            f"{row[key]:.{digits}f}" if key in row else ""
            for key, digits in (("a", 2), ("lam", 2), ("neutral", 3))
        ]
        lines.append([name, *(f"{share:.0f}" for share in shares), percent(interval(row)), *numbers])
    return table(["row", *tasks, "average", "a", "lambda", "loss on neutral text"], lines)


def recommended_direction(suite: str) -> str:
    """What `decorrelate="auto"` takes for the experts of a suite."""
    return "wudi" if SUITES[suite].is_full else "tsv"


LINES = (*CORAM_LINES, *(f"DEC({line})" for line in CORAM_LINES))
AT_ONE_SIZE = ("DEC(full), a=1.15", *(f"{name}, a=1.15" for name in ("TSV-M", "Iso-C", "WUDI", "ACE")))
"""The lines without a residual pathway, and the directions that are scored at a = 1.15."""


def by_suite(suites: Mapping[str, Mapping[str, Row]], names: Sequence[str]) -> str:
    """Some rows on the suites where all of them are scored, with their average."""
    known = {name: rows for name, rows in suites.items() if set(names) <= rows.keys()}
    header = ["", *(SUITES[name].title for name in known), "average"]
    lines = []
    for row in names:
        cells = [percent(interval(rows[row])) for rows in known.values()]
        lines.append([f"`{row}`", *cells, percent(bands(known, row))])
    return table(header, lines)


def put(path: Path, mark: str, text: str) -> None:
    """Replace what stands between two marks of a file."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
    before, found, rest = path.read_text().partition(begin)
    if found:
        path.write_text(before + begin + text + end + rest.partition(end)[2])


def study(validation: Mapping[str, Mapping[str, Row]], test: Mapping[str, Mapping[str, Row]]) -> str:
    """All tables."""
    parts = ["### What each step is worth\n", overview(test, STEPS)]
    parts += ["\n### The rivals\n", overview(test, {OURS: OURS, **{name: name for name in RIVALS}})]
    parts += [
        "\n### What calibration fits, on validation questions\n",
        by_suite(validation, [*CALIBRATIONS]),
    ]
    parts += ["\n### Directions at one size, a = 1.15\n", by_suite(test, AT_ONE_SIZE)]
    parts += ["\n### Lines, by the rule's lambda\n", by_suite(test, LINES)]
    for name, rows in test.items():
        parts += [f"\n### {SUITES[name].title}\n", details(rows)]
    return "\n".join(parts) + "\n"


def front(test: Mapping[str, Mapping[str, Row]]) -> str:
    """The table of the front page: every suite by what each step adds, beside the best rival there."""
    suites = complete(test)
    header = ["", *OTHERS.values(), "best of eight", *COLUMNS.values()]
    of = {SUITES[name].title: {name: rows} for name, rows in suites.items()}
    of[f"**average of {len(suites)}**"] = suites
    lines = [
        [title, *cells(some, OTHERS), best_rival(some), *cells(some, COLUMNS)] for title, some in of.items()
    ]
    return table(header, lines) + "\n\n" + gaps(suites)


def cells(suites: Mapping[str, Mapping[str, Row]], rows: Iterable[str]) -> list[str]:
    """The averages of some rows over suites."""
    return [percent(bands(suites, row)) for row in rows]


def gaps(suites: Mapping[str, Mapping[str, Row]]) -> str:
    """How far our merges are below what they are compared with, on the suite where it is most."""

    def below(ours: str, others: Iterable[str]) -> tuple[str, str, str]:
        points = {
            (row, name): 100 * (average(rows[row]) - average(rows[ours]))
            for name, rows in suites.items()
            for row in others
        }
        row, name = max(points, key=lambda key: points[key])
        return f"{points[row, name]:.1f} points", row, SUITES[name].title

    most, rival, suite = below(OURS, RIVALS)
    more, line, other = below(OURS, ["DEC(full)"])
    missing, _, last = below("calibrated", ["experts"])
    return (
        f"- Without data of yours, no rival is more than {most} above the recommended merge on any suite\n"
        f"  ({rival}: {suite}). The step before it, `{line}`, is at most {more} above it ({other}).\n"
        "- Calibrated on 16 unlabelled prompts per expert, the merge is "
        f"at most {missing} below the experts\n  ({last}).\n"
    )


def best_rival(suites: Mapping[str, Mapping[str, Row]]) -> str:
    """The rival with the highest average over some suites, and that average."""
    found = {row: bands(suites, row) for row in RIVALS}
    best = max(found, key=lambda row: found[row].estimate)
    return f"{best} {percent(found[best])}"


def headline(test: Mapping[str, Mapping[str, Row]]) -> str:
    """The picture of the front page in two sentences."""
    suites = complete(test)
    mean = {row: f"{100 * bands(suites, row).estimate:.0f} %" for row in FRONT}
    rival = max(RIVALS, key=lambda row: bands(suites, row).estimate)
    return (
        f"On {len(suites)} suites of real experts of small models, the recommended merge answers "
        f"**{mean[OURS]}** of held-out questions\n"
        f"(on average), and the best of the other methods, {rival}, {mean[rival]} (paired difference: "
        f"{signed(difference(suites, OURS, rival))}). Calibrated on\n16 prompts per expert, without answers, "
        f"it reaches **{mean['calibrated']}**; each expert on its own task, {mean['experts']}.\n"
    )


def main() -> None:
    validation, test = read("validation"), read("test")
    put(HERE / "README.md", "study", study(validation, test))
    put(HERE.parents[1] / "README.md", "headline", headline(test))
    put(HERE.parents[1] / "README.md", "study", front(test))
    print(study(validation, test))


if __name__ == "__main__":
    main()
