"""Merge every suite by every method and score it: the numbers behind the tables and the choice of a default.

    python examples/suite/study.py validation                  # calibrations, to choose on
    python examples/suite/study.py test                        # the methods as chosen, scored once
    python examples/suite/study.py test --suite lora-even --row full

Each row goes to results/<part>/<suite>.jsonl as soon as it is scored, with the outcome of every question;
rows that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from suites import HERE, PROMPTS, SUITES, Suite
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from coram_hf.baselines import open_merger
from coram_hf.calibration.divergence import log_probabilities
from coram_hf.config import Granularity
from coram_hf.evaluation.light import score
from coram_hf.evaluation.questions import read_task
from coram_hf.inputs.text import text_tokens
from coram_hf.merger import Merger
from coram_hf.outputs.memory import expert_model

RESULTS = HERE / "results"
QUESTIONS = {"validation": 40, "test": 100}
Row = dict[str, Any]

RIVALS: dict[str, Row] = {
    "linear": {"method": "linear"},
    "task arithmetic": {"method": "task_arithmetic"},
    "TIES": {"method": "ties"},
    "DARE-TIES": {"method": "dare_ties"},
    "TSV-M": {"method": "tsvm"},
    "Iso-C": {"method": "iso_c"},
    "WUDI": {"method": "wudi"},
    "ACE": {"method": "ace"},
}
LINES: dict[str, Row] = {line: {"line": line} for line in ("full", "DEC(full)", "recommended")}
CORAM_LINES = ("full", "lr", "nca", "nca+ave", "ca", "ca+ave", "SS(full,variance)", "SS(full,owner)")
CORAM_LINES += ("SS(ca+ave,variance)",)
MORE_LINES: dict[str, Row] = {
    **{f"{name}, a=1.15": {**RIVALS[name], "amplitude": 1.15} for name in ("TSV-M", "Iso-C", "WUDI", "ACE")},
    **{line: {"line": line} for line in CORAM_LINES},
    **{f"DEC({line})": {"line": f"DEC({line})"} for line in CORAM_LINES},
    "full.ties": {"line": "full.ties"},
    "DEC(full), a=1.15": {"line": "DEC(full)", "kappa": 1.15},
    "full, root": {"line": "full", "balance": "root"},
    "recommended.ties": {"line": "recommended", "residual": "ties"},
}
"""Directions at one size, other lines, and decorrelation of each."""


class Calibration(NamedTuple):
    """What is fitted, and to how many prompts per expert."""

    granularity: Granularity = "layer"
    prompts: int = PROMPTS


CALIBRATIONS = {
    "calibrated": Calibration(),
    "calibrated, groups": Calibration("group"),
    "calibrated, 8 prompts": Calibration(prompts=8),
    "calibrated, 4 prompts": Calibration(prompts=4),
}


class Bench:
    """One suite, opened, with its questions and with what its experts answer to the prompts."""

    def __init__(self, name: str, part: str, questions: int | None = None) -> None:
        self.name, self.suite, self.part = name, SUITES[name], part
        self.base = self.suite.make()
        self._tokenizer = AutoTokenizer.from_pretrained(self.base)
        files = {task: HERE / "data" / task / f"{part}.jsonl" for task in self.suite.tasks.values()}
        self._tasks = {task: read_task(file) for task, file in files.items()}
        self._questions = questions or QUESTIONS[part]
        self._file = RESULTS / part / f"{name}.jsonl"

    @cached_property
    def known(self) -> dict[str, Row]:
        """The rows that are scored already."""
        rows = [json.loads(line) for line in self._file.open()] if self._file.is_file() else []
        return {row["row"]: row for row in rows}

    def merger(self, method: str = "coram", **parameters: Any) -> Merger:
        return open_merger(self.base, self.suite.experts, method, progress=False, **parameters)

    def score(self, row: str, model: PreTrainedModel, began: float, **facts: Any) -> None:
        """Ask a model everything, and keep what it got right."""
        outcomes = self.ask(model)
        self._keep(row, outcomes, began, neutral=round(self.neutral_loss(model), 4), **facts)

    def ask(self, model: PreTrainedModel) -> dict[str, str]:
        """Which questions of every task a model gets right, as ones and zeros."""
        return {task: self._ask(model.eval(), task) for task in self._tasks}

    def score_experts(self) -> None:
        """Ask every expert the questions of its own task."""
        began, inputs = time.perf_counter(), self.merger().inputs
        tasks = self.suite.tasks
        outcomes = {task: self._ask(expert_model(inputs, name).eval(), task) for name, task in tasks.items()}
        self._keep("experts", outcomes, began)

    def _ask(self, model: PreTrainedModel, task: str) -> str:
        found = score(model, self._tokenizer, self._tasks[task], self._questions)
        return "".join("01"[right] for right in found.outcomes)

    def _keep(self, row: str, outcomes: dict[str, str], began: float, **facts: Any) -> None:
        seconds = round(time.perf_counter() - began, 1)
        values = {"row": row, "outcomes": outcomes, **facts, "seconds": seconds}
        self.known[row] = values
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as file:
            file.write(json.dumps(values) + "\n")
        print(f"{self.name:12} {row:32} {100 * average(values):5.1f}  {seconds:.0f} s", flush=True)

    def neutral_loss(self, model: PreTrainedModel) -> float:
        """The mean loss per token on neutral English text."""
        lines = (HERE / "neutral.txt").read_text().splitlines()
        rows = [text_tokens(self._tokenizer, line) for line in lines]
        total, count = 0.0, 0
        with torch.inference_mode():
            for batch in log_probabilities(model, [(row[:1], row[1:]) for row in rows]):
                for i, log_q in batch:
                    total -= float(log_q.gather(1, torch.tensor(rows[i][1:])[:, None]).sum())
                    count += len(rows[i]) - 1
        return total / count


def average(row: Mapping[str, Any]) -> float:
    """The mean over tasks of the share of right answers."""
    shares = [text.count("1") / len(text) for text in row["outcomes"].values()]
    return sum(shares) / len(shares)


Step = Callable[[Bench], None]


def validation_steps(suite: Suite) -> Iterator[tuple[list[str], Step]]:
    """The recommended line, calibrated in several ways."""
    for row, how in CALIBRATIONS.items():
        yield [row], lambda bench, r=row, h=how: calibrate(bench, r, h)  # type: ignore[misc]


def test_steps(suite: Suite) -> Iterator[tuple[list[str], Step]]:
    yield ["base", "experts"], score_parents
    for row, parameters in {**LINES, **RIVALS, **MORE_LINES}.items():
        if row.endswith(".ties") and not suite.is_full:
            continue
        yield [row], lambda bench, r=row, p=parameters: score_merge(bench, r, p)  # type: ignore[misc]
    yield ["calibrated"], score_calibrated


def score_merge(bench: Bench, row: str, parameters: Row) -> None:
    """Merge and score one row."""
    began = time.perf_counter()
    result = bench.merger(**parameters).merge(keep_update=False)
    report = result.report
    facts = {"lam": report.lam, "a": report.amplitude, "D": report.dispersion, "kappa": report.kappa}
    bench.score(row, result.model, began, **{k: v for k, v in facts.items() if v is not None})


def calibrate(bench: Bench, row: str, how: Calibration) -> None:
    """Calibrate the recommended merge on the suite's prompts, and score it on other validation questions."""
    began, busy = time.perf_counter(), time.process_time()
    merge = bench.merger(line="recommended").merge()
    prompts = bench.suite.prompts(how.prompts)
    found = merge.calibrate(prompts, granularity=how.granularity, answer_line=True, progress=False)
    kept = found.report.calibration
    facts = {key: kept[key] for key in ("granularity", "held_back", "factors", "before", "after")}
    facts["calibration seconds"] = round(time.perf_counter() - began)
    facts["processor seconds"] = round(time.process_time() - busy)
    bench.score(row, found.model, began, lam=found.report.lam, **facts)


def score_calibrated(bench: Bench) -> None:
    """The calibrated merge, repeated from the factors and lambda that were found for the validation's row."""
    found = Bench(bench.name, "validation").known.get("calibrated")
    if found is None:
        raise SystemExit(f"{bench.name}: run study.py validation --row calibrated first")
    merged = {"line": "recommended", "lam": found["lam"]}
    if found["factors"]:
        merged |= {"balance": None, "factors": list(found["factors"].values())}
    score_merge(bench, "calibrated", merged)


def score_parents(bench: Bench) -> None:
    """The base, and every expert on the task that it was trained for."""
    if "base" not in bench.known:
        bench.score("base", AutoModelForCausalLM.from_pretrained(bench.base), time.perf_counter())
    if "experts" not in bench.known:
        bench.score_experts()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=QUESTIONS)
    parser.add_argument("--suite", choices=SUITES, action="append")
    parser.add_argument("--row", action="append", help="only rows that begin so")
    parser.add_argument("--not", dest="skip", action="append", default=[], help="no rows that begin so")
    parser.add_argument("--questions", type=int, help="questions of each task")
    options = parser.parse_args()
    for name in options.suite or SUITES:
        bench = Bench(name, options.part, options.questions)
        steps = validation_steps if options.part == "validation" else test_steps
        for rows, step in steps(bench.suite):
            wanted = not options.row or any(row.startswith(tuple(options.row)) for row in rows)
            wanted = wanted and not any(row.startswith(tuple(options.skip)) for row in rows)
            if wanted and any(row not in bench.known for row in rows):
                step(bench)


if __name__ == "__main__":
    main()
