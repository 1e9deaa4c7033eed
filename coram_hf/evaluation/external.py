"""Scores of other harnesses: a command that is run on the folder of a model, and results in JSON."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from coram_hf.config import check_names
from coram_hf.errors import CoramError, reason
from coram_hf.evaluation.memory import digest
from coram_hf.report.eval_results import Result

FIELDS = ("value", "standard_error", "outcomes", "questions", "metric")
LAST = 300
"""Characters of a failed command's output in the message."""


@dataclass(frozen=True)
class CommandScorer:
    """A command line with {model}, {output} and maybe {seed}; it writes {output}, a score for every task."""

    run: str
    parts: tuple[str, ...]
    folder: Path
    seed: int = 0

    @property
    def name(self) -> str:
        return self.parts[0]

    @property
    def identity(self) -> str:
        return digest("command", self.run, self.parts, self.seed if self.sampled else None)

    @property
    def sampled(self) -> bool:
        """Whether the command's answers depend on a seed."""
        return "{seed}" in self.run

    def __call__(self, model: PreTrainedModel, reader: Any, /) -> list[Result]:
        with tempfile.TemporaryDirectory() as parent:
            folder, output = Path(parent) / "model", Path(parent) / "scores.json"
            model.save_pretrained(folder)
            reader.save_pretrained(folder)
            filled = {"{model}": str(folder), "{output}": str(output), "{seed}": str(self.seed)}
            words = [_filled(word, filled) for word in shlex.split(self.run)]
            try:
                done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=False)
            except OSError as error:
                raise CoramError(f"command {words[0]!r} cannot be run: {reason(error)}") from None
            if done.returncode != 0:
                said = " ".join((done.stderr or done.stdout).split())[-LAST:]
                raise CoramError(f"command {words[0]!r} failed with exit code {done.returncode}: {said}")
            try:
                found = json.loads(output.read_text(encoding="utf-8"))
                values = {task: found[task] for task in self.parts}
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CoramError(
                    f"command {words[0]!r} must write {', '.join(self.parts)} as JSON to {{output}}: "
                    f"{reason(error)}"
                ) from None
        return [read_result(task, value, f"command {words[0]!r}", words[0]) for task, value in values.items()]


def _filled(word: str, values: dict[str, str]) -> str:
    for mark, value in values.items():
        word = word.replace(mark, value)
    return word


def read_result(task: str, value: Any, where: str, scorer: str) -> Result:
    """A result from a number, or from its value with what else is known; scores are shares, from 0 to 1."""
    found = value if isinstance(value, dict) else {"value": value}
    check_names(found, FIELDS, f"key of {where}, task {task!r}")
    outcomes = tuple(float(one) for one in found.get("outcomes") or ())
    number = found.get("value", sum(outcomes) / len(outcomes) if outcomes else None)
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number <= 1:
        raise CoramError(f"{where}, task {task!r}: must be a number from 0 to 1, found {number!r}")
    if outcomes and abs(sum(outcomes) / len(outcomes) - number) > 1e-6:
        raise CoramError(f"{where}, task {task!r}: value {number} is not the mean of its outcomes")
    error = found.get("standard_error")
    if error is None and len(outcomes) > 1:
        spread = math.fsum((one - number) ** 2 for one in outcomes) / (len(outcomes) - 1)
        error = math.sqrt(spread / len(outcomes))
    questions = int(found.get("questions", len(outcomes)))
    return Result(task, str(found.get("metric", "score")), float(number), error, questions, scorer, outcomes)
