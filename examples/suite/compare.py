"""Merge and score both suites by CORAM and its rivals, and write the tables of the README.

    python examples/suite/compare.py [--limit 60]

The even suite has the five experts. In the uneven one `initials` is replaced by an expert of the same task
that was trained much harder; it is merged as it is, and with balance="damp". Stopped, it goes on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from base import FOLDER, build_base
from train import EVEN, EXPERTS, UNEVEN

from coram_hf import CoramConfig, compare_methods
from coram_hf.config import Balance
from coram_hf.report.tables import markdown as table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SETTINGS = ("method", "size", "steps", "batch", "lr", "final_loss", "seconds")


class Suite(NamedTuple):
    """A set of experts, how they are balanced, and what they are merged by."""

    title: str
    experts: list[str]
    balance: Balance | None
    lambdas: str | tuple[float, ...]
    rivals: tuple[str, ...]


FEW = ("Linear", "Task Arithmetic", "TIES")
ALL = (*FEW, "DARE-TIES", "tsvm", "OrthoMerge TA+G", "OrthoMerge TIES+G", "OrthoMerge TA+C")
SUITES = {
    "even": Suite("The even suite", EVEN, None, "1.5:3.5:0.5", ALL),
    "uneven": Suite("The uneven suite", UNEVEN, None, (), ("Linear",)),
    "damp": Suite("The uneven suite, damped", UNEVEN, "damp", (), ("Linear",)),
}


def run(name: str, base: Path, limit: int) -> None:
    """Score one suite; what the journal has is not scored again."""
    suite = SUITES[name]
    compare_methods(
        base,
        {expert: HERE / "adapters" / expert for expert in suite.experts},
        CoramConfig(balance=suite.balance),
        tasks=[HERE / "data" / task / "test.jsonl" for task in EVEN],
        lambdas=suite.lambdas,
        baselines=suite.rivals,
        score_experts=name == "even",
        limit=limit,
        output=RESULTS / name,
    )


def facts(name: str) -> dict[str, Any]:
    """What compare.json says of the CORAM line."""
    line: dict[str, Any] = json.loads((RESULTS / name / "compare.json").read_text())["lines"][0]
    return line


def summary(name: str) -> str:
    """D, kappa, lambda, how far the rule is from the optimum, and how much the average shrinks."""
    line = facts(name)
    swept = f", {100 * line['gap']:.1f} points below the best of the sweep" if SUITES[name].lambdas else ""
    return (
        f"D {line['dispersion']:.2f}, kappa {line['kappa']:g}, lambda {line['rule']['lam']:.2f}{swept}; "
        f"c_RMS / sqrt(N) {line['c_rms'] / line['sqrt_n']:.2f}"
    )


def tables() -> str:
    """The tables of the README, from the results and the experts' training.json."""
    made = {name: json.loads((HERE / "adapters" / name / "training.json").read_text()) for name in EXPERTS}
    sizes = {**facts("even")["relative_updates"], **facts("uneven")["relative_updates"]}
    scored = json.loads((RESULTS / "even" / "compare.json").read_text())
    rows = {"base": scored["base"], **scored["experts"]}
    questions = next(iter(scored["base"].values()))["questions"]
    parts = [
        "### How the experts were trained\n",
        table(
            ["expert", *SETTINGS, "r"],
            [
                [name, *(str(found[key]) for key in SETTINGS), f"{sizes[name]:.4f}"]
                for name, found in made.items()
            ],
        ),
        f"\n### The experts, percent right of {questions} held-out questions per task\n",
        table(
            ["", *EVEN],
            [[name, *(f"{100 * row[task]['value']:.0f}" for task in EVEN)] for name, row in rows.items()],
        ),
    ]
    for name, suite in SUITES.items():
        parts += [f"\n### {suite.title}\n", (RESULTS / name / "compare.md").read_text(), summary(name)]
    return "\n".join(parts) + "\n"


def merges() -> str:
    """The tables of the merges alone, for the front door."""
    parts = []
    for name, suite in SUITES.items():
        parts += [f"**{suite.title}** ({summary(name)})\n", (RESULTS / name / "compare.md").read_text()]
    return "\n".join(parts)


def put(path: Path, mark: str, text: str) -> None:
    """Replace what stands between two marks of a file."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
    before, _, rest = path.read_text().partition(begin)
    path.write_text(before + begin + text + end + rest.partition(end)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", type=Path, default=FOLDER)
    parser.add_argument("--limit", type=int, default=60, help="questions of each task")
    options = parser.parse_args()
    base = build_base(options.base)
    for name in SUITES:
        run(name, base, options.limit)
    put(HERE / "README.md", "scores", tables())
    put(HERE.parents[1] / "README.md", "suite", merges())
    print(tables())


if __name__ == "__main__":
    main()
