"""A light scorer: the share of questions that a causal language model gets right, in a few seconds per task.

A task is a file of JSON lines. A line with `target` asks for exactly that text: every one of its tokens, and
then a newline, must be the model's first choice, as in greedy decoding. A line with
`choices` and `answer` asks which choice is the most likely.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.errors import CoramError
from coram_hf.inputs.text import batches, context_length, padded, text_tokens

logger = logging.getLogger("coram_hf")

BATCH_TOKENS = 1024
"""Tokens in one forward pass; their logits over the vocabulary are what takes memory."""


class Question(NamedTuple):
    """A prompt, what may follow it, and which of these is right; a single choice must be matched exactly."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Task:
    """A named list of questions."""

    name: str
    questions: tuple[Question, ...]


class Score(NamedTuple):
    """How many questions were right."""

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.total

    @property
    def standard_error(self) -> float:
        """sqrt(p (1 - p) / n)."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.total)


def read_task(path: str | Path) -> Task:
    """The task of one .jsonl file, named after it; test.jsonl and validation.jsonl after their folder."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise CoramError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    questions = tuple(_question(line, f"{path}, line {number}") for number, line in numbered)
    if not questions:
        raise CoramError(f"{path}: holds no questions")
    return Task(path.resolve().parent.name if path.stem in ("test", "validation") else path.stem, questions)


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, limit: int | None = None
) -> Score:
    """How many of the task's first `limit` questions the model gets right."""
    check_limit(limit)
    questions = task.questions[:limit]
    pairs = [(question.prompt, text) for question in questions for text in _texts(question)]
    encoded = [_encoded(tokenizer, prompt, text, f"task {task.name!r}") for prompt, text in pairs]
    _check_length(model, encoded, task.name)
    training = model.training
    found = list(_continuations(model.eval(), encoded))
    model.train(training)
    undefined = sum(math.isnan(one.log_likelihood) for one in found)
    if undefined:
        logger.warning("task %r: %d of %d answers of the model are NaN", task.name, undefined, len(found))
    answers = iter(found)
    return Score(sum(_is_right(question, answers) for question in questions), len(questions))


def check_limit(limit: int | None) -> None:
    """Raise unless the limit is a number of questions, or None for all."""
    if limit is not None and (type(limit) is not int or limit < 1):
        raise CoramError(f"limit must be a positive number of questions, found {limit!r}")


class _Continuation(NamedTuple):
    """How likely a text is after its prompt, and whether greedy decoding would produce it."""

    log_likelihood: float
    greedy: bool


@dataclass(frozen=True)
class _Encoded:
    """The tokens of a prompt and of the text after it."""

    before: list[int]
    after: list[int]

    def __len__(self) -> int:
        return len(self.before) + len(self.after)


def _texts(question: Question) -> tuple[str, ...]:
    return question.choices if len(question.choices) > 1 else (question.choices[0] + "\n",)


def _is_right(question: Question, found: Iterator[_Continuation]) -> bool:
    """A model whose numbers are NaN is never right."""
    mine = [next(found) for _ in question.choices]
    if any(math.isnan(one.log_likelihood) for one in mine):
        return False
    if len(mine) == 1:
        return mine[0].greedy
    return max(range(len(mine)), key=lambda i: mine[i].log_likelihood) == question.answer


def _encoded(tokenizer: PreTrainedTokenizerBase, prompt: str, text: str, where: str) -> _Encoded:
    """The tokens of a prompt and text together; of the text alone if it would change the prompt's tokens."""
    before, whole = text_tokens(tokenizer, prompt), text_tokens(tokenizer, prompt + text)
    after = whole[len(before) :]
    if whole[: len(before)] != before:
        after = tokenizer(text, add_special_tokens=False).input_ids
    for name, tokens, of in (("prompt", before, prompt), ("answer", after, text)):
        if not tokens:
            raise CoramError(f"{where}: the {name} {of[:40]!r} has no tokens in the model's vocabulary")
    return _Encoded(before, after)


def _check_length(model: PreTrainedModel, encoded: Sequence[_Encoded], task: str) -> None:
    most = context_length(model)
    longest = max(len(tokens) for tokens in encoded)
    if most is not None and longest > most:
        raise CoramError(
            f"task {task!r}: a question has {longest} tokens, but the model takes {most}; shorten it"
        )


def _continuations(model: PreTrainedModel, encoded: Sequence[_Encoded]) -> Iterator[_Continuation]:
    """One continuation per prompt and text, in order; a causal model does not see padding on the right.

    Nothing is predicted after the last token, so choices of one token share a forward pass.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, tokens in enumerate(encoded):
        alike.setdefault((*tokens.before, *tokens.after[:-1]), []).append(i)
    inputs = list(alike)
    found: dict[int, _Continuation] = {}
    for batch in batches([len(row) for row in inputs], BATCH_TOKENS):
        rows = [inputs[i] for i in batch]
        ids, mask = padded(rows)
        with torch.inference_mode():
            output: Any = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device))
        for place, row in enumerate(rows):
            for i in alike[row]:
                logits = output.logits[place, len(encoded[i].before) - 1 : len(row)]
                found[i] = _judge(logits, torch.tensor(encoded[i].after, device=logits.device))
    return (found[i] for i in range(len(encoded)))


def _judge(logits: Tensor, tokens: Tensor) -> _Continuation:
    logits = logits.float()
    likelihoods = logits.log_softmax(-1).gather(-1, tokens[:, None])
    return _Continuation(float(likelihoods.sum()), bool((logits.argmax(-1) == tokens).all()))


def _question(line: str, where: str) -> Question:
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CoramError(f"{where}: is not JSON ({error})") from None
    match found:
        case {"prompt": str(prompt), "target": str(target), **rest} if not rest and _all_text(prompt, target):
            return Question(prompt, (target,), 0)
        case {"prompt": str(prompt), "choices": [_, _, *_] as choices, "answer": answer, **rest} if (
            type(answer) is int and not rest and _all_text(prompt, *choices)
        ):
            if 0 <= answer < len(choices):
                return Question(prompt, tuple(choices), answer)
            raise CoramError(
                f"{where}: answer {answer} is not one of the {len(choices)} choices, counted from 0"
            )
    raise CoramError(
        f'{where}: must be {{"prompt", "target"}} or {{"prompt", "choices" (two or more), "answer"}}, '
        f"with non-empty text for all but answer, which is an integer"
    )


def _all_text(*values: object) -> bool:
    """Whether all are non-empty text; half of a surrogate pair is not text."""
    return all(
        isinstance(value, str) and value and not any("\ud800" <= c <= "\udfff" for c in value)
        for value in values
    )
