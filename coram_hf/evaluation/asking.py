"""How a question becomes tokens: few-shot examples, the chat template, and the processor for images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from coram_hf.errors import CoramError, reason
from coram_hf.evaluation.questions import Question, Task
from coram_hf.inputs.text import without_end

Reader = PreTrainedTokenizerBase | ProcessorMixin
"""What turns text, or text with images, into the inputs of a model."""

BETWEEN = "\n\n"
"""Between few-shot examples."""


@dataclass(frozen=True)
class Asked:
    """The tokens of a prompt and of the text after it."""

    before: list[int]
    after: list[int]

    def __len__(self) -> int:
        return len(self.before) + len(self.after)


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt, and what ends an exact answer to it."""

    text: str
    end: str = "\n"

    def continuations(self, question: Question, chat: bool) -> tuple[str, ...]:
        """The texts that may follow; behind a chat template answers have no space before them."""
        choices = tuple(choice.lstrip() if chat else choice for choice in question.choices)
        return choices if len(choices) > 1 else (choices[0] + self.end,)


class Asker:
    """The questions of a task in the words and tokens of one model."""

    def __init__(self, task: Task, reader: Reader) -> None:
        self._task, self._reader = task, reader
        self._tokenizer: Any = tokenizer_of(reader)
        self._where = f"task {task.name!r}"
        self._mark = str(getattr(reader, "image_token", None) or "")
        if task.has_images:
            if getattr(reader, "image_processor", None) is None:
                raise CoramError(f"{self._where} has images, but the model has no image processor")
            if not task.chat and not self._mark:
                raise CoramError(f"{self._where}: the processor has no image token; ask with chat=1")
        if task.chat and self._template is None:
            raise CoramError(f"{self._where}: the tokenizer has no chat template; ask with chat=0")

    @property
    def identity(self) -> tuple[str, ...]:
        """What decides the tokens beyond the vocabulary: the chat template and the image processor."""
        processor: Any = getattr(self._reader, "image_processor", None)
        return (
            *([str(self._template.chat_template)] if self._task.chat else []),
            *([processor.to_json_string()] if self._task.has_images else []),
        )

    def prompt(self, question: Question) -> Prompt:
        """The whole text before an answer."""
        if self._task.chat:
            return self._chat(question)
        shots = (f"{self._marked(shot)}{shot.right}{BETWEEN}" for shot in self._task.shots)
        return Prompt("".join(shots) + self._marked(question))

    def ask(self, question: Question) -> list[Asked]:
        """The tokens of a question's prompt with each of the texts that may follow."""
        prompt = self.prompt(question)
        texts = prompt.continuations(question, self._task.chat)
        return [self._asked(prompt.text, text) for text in texts]

    def with_images(self, question: Question, asked: Sequence[Asked]) -> Iterator[dict[str, Tensor]]:
        """A model's inputs for each text but its last token: those of the prompt, made longer.

        The processor puts as many tokens in the place of an image as the model has for it, all of them in
        the prompt; token types are 0 for text.
        """
        pictures = [picture.open() for shot in (*self._task.shots, question) for picture in shot.images]
        text = self.prompt(question).text
        reader: Any = self._reader
        try:
            found = reader(
                text=[text],
                images=pictures or None,
                return_tensors="pt",
                add_special_tokens=not self._task.chat,
            )
        except Exception as error:  # every model has a processor of its own
            raise CoramError(f"{self._where}: the processor failed on a question: {reason(error)}") from error
        tensors = {key: value for key, value in found.items() if isinstance(value, Tensor)}
        shape = tensors["input_ids"].shape
        length = len(without_end(self._tokenizer, tensors["input_ids"][0].tolist(), text))
        for one in asked:
            tail = one.after[:-1]
            ends = {"input_ids": tail, "attention_mask": [1] * len(tail)}
            yield {
                key: torch.cat([value[:, :length], value.new_tensor([ends.get(key, [0] * len(tail))])], dim=1)
                if value.shape == shape
                else value
                for key, value in tensors.items()
            }

    @property
    def _template(self) -> Any:
        """The processor or the tokenizer, whichever has a chat template."""
        both = (self._reader, self._tokenizer)
        return next((one for one in both if getattr(one, "chat_template", None)), None)

    def _marked(self, question: Question) -> str:
        """The prompt after a line with a mark for every image, unless it has marks of its own."""
        if not question.images or self._mark in question.prompt:
            return question.prompt
        return f"{self._mark}\n" * len(question.images) + question.prompt

    def _chat(self, question: Question) -> Prompt:
        """User and assistant take turns; an exact answer ends as the template ends a turn."""
        turns = [turn for shot in self._task.shots for turn in (self._user(shot), self._assistant(shot))]
        turns.append(self._user(question))
        text = self._rendered(turns, add_generation_prompt=True)
        whole = self._rendered([*turns, self._assistant(question)], add_generation_prompt=False)
        start = text + question.right.strip()
        end = whole[len(start) :].rstrip() if whole.startswith(start) else ""
        return Prompt(text, end or str(self._tokenizer.eos_token or "\n"))

    def _user(self, question: Question) -> dict[str, Any]:
        return {"role": "user", "content": self._content(question.prompt, len(question.images))}

    def _assistant(self, question: Question) -> dict[str, Any]:
        return {"role": "assistant", "content": self._content(question.right.strip(), 0)}

    def _content(self, text: str, images: int) -> str | list[dict[str, str]]:
        if not self._task.has_images:
            return text
        return [*([{"type": "image"}] * images), {"type": "text", "text": text}]

    def _rendered(self, turns: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        try:
            return str(
                self._template.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except Exception as error:  # a template may run any code
            raise CoramError(f"{self._where}: the chat template failed: {reason(error)}") from error

    def _asked(self, prompt: str, text: str) -> Asked:
        """The tokens of a prompt and text together; of the text alone if it would change the prompt's."""
        before, whole = self._tokens(prompt), self._tokens(prompt + text)
        after = whole[len(before) :]
        if whole[: len(before)] != before:
            after = self._tokenizer(text, add_special_tokens=False).input_ids
        for name, tokens, of in (("prompt", before, prompt), ("answer", after, text)):
            if not tokens:
                raise CoramError(
                    f"{self._where}: the {name} {of[:40]!r} has no tokens in the model's vocabulary"
                )
        return Asked(before, after)

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=not self._task.chat).input_ids
        return without_end(self._tokenizer, tokens, text)


def tokenizer_of(reader: Reader) -> PreTrainedTokenizerBase:
    """The tokenizer of a processor, or the tokenizer itself."""
    if isinstance(reader, ProcessorMixin):
        found: PreTrainedTokenizerBase = reader.tokenizer
        return found
    return reader
