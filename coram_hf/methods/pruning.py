"""Shared by methods that keep a part of each update: random draws, and the norm of what is left."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from coram_hf.geometry.slices import as_rows
from coram_hf.methods.updates import Updates

NEGLIGIBLE = 1e-7
"""L1 norm below which an update is not rescaled, as in mergekit."""


def norm_growth(tau: Tensor, kept: Tensor) -> float:
    """|tau|_1 / |kept|_1, which gives what is kept of tau the norm of tau; 1 if either is negligible."""
    before, after = float(tau.abs().sum()), float(kept.abs().sum())
    return 1.0 if min(before, after) < NEGLIGIBLE else before / after


def draw(updates: Updates, i: int, seed: int) -> Tensor:
    """Uniform numbers in [0, 1) for the entries of tau_i."""
    drawn = torch.rand(updates.base.shape, generator=generator(updates, i, seed))
    return as_rows(drawn).to(updates.base.device)


def generator(updates: Updates, i: int, seed: int) -> torch.Generator:
    """Draws the numbers for the entries of tau_i in order, seeded by sha256 of "seed/name/i".

    They do not depend on the order in which tensors are merged, nor on how many are drawn at a time.
    """
    digest = hashlib.sha256(f"{seed}/{updates.name}/{i}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
