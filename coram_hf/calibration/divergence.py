"""The loss of calibration: how far a merge is from each expert on that expert's own answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.inputs.text import batches, logits_at, padded

BATCH_TOKENS = 512
"""Tokens in one forward pass, forward and backward."""

IMPOSSIBLE = -1e4
"""Stands for log 0, of which differences are not defined."""


@dataclass(frozen=True)
class Passage:
    """What a teacher said after a prompt, and log p of the whole vocabulary at each of its places."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    log_p: Tensor

    def __len__(self) -> int:
        return len(self.before) + len(self.after)


Taught = Mapping[str, Sequence[Passage]]
"""The passages of every teacher, by its name."""


def log_probabilities(
    model: PreTrainedModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Iterator[list[tuple[int, Tensor]]]:
    """log q at the places of the second tokens after the first, a batch of texts at a time.

    Each is (tokens x vocabulary), in float32 (float64 for such models), with the index of its text.
    """
    rows = [[*before, *after[:-1]] for before, after in texts]
    for batch in batches([len(row) for row in rows], BATCH_TOKENS):
        counts = [len(texts[i][1]) for i in batch]
        columns = [
            torch.arange(len(rows[i]) - count, len(rows[i])) for i, count in zip(batch, counts, strict=True)
        ]
        places = torch.arange(len(batch)).repeat_interleave(torch.tensor(counts))
        logits = logits_at(model, *padded([rows[i] for i in batch]), places, torch.cat(columns))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_q = wide.log_softmax(-1).clamp_min(IMPOSSIBLE)
        yield list(zip(batch, log_q.split(counts), strict=True))


def divergences(model: PreTrainedModel, passages: Sequence[Passage]) -> Iterator[list[tuple[int, Tensor]]]:
    """sum over tokens of KL(p || q) = sum_v p_v (log p_v - log q_v), a batch of passages at a time."""
    for batch in log_probabilities(model, [(passage.before, passage.after) for passage in passages]):
        found = []
        for i, log_q in batch:
            log_p = passages[i].log_p.to(log_q.device)
            found.append((i, (log_p.exp() * (log_p - log_q)).sum()))
        yield found


def divergence(model: PreTrainedModel, taught: Taught) -> dict[str, float]:
    """The mean over tokens of KL(p_i || p_merge), by teacher."""
    found: dict[str, list[float]] = {name: [] for name in taught}
    names = [name for name, passages in taught.items() for _ in passages]
    with torch.inference_mode():
        for batch in divergences(model, [passage for passages in taught.values() for passage in passages]):
            for i, total in batch:
                found[names[i]].append(float(total))
    return {name: math.fsum(found[name]) / _tokens(passages) for name, passages in taught.items()}


def mean_divergence(found: Mapping[str, float]) -> float:
    """The mean over teachers: each weighs the same."""
    return math.fsum(found.values()) / len(found)


def passage_weights(taught: Taught) -> list[float]:
    """By which factor the KL of each passage counts in `mean_divergence`: 1 / (teachers * its tokens)."""
    return [
        1 / (len(taught) * _tokens(passages)) for passages in taught.values() for _ in range(len(passages))
    ]


def _tokens(passages: Sequence[Passage]) -> int:
    return sum(len(passage.after) for passage in passages)
