"""Tasks of the light scorer: questions with one exact answer, or with choices, and how they are asked."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from coram_hf.errors import CoramError, reason

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Picture:
    """An image as it is stored; its representation is a hash of its bytes."""

    data: bytes

    def open(self) -> Image:
        """The image in RGB."""
        from PIL import Image

        try:
            return Image.open(io.BytesIO(self.data)).convert("RGB")
        except Exception as error:  # other people's files fail in many ways
            raise CoramError(f"an image cannot be read: {reason(error)}") from error

    def __repr__(self) -> str:
        return f"Picture({hashlib.sha256(self.data).hexdigest()})"


class Question(NamedTuple):
    """A prompt, what may follow it, and which of these is right; a single choice must be matched exactly."""

    prompt: str
    choices: tuple[str, ...]
    answer: int
    images: tuple[Picture, ...] = ()

    @property
    def right(self) -> str:
        """The right choice."""
        return self.choices[self.answer]


@dataclass(frozen=True)
class Task:
    """A named list of questions.

    chat: whether they are asked through the chat template. shots: solved questions that come before each.
    """

    name: str
    questions: tuple[Question, ...]
    chat: bool = False
    shots: tuple[Question, ...] = ()

    @cached_property
    def has_images(self) -> bool:
        return any(question.images for question in (*self.questions, *self.shots))


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
    return Task(name_of_file(path), questions)


def name_of_file(path: Path) -> str:
    """The name of a file without its ending; of a folder if the file is only called after a split."""
    return path.resolve().parent.name if path.stem in ("test", "validation") else path.stem


def is_text(value: object) -> bool:
    """Whether a value is non-empty text; half of a surrogate pair is not text."""
    return isinstance(value, str) and bool(value) and not any("\ud800" <= c <= "\udfff" for c in value)


def _question(line: str, where: str) -> Question:
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CoramError(f"{where}: is not JSON ({error})") from None
    match found:
        case {"prompt": prompt, "target": target, **rest} if not rest and is_text(prompt) and is_text(target):
            return Question(prompt, (target,), 0)
        case {"prompt": prompt, "choices": [_, _, *_] as choices, "answer": answer, **rest} if (
            type(answer) is int and not rest and all(map(is_text, (prompt, *choices)))
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
