"""What a model's questions are read with: its tokenizer, and its processor for tasks with images."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, PreTrainedTokenizerBase

from coram_hf.errors import CoramError, reason
from coram_hf.evaluation.asking import Reader
from coram_hf.evaluation.tasks import Scorer


class Readers:
    """The tokenizer of a model, and its processor, which is loaded if a task needs it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, load_processor: Callable[[], Reader]) -> None:
        self.tokenizer = tokenizer
        self._load_processor = load_processor

    @cached_property
    def _processor(self) -> Reader:
        return self._load_processor()

    def of(self, task: Scorer) -> Reader:
        """The processor for a task with images, else the tokenizer."""
        return self._processor if getattr(task, "needs_processor", False) else self.tokenizer

    def check(self, tasks: Iterable[Scorer]) -> None:
        """Raise for a task whose questions cannot be asked, before any model is made."""
        for task in tasks:
            self.identity(task)

    def identity(self, task: Scorer) -> tuple[str, ...]:
        """What decides how questions are asked, beside the vocabulary: chat template, image processor."""
        check = getattr(task, "check", None)
        found: tuple[str, ...] = check(self.of(task)) if check is not None else ()
        return found


def load_processor(folder: str | Path, trust_remote_code: bool) -> Reader:
    """The processor of a model's folder; without the files of one, transformers returns a tokenizer."""
    try:
        found: Any = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # other people's files fail in many ways
        hint = "" if find_spec("torchvision") else "; it may need torchvision, which is not installed"
        raise CoramError(
            f"{folder} has no processor that loads ({reason(error)}), which tasks with images need{hint}"
        ) from error
    if getattr(found, "image_processor", None) is None:
        raise CoramError(
            f"{folder} has no processor, which tasks with images need; copy that of the base into it"
        )
    reader: Reader = found
    return reader
