"""Merge the five adapters of the suite in three ways, score them, and show what the best merge answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.config import CalibrationConfig, CoramConfig
from coram_hf.demo.base import MODEL_ID, build_base
from coram_hf.evaluation.light import Score, score
from coram_hf.evaluation.questions import Task, read_task
from coram_hf.merger import CoramMerger, Merger
from coram_hf.methods.registry import find_method
from coram_hf.outputs.files import write_whole
from coram_hf.report import MergeReport
from coram_hf.report.diagnostics import diagnose_inputs
from coram_hf.report.page import render_page
from coram_hf.report.tables import markdown as table

SUITE = Path(__file__).parent
EXPERTS = ("clock", "initials", "order", "sql", "triage")
"""The even suite: each names an adapter and the task that it was trained for."""

OTHERS = {"linear average": "linear", "CORAM, the paper's rule": "coram"}
BEST = "CORAM, recommended"


def run_demo(folder: str | Path, questions: int, *, calibrate: bool = False) -> Path:
    """Merge into `folder`/merged with the recommended config, print scores and answers, return that folder.

    `calibrate` also calibrates the merge on four prompts per expert, into `folder`/calibrated.
    """
    folder, started = Path(folder), time.perf_counter()
    base = build_base(folder / Path(MODEL_ID).name)
    adapters = {name: SUITE / "adapters" / name for name in EXPERTS}
    tasks = {name: read_task(SUITE / "data" / name / "test.jsonl") for name in EXPERTS}
    tokenizer = AutoTokenizer.from_pretrained(base)

    merged = folder / "merged"
    print(f"merging {len(adapters)} adapters of {MODEL_ID} into {merged}")
    merger = CoramMerger(base, adapters, CoramConfig.recommended(), progress=False)
    report = merger.merge_to(merged, overwrite=_is_ours(merged))
    print(f"D {report.dispersion:.2f}, kappa {report.kappa:g}, lambda {report.lam:.3f}\n")
    numbers = diagnose_inputs(merger.inputs, merged={BEST: merged}, progress=False)
    write_whole(folder / "report.html", render_page(numbers))

    def scored(model: PreTrainedModel) -> dict[str, Score]:
        return {name: score(model, tokenizer, tasks[name], questions) for name in EXPERTS}

    before = _load(base)
    rows = {"base": scored(before)}
    rows["each expert on its task"] = _score_experts(before, tokenizer, adapters, tasks, questions)
    for title, method in OTHERS.items():
        other = Merger(merger.inputs, find_method(method).choose({}), progress=False)
        rows[title] = scored(other.merge(keep_update=False).model)
    after, shown = _load(merged), BEST
    rows[shown] = scored(after)
    if calibrate:
        merged, shown = folder / "calibrated", "CORAM, calibrated"
        after = _calibrated(base, adapters, merged)
        rows[shown] = scored(after)
    print(_scores(rows))
    error = sum(found.standard_error**2 for found in rows[shown].values()) ** 0.5 / len(EXPERTS)
    print(f"percent right of {questions} held-out questions per task; the last average +- {error:.1%}\n")
    print(_answers(after, tokenizer, tasks))
    seconds = time.perf_counter() - started
    print(
        f"\n{merged} holds the model and its card, {folder / 'report.html'} shows the merge; {seconds:.0f} s"
    )
    if not calibrate:
        print("next: coram-hf demo --calibrate, which fits the merge to four unlabelled prompts per task")
    return merged


def _calibrated(base: Path, adapters: dict[str, Path], folder: Path) -> PreTrainedModel:
    """The merge calibrated on a few prompts that are in neither the training nor the test data."""
    started = time.perf_counter()
    how = CalibrationConfig(granularity="expert", answer_line=True)
    prompts, config = SUITE / "prompts", CoramConfig.recommended()
    result = CoramMerger(base, adapters, config, calibrate=prompts, calibration=how).merge(keep_update=False)
    result.save_pretrained(folder)
    found = result.report.calibration
    counts = f"{sum(found['prompts'].values())} prompts in {time.perf_counter() - started:.0f} s"
    print(f"calibrated on {counts}: lambda {result.report.lam:g}, factors {found['factors']}\n")
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


def _scores(rows: dict[str, dict[str, Score]]) -> str:
    cells = []
    for row, found in rows.items():
        shares = [score.accuracy for score in found.values()]
        cells.append([row, *(f"{100 * share:.0f}" for share in (*shares, sum(shares) / len(shares)))])
    return table(["", *EXPERTS, "average"], cells)


def _answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: dict[str, Task]) -> str:
    """The first question of every task, what the model answers, and what is right."""
    rows = []
    for task in tasks.values():
        question = task.questions[0]
        asked = question.prompt.replace("\n", " ")
        right = question.choices[question.answer].strip()
        rows.append([asked, _answer(model, tokenizer, question.prompt).strip(), right])
    return table(["question", "the merge's answer", "right answer"], rows)


def _answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """What the model answers, up to the end of the line."""
    asked: Any = tokenizer(prompt, return_tensors="pt")
    generate = cast(Any, model).generate
    said = generate(**asked, max_new_tokens=24, do_sample=False)[0][asked.input_ids.shape[1] :]
    return str(tokenizer.decode(said, skip_special_tokens=True)).partition("\n")[0]
