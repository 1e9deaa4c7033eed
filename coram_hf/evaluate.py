"""A light scorer: the share of questions that a causal language model gets right, a few seconds a task.

A task is a file of JSON lines. A line with `target` asks for exactly that text: every one of its tokens, and
then a newline, must be the model's first choice, which is what greedy decoding would say. A line with
`choices` and `answer` asks which choice is the most likely.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH_TOKENS = 1024
"""Tokens in one forward pass; their logits over the vocabulary are what takes memory."""


class Question(NamedTuple):
    """A prompt, what may follow it, and which of these is right; a lone choice must be said exactly."""

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
    """The task of one .jsonl file, named after it."""
    path = Path(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    questions = tuple(_question(line, f"{path}, line {number}") for number, line in numbered)
    if not questions:
        raise ValueError(f"{path}: holds no questions")
    return Task(path.stem, questions)


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, limit: int | None = None
) -> Score:
    """How many of the task's first `limit` questions the model gets right."""
    questions = task.questions[:limit]
    found = _continuations(model, tokenizer, [(q.prompt, choice) for q in questions for choice in _texts(q)])
    correct = 0
    for question in questions:
        mine = [next(found) for _ in question.choices]
        if len(mine) == 1:
            correct += mine[0].greedy
        else:
            correct += max(range(len(mine)), key=lambda i: mine[i].log_likelihood) == question.answer
    return Score(correct, len(questions))


class _Continuation(NamedTuple):
    """How likely a text is after its prompt, and whether greedy decoding would say it."""

    log_likelihood: float
    greedy: bool


def _texts(question: Question) -> tuple[str, ...]:
    return question.choices if len(question.choices) > 1 else (question.choices[0] + "\n",)


def _continuations(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]
) -> Iterator[_Continuation]:
    """One for every (prompt, text), in order; padding on the right is not seen by a causal model."""
    encoded = []
    for prompt, text in pairs:
        before = tokenizer(prompt).input_ids
        after = tokenizer(text, add_special_tokens=False).input_ids
        encoded.append((before, after))
    found: dict[int, _Continuation] = {}
    model.eval()
    for batch in _batches([len(before) + len(after) for before, after in encoded]):
        width = max(len(encoded[i][0]) + len(encoded[i][1]) for i in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, i in enumerate(batch):
            ids = encoded[i][0] + encoded[i][1]
            tokens[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        with torch.inference_mode():
            output: Any = model(input_ids=tokens.to(model.device), attention_mask=mask.to(model.device))
        for row, i in enumerate(batch):
            before, after = encoded[i]
            logits = output.logits[row, len(before) - 1 : len(before) + len(after) - 1]
            found[i] = _judge(logits, torch.tensor(after, device=logits.device))
    return (found[i] for i in range(len(pairs)))


def _judge(logits: Tensor, tokens: Tensor) -> _Continuation:
    logits = logits.float()
    likelihoods = logits.log_softmax(-1).gather(-1, tokens[:, None])
    return _Continuation(float(likelihoods.sum()), bool((logits.argmax(-1) == tokens).all()))


def _batches(lengths: Sequence[int]) -> Iterable[list[int]]:
    """Indices in batches of like length, so that little of a batch is padding."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _question(line: str, where: str) -> Question:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: is not JSON ({error})") from None
    match found:
        case {"prompt": str(prompt), "target": str(target), **rest} if prompt and target and not rest:
            return Question(prompt, (target,), 0)
        case {"prompt": str(prompt), "choices": [_, _, *_] as choices, "answer": int(answer), **rest} if (
            prompt and not rest and all(isinstance(c, str) and c for c in choices)
        ):
            if 0 <= answer < len(choices):
                return Question(prompt, tuple(choices), answer)
            raise ValueError(f"{where}: answer {answer} is not one of the {len(choices)} choices")
    raise ValueError(
        f'{where}: must be {{"prompt", "target"}} or {{"prompt", "choices" (two or more), "answer"}}, '
        f"all of them text but the number of the answer"
    )
