"""Measure how good a merge is against the size of its update, for every suite and direction.

    python examples/suite/amplitude.py [--suite lora-even] [--way tsv]

Each direction is merged once and scored at every size `a`, on validation questions. Beside the scores, a row
has the divergence from the experts on their prompts, which calibration minimises, the loss on neutral text,
and how far the neutral sentences move from the base. Rows go to results/amplitude/<suite>.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from functools import cached_property
from typing import Any

from study import RESULTS, Bench, Row, average
from suites import SUITES

from coram_hf.calibration.divergence import Passage, divergence, mean_divergence
from coram_hf.calibration.teachers import Lessons, neutral_passages
from coram_hf.config import CalibrationConfig
from coram_hf.outputs.memory import expert_model
from coram_hf.result import MergeResult

SIZES = (0.4, 0.6, 0.85, 1.15, 1.6, 2.2, 3.0)
FOLDER = RESULTS / "amplitude"
WAYS: dict[str, Row] = {
    "sum": {"line": "full"},
    "tsv": {"line": "full", "decorrelate": "tsv"},
    "wudi": {"line": "full", "decorrelate": "wudi"},
}
"""The directions, all of experts that are balanced where they are uneven."""
UNBALANCED = "sum, unbalanced"
"""The direction of the paper's line on uneven experts."""


class Study:
    """One suite: what its experts say to the prompts, and how far they move the neutral sentences."""

    def __init__(self, name: str) -> None:
        self.bench = Bench(name, "validation")
        self.file = FOLDER / f"{name}.jsonl"
        rows = [json.loads(line) for line in self.file.open()] if self.file.is_file() else []
        self.known = {(row["way"], row["a"]) for row in rows}
        self.inputs = self.bench.merger().inputs

    @cached_property
    def lessons(self) -> Lessons:
        """The prompts and the neutral sentences."""
        config = CalibrationConfig(answer_line=True)
        return Lessons(self.inputs, self.bench.suite.prompts(), config)

    @cached_property
    def answers(self) -> dict[str, list[Passage]]:
        """What the experts answer to their own prompts."""
        return self.lessons.teach(progress=False)

    @cached_property
    def sentences(self) -> list[Passage]:
        """The neutral sentences, as the base continues them."""
        return neutral_passages(self.inputs, self.lessons.tokenizer)

    @cached_property
    def shifts(self) -> dict[str, float]:
        """How far every expert moves the neutral sentences by what it changes in the target matrices."""
        return {
            name: self.shift(expert_model(self.inputs, name, self.inputs.targets))
            for name in self.inputs.experts
        }

    def shift(self, model: Any) -> float:
        """KL(base || model) per token of the neutral sentences."""
        return divergence(model.eval(), {"": self.sentences})[""]

    def typical_shift(self, result: MergeResult) -> float:
        """sum_i w_i f_i^2 KL(base || expert i), what the neutral scale matches."""
        factors = result.report.balance_factors
        return math.fsum(factors[name] ** 2 * kl for name, kl in self.shifts.items()) / len(factors)

    def measure(self, way: str, parameters: Row) -> None:
        """Merge in one direction, and score it at every size."""
        sizes = [a for a in SIZES if (way, a) not in self.known]
        if not sizes:
            return
        balance = {} if way == UNBALANCED else {"balance": "auto"}
        result = self.bench.merger(**parameters, scale="c_rms", kappa=1.0, **balance).merge()
        contraction = result.report.lam / result.report.amplitude
        for a in sizes:
            began = time.perf_counter()
            result.rescale_(a * contraction)
            by_expert = divergence(result.model.eval(), self.answers)
            row = {
                "way": way,
                "a": a,
                "lam": result.report.lam,
                "outcomes": self.bench.ask(result.model),
                "kl": mean_divergence(by_expert),
                "kl by expert": by_expert,
                "neutral": round(self.bench.neutral_loss(result.model), 4),
                "shift": self.shift(result.model),
                "typical shift": self.typical_shift(result),
                "D": result.report.dispersion,
                "seconds": round(time.perf_counter() - began, 1),
            }
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{self.bench.name:14} {way:16} a {a:4} {100 * average(row):5.1f}  kl {row['kl']:.4f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=SUITES, action="append")
    parser.add_argument("--way", choices=[*WAYS, UNBALANCED], action="append")
    options = parser.parse_args()
    for name in options.suite or SUITES:
        study = Study(name)
        ways = {**WAYS, **({UNBALANCED: WAYS["sum"]} if name.endswith("uneven") else {})}
        for way, parameters in ways.items():
            if not options.way or way in options.way:
                study.measure(way, parameters)


if __name__ == "__main__":
    main()
