"""Generation health: do the answers of a merged model end, keep to the prompt's script, and not repeat?"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from coram_hf.calibration.teachers import greedy
from coram_hf.config import CalibrationConfig
from coram_hf.errors import CoramError
from coram_hf.evaluation.folder import load_model, load_tokenizer
from coram_hf.execution.device import compute_device
from coram_hf.execution.progress import Progress
from coram_hf.inputs.text import text_tokens

FOREIGN = re.compile("[\u0400-\u052f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]")
"""Cyrillic letters, and characters of Chinese, Japanese and Korean."""

FEWEST = 5
"""Such characters in an answer that make it foreign, if its prompt has none."""

WORDS, TIMES = 5, 3
"""An answer repeats itself if some words in a row, so many, occur so many times."""


@dataclass(frozen=True)
class Health:
    """Shares of answers, and their mean length.

    foreign: with five or more CJK or Cyrillic characters, of those whose prompt has none (None if all have).
    unended: those that reached the longest length allowed.
    """

    answers: int
    foreign: float | None
    mean_tokens: float
    empty: float
    repeats: float
    unended: float

    def to_dict(self) -> dict[str, Any]:
        """The numbers by name."""
        return asdict(self)


def health(prompts: Sequence[str], answers: Sequence[str], lengths: Sequence[int], most: int) -> Health:
    """The health of answers, with their lengths in tokens, of which at most `most` were allowed."""
    plain = [answer for prompt, answer in zip(prompts, answers, strict=True) if not FOREIGN.search(prompt)]
    return Health(
        answers=len(answers),
        foreign=mean(len(FOREIGN.findall(answer)) >= FEWEST for answer in plain) if plain else None,
        mean_tokens=mean(lengths),
        empty=mean(not answer.strip() for answer in answers),
        repeats=mean(map(repeats, answers)),
        unended=mean(length >= most for length in lengths),
    )


def repeats(answer: str) -> bool:
    """Whether five words in a row occur three times."""
    words = answer.split()
    runs = Counter(tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1))
    return max(runs.values(), default=0) >= TIMES


def generate_health(
    folder: str | Path,
    prompts: str | Path,
    *,
    limit: int | None = None,
    max_tokens: int = 256,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> Health:
    """Let the model of a folder answer prompts greedily, as a chat if it has a template.

    `prompts`: a .jsonl file; each line is a text, or has the key `prompt`.
    """
    texts = read_texts(Path(prompts))[:limit]
    tokenizer = load_tokenizer(Path(folder), trust_remote_code)
    model = load_model(Path(folder), trust_remote_code).eval()
    place = compute_device(device)
    if place is not None:
        cast(Any, model).to(place)
    config = CalibrationConfig(answer_tokens=max_tokens, answer_line=False)
    with Progress("generate", len(texts), progress, unit="answers") as bar:
        rows = greedy(model, tokenizer, [_tokens(tokenizer, text) for text in texts], config, bar.add)
    said = [str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]
    return health(texts, said, list(map(len, rows)), max_tokens)


def read_texts(path: Path) -> list[str]:
    """The prompts of a .jsonl file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise CoramError(f"--generate: {path} cannot be read as JSON lines: {error}") from error
    texts = [row.get("prompt") if isinstance(row, dict) else row for row in rows]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise CoramError(f"--generate: each line of {path} must be a text or have the key 'prompt'")
    return [str(text) for text in texts]


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    if not tokenizer.chat_template:
        return text_tokens(tokenizer, text)
    turns = [{"role": "user", "content": text}]
    chat = str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    return list(tokenizer(chat, add_special_tokens=False).input_ids)
