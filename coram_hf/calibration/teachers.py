"""Teachers: every expert answers its own prompts, and its probabilities are kept for the merge to match."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from coram_hf.calibration.divergence import BATCH_TOKENS, Passage, log_probabilities
from coram_hf.calibration.neutral import SENTENCES
from coram_hf.calibration.prompts import Prompt, Prompts, PromptSources, read_prompts
from coram_hf.config import CalibrationConfig
from coram_hf.errors import CoramError
from coram_hf.execution.progress import Progress
from coram_hf.inputs.companions import find_tokenizer
from coram_hf.inputs.dense import fast_layers
from coram_hf.inputs.inputs import Inputs
from coram_hf.inputs.text import batches, context_length, padded, text_tokens
from coram_hf.outputs.memory import expert_model, new_model

Tokens = Mapping[str, Sequence[list[int]]]
"""The tokens of every prompt, by teacher."""


class Lessons:
    """The prompts of a calibration, checked before any model answers them."""

    def __init__(self, inputs: Inputs, given: PromptSources, config: CalibrationConfig) -> None:
        self.tokenizer = find_text(inputs, "calibrate", "choose lambda by a sweep on tasks instead")
        self.prompts: Prompts = read_prompts(given, list(inputs.experts), config)
        self._inputs, self._config = inputs, config
        encode = partial(_encode, self.tokenizer, chat=config.chat)
        self._tokens: Tokens = {
            name: [encode(prompt, name) for prompt in prompts] for name, prompts in self.prompts.of.items()
        }
        _check_lengths(inputs.model, self._tokens, config.answer_tokens)

    def teach(self, progress: bool) -> dict[str, list[Passage]]:
        """The answers of every teacher, one model in memory at a time."""
        taught, total = {}, sum(map(len, self._tokens.values()))
        with Progress("calibrate: answers", total, progress, unit="answers") as bar:
            for name, rows in self._tokens.items():
                model = self._model(name)
                answers = greedy(model, self.tokenizer, rows, self._config, bar.add)
                taught[name] = passages(model, list(zip(rows, answers, strict=True)))
        return taught

    def neutral(self) -> list[Passage]:
        """The neutral sentences with the base's probabilities."""
        return neutral_passages(self._inputs, self.tokenizer)

    def _model(self, name: str) -> PreTrainedModel:
        """An expert, or the base."""
        is_expert = name in self._inputs.experts
        return placed(
            expert_model(self._inputs, name) if is_expert else new_model(self._inputs), self._inputs
        )


def neutral_passages(inputs: Inputs, tokenizer: PreTrainedTokenizerBase) -> list[Passage]:
    """The neutral sentences with the base's probabilities of every token after the first."""
    rows = [text_tokens(tokenizer, sentence) for sentence in SENTENCES]
    model = placed(new_model(inputs), inputs)
    return passages(model, [(row[:1], row[1:]) for row in rows if len(row) > 1])


def find_text(inputs: Inputs, purpose: str, remedy: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that continues text; raises, naming purpose and remedy, for other models."""
    model = inputs.model
    if not model.can_generate() or getattr(model.config, "is_encoder_decoder", False):
        raise CoramError(
            f"{purpose} needs a decoder that continues text, and {type(model).__name__} is not one; {remedy}"
        )
    found = inputs.tokenizer or find_tokenizer(inputs.base, inputs.trust_remote_code)
    if found is None:
        raise CoramError(
            f"{purpose}: the base has no tokenizer; save one beside it, or pass tokenizer= to the merger"
        )
    return found


def placed(model: PreTrainedModel, inputs: Inputs) -> PreTrainedModel:
    """A model on the device of the merge, if one was given, ready to be asked."""
    if inputs.device is not None and inputs.placement is None:
        cast(Any, model).to(inputs.device)
    return model.eval()


def passages(model: PreTrainedModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Passage]:
    """Texts with the model's own log-probabilities at the places of their second tokens."""
    found: dict[int, Tensor] = {}
    with torch.inference_mode():
        for batch in log_probabilities(model, texts):
            found |= {i: log_p.cpu() for i, log_p in batch}
    return [Passage(tuple(before), tuple(after), found[i].clone()) for i, (before, after) in enumerate(texts)]


class LineEnd(StoppingCriteria):
    """Ends an answer with the first token that has a newline in it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def ends(self, token: int) -> bool:
        return "\n" in str(self._tokenizer.decode([token]))

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        ended = [self.ends(token) for token in input_ids[:, -1].tolist()]
        return torch.tensor(ended, device=input_ids.device)


def greedy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    config: CalibrationConfig,
    done: Callable[[int], object] = lambda answers: None,
) -> list[list[int]]:
    """The most likely token, one after the other, up to and including the end of the answer.

    Nothing of the model's own generation settings is used but the tokens that end a text.
    """
    ends = _end_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
    line = LineEnd(tokenizer) if config.answer_line else None
    own = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=config.answer_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
    )
    answers: dict[int, list[int]] = {}
    for batch in batches([len(row) + config.answer_tokens for row in prompts], BATCH_TOKENS):
        tokens, mask = padded([prompts[i] for i in batch], left=True)
        with fast_layers():
            said = cast(Any, model).generate(
                input_ids=tokens.to(model.device),
                attention_mask=mask.to(model.device),
                stopping_criteria=StoppingCriteriaList([line] if line else []),
            )
        for i, row in zip(batch, said[:, tokens.shape[1] :].tolist(), strict=True):
            answers[i] = _until_end(row, ends, line)
        done(len(batch))
    model.generation_config = own
    return [answers[i] for i in range(len(prompts))]


def _until_end(row: list[int], ends: set[int], line: LineEnd | None) -> list[int]:
    """The tokens up to and including the first that ends an answer."""
    for i, token in enumerate(row):
        if token in ends or (line is not None and line.ends(token)):
            return row[: i + 1]
    return row


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    own = getattr(model.generation_config, "eos_token_id", None)
    several = own if isinstance(own, list | tuple) else [own]
    return {int(token) for token in (*several, tokenizer.eos_token_id) if token is not None}


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, who: str, *, chat: bool) -> list[int]:
    """The tokens of a prompt: those of its text, or of a chat up to where the answer begins."""
    if isinstance(prompt, str) and not chat:
        tokens = text_tokens(tokenizer, prompt)
    else:
        if not tokenizer.chat_template:
            raise CoramError(
                f"calibrate: the prompts of {who!r} are a chat, but the tokenizer has no chat template; "
                "set one, or give plain prompts without chat"
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        text = tokenizer.apply_chat_template(cast(Any, messages), add_generation_prompt=True, tokenize=False)
        tokens = tokenizer(str(text), add_special_tokens=False).input_ids
    if not tokens:
        raise CoramError(f"calibrate: a prompt of {who!r} has no tokens in the model's vocabulary")
    return list(tokens)


def _check_lengths(model: PreTrainedModel, tokens: Tokens, answer: int) -> None:
    most = context_length(model)
    for name, rows in tokens.items():
        longest = max(map(len, rows))
        if most is not None and longest + answer > most:
            raise CoramError(
                f"calibrate: a prompt of {name!r} has {longest} tokens, which with an answer of {answer} is "
                f"more than the {most} that the model takes; shorten it"
            )
