"""Factors fitted to the experts' answers: Adam on their logarithms, stopped by answers that are held back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from coram_hf.calibration.divergence import Passage, Taught
from coram_hf.calibration.surrogate import Surrogate

PASSAGES = 4
"""Answers per teacher in one step; the answers take turns."""

BETAS = (0.8, 0.95)
LAST_RATE = 0.2
"""Adam's betas, low because steps are few, and the fraction of the learning rate left at the last step."""

CHECK, PATIENCE = 5, 3
"""Steps between checks on the held-back answers, and checks without a lower loss before a fit stops."""

SMALLEST, LARGEST = 1 / 64, 8.0
HELD_BACK = 0.25

Step = Callable[[], object]


class Fitted(NamedTuple):
    """Logarithms of the factors, and the loss with them on the answers that were held back."""

    log_c: Tensor
    held_back: float


def fit(
    surrogate: Surrogate,
    start: Tensor,
    steps: int,
    rate: float,
    fitted_to: Taught,
    held_back: Taught,
    step_done: Step = lambda: None,
) -> Fitted:
    """The best factors on the way of Adam from `start`, by the loss on what is held back.

    `start` holds logarithms per expert, or per expert and group of modules. Without answers held back, the
    loss on the others decides.
    """
    log_c = start.detach().double().clone().requires_grad_(True)
    adam = torch.optim.Adam([log_c], lr=rate, betas=BETAS)
    judge, turns = held_back or fitted_to, _turns(fitted_to)

    best, since = Fitted(log_c.detach().clone(), surrogate.loss(surrogate.columns(log_c), judge)), 0
    for step in range(1, steps + 1):
        adam.param_groups[0]["lr"] = rate * (1 - (1 - LAST_RATE) * (step - 1) / steps)
        c = surrogate.columns(log_c)
        _, by_c = surrogate.gradient(c, next(turns))
        (log_c.grad,) = torch.autograd.grad(c, log_c, by_c)
        adam.step()
        with torch.no_grad():
            log_c.clamp_(math.log(SMALLEST), math.log(LARGEST))
        step_done()
        if step % CHECK == 0 or step == steps:
            found = Fitted(log_c.detach().clone(), surrogate.loss(surrogate.columns(log_c), judge))
            best, since = (found, 0) if found.held_back < best.held_back else (best, since + 1)
        if since >= PATIENCE:
            break
    return best


def _turns(taught: Taught) -> Iterator[dict[str, list[Passage]]]:
    """Endless batches with a few passages of every teacher."""
    for step in count():
        yield {
            name: [
                passages[(step * PASSAGES + i) % len(passages)] for i in range(min(PASSAGES, len(passages)))
            ]
            for name, passages in taught.items()
        }


def hold_back(taught: Taught, seed: int) -> tuple[dict[str, list[Passage]], dict[str, list[Passage]]]:
    """The answers to fit to, and a quarter of every teacher's that is held back; a single one is not."""
    generator = torch.Generator().manual_seed(seed)
    fitted_to, held = {}, {}
    for name, passages in taught.items():
        order = torch.randperm(len(passages), generator=generator).tolist()
        held_count = 0 if len(passages) == 1 else max(1, round(HELD_BACK * len(passages)))
        chosen = set(order[:held_count])
        fitted_to[name] = _picked(passages, [i for i in range(len(passages)) if i not in chosen])
        if chosen:
            held[name] = _picked(passages, sorted(chosen))
    return fitted_to, held


def _picked(passages: Sequence[Passage], indices: Sequence[int]) -> list[Passage]:
    return [passages[i] for i in indices]
