"""A light scorer: the share of questions that a language model gets right, in a few seconds per task.

A question with `target` asks for exactly that text: every one of its tokens, and then a newline (or the end
of the turn, behind a chat template), must be the model's first choice, as in greedy decoding. A question with
`choices` and `answer` asks which choice is the most likely.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.errors import CoramError
from coram_hf.evaluation.asking import Asked, Asker, Reader
from coram_hf.evaluation.questions import Question, Task
from coram_hf.inputs.text import batches, context_length, last_logits, padded

logger = logging.getLogger("coram_hf")

BATCH_TOKENS = 1024
"""Tokens in one forward pass; their logits over the vocabulary are what takes memory."""


@dataclass(frozen=True)
class Score:
    """How many questions were right, and which."""

    correct: int
    total: int
    outcomes: tuple[bool, ...] = field(default=(), compare=False)

    @property
    def accuracy(self) -> float:
        return self.correct / self.total

    @property
    def standard_error(self) -> float:
        """sqrt(p (1 - p) / n)."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.total)


def score(model: PreTrainedModel, reader: Reader, task: Task, limit: int | None = None) -> Score:
    """How many of the task's first `limit` questions the model gets right.

    `reader`: the model's tokenizer, or its processor for a task with images.
    """
    check_limit(limit)
    questions, asker = task.questions[:limit], Asker(task, reader)
    training = model.training
    find = _with_images if task.has_images else _from_text
    found = list(find(model.eval(), asker, questions, task.name))
    model.train(training)
    undefined = sum(math.isnan(one.log_likelihood) for one in found)
    if undefined:
        logger.warning("task %r: %d of %d answers of the model are NaN", task.name, undefined, len(found))
    answers = iter(found)
    outcomes = tuple(_is_right(question, answers) for question in questions)
    return Score(sum(outcomes), len(outcomes), outcomes)


def check_limit(limit: int | None) -> None:
    """Raise unless the limit is a number of questions, or None for all."""
    if limit is not None and (type(limit) is not int or limit < 1):
        raise CoramError(f"limit must be a positive number of questions, found {limit!r}")


class _Continuation(NamedTuple):
    """How likely a text is after its prompt, and whether greedy decoding would produce it."""

    log_likelihood: float
    greedy: bool


def _is_right(question: Question, found: Iterator[_Continuation]) -> bool:
    """A model whose numbers are NaN is never right."""
    mine = [next(found) for _ in question.choices]
    if any(math.isnan(one.log_likelihood) for one in mine):
        return False
    if len(mine) == 1:
        return mine[0].greedy
    return max(range(len(mine)), key=lambda i: mine[i].log_likelihood) == question.answer


def _from_text(
    model: PreTrainedModel, asker: Asker, questions: Sequence[Question], task: str
) -> Iterator[_Continuation]:
    asked = [one for question in questions for one in asker.ask(question)]
    _check_length(model, max(map(len, asked)), task)
    return _continuations(model, asked)


def _with_images(
    model: PreTrainedModel, asker: Asker, questions: Sequence[Question], task: str
) -> Iterator[_Continuation]:
    """One forward pass per text: processors pad images in their own ways."""
    for question in questions:
        asked = asker.ask(question)
        for one, inputs in zip(asked, asker.with_images(question, asked), strict=True):
            _check_length(model, inputs["input_ids"].shape[1] + 1, task)
            placed = {
                key: value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)
                for key, value in inputs.items()
            }
            with torch.inference_mode():
                output: Any = model(**placed)
            logits = output.logits[0, -len(one.after) :]
            yield _judge(logits, torch.tensor(one.after, device=logits.device))


def _check_length(model: PreTrainedModel, longest: int, task: str) -> None:
    most = context_length(model)
    if most is not None and longest > most:
        raise CoramError(
            f"task {task!r}: a question has {longest} tokens, but the model takes {most}; shorten it"
        )


def _continuations(model: PreTrainedModel, encoded: Sequence[Asked]) -> Iterator[_Continuation]:
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
        first = min(len(encoded[i].before) for row in rows for i in alike[row]) - 1
        with torch.inference_mode():
            output = last_logits(model, ids, mask, ids.shape[1] - first)
        for place, row in enumerate(rows):
            for i in alike[row]:
                logits = output[place, len(encoded[i].before) - 1 - first : len(row) - first]
                found[i] = _judge(logits, torch.tensor(encoded[i].after, device=logits.device))
    return (found[i] for i in range(len(encoded)))


def _judge(logits: Tensor, tokens: Tensor) -> _Continuation:
    logits = logits.float()
    likelihoods = logits.log_softmax(-1).gather(-1, tokens[:, None])
    return _Continuation(float(likelihoods.sum()), bool((logits.argmax(-1) == tokens).all()))
