"""Merge the five adapters of the suite, score the merge beside base, experts and average, collect answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.calibration.teachers import greedy
from coram_hf.config import CalibrationConfig, CoramConfig
from coram_hf.demo.base import MODEL_ID, build_base
from coram_hf.evaluation.light import Score, score
from coram_hf.evaluation.questions import Task, read_task
from coram_hf.inputs.text import text_tokens
from coram_hf.merger import CoramMerger, Merger
from coram_hf.methods.registry import find_method
from coram_hf.outputs.files import write_whole
from coram_hf.report import MergeReport
from coram_hf.report.diagnostics import diagnose_inputs
from coram_hf.report.page import render_page
from coram_hf.report.tables import Table
from coram_hf.report.text import readable
from coram_hf.result import MergeResult

SUITE = Path(__file__).parent
EXPERTS = ("clock", "initials", "order", "sql", "triage")
"""The even suite: each names an adapter and the task that it was trained for."""

PLAIN, PAPER = "linear average", "CORAM, the paper's rule"
BEST, FITTED = "CORAM, recommended", "CORAM, calibrated"
ANSWER = CalibrationConfig(answer_tokens=24, answer_line=True)
"""How an answer that is shown ends."""
logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What the demo found: scores by row and task, an answer per task, and where the merge is."""

    folder: Path
    scores: dict[str, dict[str, Score]]
    answers: list[Answer]
    seconds: float
    next: str
    calibration: dict[str, float] | None = None
    """Seconds on the clock and of the processor that calibrating took."""

    def tables(self) -> list[Table]:
        """The scores in percent, and one question of every task with its answers."""
        rows = []
        for row, found in self.scores.items():
            shares = [100 * score.accuracy for score in found.values()]
            rows.append([row, *(f"{share:.0f}" for share in (*shares, sum(shares) / len(shares)))])
        asked = [[readable(a.question, 60), a.base or "(nothing)", a.merge, a.right] for a in self.answers]
        count = next(iter(self.scores[BEST].values())).total
        merge = "recommended" if self.calibration is None else "calibrated"
        return [
            Table("One held-out question per task", ("question", "base", merge, "right answer"), asked),
            Table(f"Percent right of {count} held-out questions per task", ("", *EXPERTS, "average"), rows),
        ]

    def to_dict(self) -> dict[str, Any]:
        """The outcome as JSON values."""
        scores = {
            row: {task: score.accuracy for task, score in found.items()} for row, found in self.scores.items()
        }
        answers = [answer._asdict() for answer in self.answers]
        return {**self._asdict(), "folder": str(self.folder), "scores": scores, "answers": answers}


class Answer(NamedTuple):
    """The first question of a task, with what the base and the merge answer, and what is right."""

    task: str
    question: str
    base: str
    merge: str
    right: str


def run_demo(folder: str | Path, questions: int, *, calibrate: bool = False) -> Outcome:
    """Merge into `folder`/merged with the recommended config, and score it beside base, experts and others.

    The others are the linear average and the paper's rule. `calibrate` also calibrates the merge on four
    prompts per expert, into `folder`/calibrated.
    """
    folder, started = Path(folder), time.perf_counter()
    logger.info("reading %s", MODEL_ID)
    base = build_base(folder / Path(MODEL_ID).name)
    adapters = {name: SUITE / "adapters" / name for name in EXPERTS}
    tasks = {name: read_task(SUITE / "data" / name / "test.jsonl") for name in EXPERTS}
    tokenizer = AutoTokenizer.from_pretrained(base)
    first = {name: task.questions[0] for name, task in tasks.items()}
    prompts = [question.prompt for question in first.values()]

    merged = folder / "merged"
    logger.info("merging %d adapters into %s", len(adapters), merged)
    merger = CoramMerger(base, adapters, CoramConfig.recommended(), progress=False)
    merger.check(merged, overwrite=_is_ours(merged))
    best = merger.merge(keep_update=calibrate)
    best.save_pretrained(merged)

    def scored(row: str, model: PreTrainedModel) -> dict[str, Score]:
        logger.info("asking %d questions: %s", questions * len(EXPERTS), row)
        return {name: score(model, tokenizer, tasks[name], questions) for name in EXPERTS}

    def other(method: str) -> PreTrainedModel:
        choice = find_method(method).choose({})
        return Merger(merger.inputs, choice, progress=False).merge(keep_update=False).model

    before = _load(base)
    rows = {"base": scored("base", before)}
    said = _answers(before, tokenizer, prompts)
    logger.info("asking %d questions: each expert on its own task", questions * len(EXPERTS))
    rows["each expert on its task"] = _score_experts(before, tokenizer, adapters, tasks, questions)
    rows[PLAIN] = scored(PLAIN, other("linear"))
    rows[PAPER] = scored(PAPER, other("coram"))
    after = best.model
    rows[BEST] = scored(BEST, after)
    then = f"coram-hf demo -o {folder} --calibrate"
    took, made = None, {BEST: merged}
    if calibrate:
        merged, began, busy = folder / "calibrated", time.perf_counter(), time.process_time()
        logger.info("calibrating on four prompts per task, into %s", merged)
        after = _calibrated(best, merged)
        took = {"seconds": time.perf_counter() - began, "processor seconds": time.process_time() - busy}
        rows[FITTED] = scored(FITTED, after)
        made[FITTED] = merged
        test = SUITE / "data" / EXPERTS[0] / "test.jsonl"
        then = f"coram-hf eval {merged} --tasks {test} --limit {questions}"
    numbers = diagnose_inputs(merger.inputs, merged=made, progress=False)
    write_whole(folder / "report.html", render_page(numbers))
    answers = [
        Answer(name, " ".join(question.prompt.split()), was, now, question.right.strip())
        for (name, question), was, now in zip(
            first.items(), said, _answers(after, tokenizer, prompts), strict=True
        )
    ]
    return Outcome(merged, rows, answers, time.perf_counter() - started, then, took)


def _calibrated(best: MergeResult, folder: Path) -> PreTrainedModel:
    """The merge calibrated on a few prompts that are in neither the training nor the test data."""
    result = best.calibrate(SUITE / "prompts", granularity="expert", answer_line=True, progress=False)
    result.save_pretrained(folder)
    return result.model


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds the merge of an earlier demo, and may be replaced."""
    try:
        return set(MergeReport.load(folder).relative_updates) == set(EXPERTS)
    except (OSError, ValueError):
        return False


def _load(folder: Path) -> PreTrainedModel:
    return cast(PreTrainedModel, AutoModelForCausalLM.from_pretrained(folder, dtype="auto"))


def _score_experts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    adapters: dict[str, Path],
    tasks: dict[str, Task],
    questions: int,
) -> dict[str, Score]:
    """Every expert on its own task; the adapters take turns on one base."""
    found, adapted = {}, None
    for name, adapter in adapters.items():
        if adapted is None:
            adapted = PeftModel.from_pretrained(model, adapter, adapter_name=name)
        else:
            adapted.load_adapter(adapter, name)
        adapted.set_adapter(name)
        found[name] = score(cast(PreTrainedModel, adapted), tokenizer, tasks[name], questions)
    return found


def _answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[str]:
    """What the model answers, up to the end of the line."""
    asked = [text_tokens(tokenizer, prompt) for prompt in prompts]
    said = greedy(model.eval(), tokenizer, asked, ANSWER)
    return [str(tokenizer.decode(row, skip_special_tokens=True)).partition("\n")[0].strip() for row in said]
