"""Merge both suites by the rule and by its rivals, and write scores.json and the README's tables.

    python examples/suite/compare.py [ROW ...] [--limit 100]

A row that scores.json already holds is not made again; delete the file to start anew.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from base import FOLDER, build_base
from score import HERE, load, markdown, score_all, table
from train import EVEN, EXPERTS, UNEVEN

from coram_hf import CoramConfig, CoramMerger, MergeReport, MergeResult
from coram_hf.baselines import merge

SCORES = HERE / "scores.json"
README = HERE / "README.md"
BEGIN, END = "<!-- scores -->\n", "<!-- end of scores -->\n"
MERGES: dict[str, dict[str, Any]] = {
    "CORAM": {},
    "CORAM, damp": {"balance": "damp"},
    "linear": {"method": "linear"},
    "task arithmetic": {"method": "task_arithmetic"},
    "TIES": {"method": "ties"},
}
SUITES = {
    "even": (EVEN, ("CORAM", "linear", "task arithmetic", "TIES")),
    "uneven": (UNEVEN, ("CORAM", "CORAM, damp", "linear")),
}
ROWS = ["base", *EXPERTS, *(f"{suite}: {method}" for suite, (_, kinds) in SUITES.items() for method in kinds)]


def merged(base: Path, names: list[str], method: str = "coram", **options: Any) -> MergeResult:
    """A merge of adapters, by CORAM or a baseline."""
    adapters = {name: str(HERE / "adapters" / name) for name in names}
    if method == "coram":
        return CoramMerger(str(base), adapters, CoramConfig(**options), progress=False).merge()
    return merge(str(base), adapters, method, **options, progress=False)


def summary(report: MergeReport) -> dict[str, Any]:
    keys = ("dispersion", "unbalanced_dispersion", "kappa", "lam", "relative_updates", "rounding_loss")
    return {key: getattr(report, key) for key in keys}


def tables(scores: dict[str, Any]) -> str:
    """The tables of the README, from scores.json and the experts' training.json."""
    rows, merges = scores["rows"], scores["merges"]
    sizes = {name: r for suite in SUITES for name, r in merges[f"{suite}: CORAM"]["relative_updates"].items()}
    made = {name: json.loads((HERE / "adapters" / name / "training.json").read_text()) for name in EXPERTS}
    settings = ("method", "size", "steps", "batch", "lr", "final_loss", "seconds")
    numbers = ("unbalanced_dispersion", "dispersion", "kappa", "lam", "seconds")
    parts = [
        "### How the experts were trained\n",
        markdown(
            ["expert", *settings, "r"],
            [
                [name, *(str(found[key]) for key in settings), f"{sizes[name]:.4f}"]
                for name, found in made.items()
            ],
        ),
        f"### The experts, percent right of {scores['limit']} held-out questions a task\n",
        table({name: rows[name] for name in ("base", *EXPERTS)}),
    ]
    for suite, (_, methods) in SUITES.items():
        parts.append(f"### Merges of the {suite} suite\n")
        parts.append(table({method: rows[f"{suite}: {method}"] for method in methods}))
        coram = [method for method in methods if method.startswith("CORAM")]
        parts.append(
            markdown(
                ["merge", "D", "D as merged", "kappa", "lambda", "seconds"],
                [
                    [method, *(f"{merges[f'{suite}: {method}'][key]:.4g}" for key in numbers)]
                    for method in coram
                ],
            )
        )
    return "\n".join(parts)


def read() -> dict[str, Any]:
    return json.loads(SCORES.read_text()) if SCORES.is_file() else {"limit": None, "rows": {}, "merges": {}}


def add(name: str, base: Path, limit: int) -> None:
    """Make and score one row; the file is read again before it is written, for another process may have."""
    suite, _, method = name.partition(": ")
    made: dict[str, Any] = {}
    if method:
        begin = time.perf_counter()
        result = merged(base, SUITES[suite][0], **MERGES[method])
        made = {name: {**summary(result.report), "seconds": round(time.perf_counter() - begin)}}
        model = result.model
    else:
        model = load(name if name == "base" else str(HERE / "adapters" / name), base)
    row = score_all(model, base, limit)
    print(table({name: row}).splitlines()[-1], flush=True)
    scores = read()
    scores["limit"] = limit
    scores["rows"][name] = row
    scores["merges"] |= made
    SCORES.write_text(json.dumps(scores, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of: {', '.join(ROWS)}; all if left out")
    parser.add_argument("--base", type=Path, default=FOLDER)
    parser.add_argument("--limit", type=int, default=100, help="questions of each task")
    options = parser.parse_args()
    base = build_base(options.base)
    for name in options.rows or ROWS:
        if name not in read()["rows"]:
            add(name, base, options.limit)
    if set(ROWS) <= set(read()["rows"]):
        before, _, rest = README.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        README.write_text(before + BEGIN + tables(read()) + END + after)


if __name__ == "__main__":
    main()
