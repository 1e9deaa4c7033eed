"""A merged update as a LoRA adapter: the leading singular directions of every matrix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from coram_hf.errors import CoramError
from coram_hf.inputs.internals import KEY_PREFIX
from coram_hf.inputs.weights import Weights

ROUNDING = 1e-12
"""Values below this fraction of the largest, or of a matrix's norm, are rounding errors."""


@dataclass(frozen=True)
class LowRank:
    """The rank kept for one matrix, and its error |update - B A| / |update|."""

    rank: int
    error: float


def write_lora(
    folder: Path,
    base: Weights,
    updates: Iterable[tuple[str, Tensor]],
    *,
    rank: int | None,
    energy: float,
) -> dict[str, LowRank]:
    """Write update ~ B A for every matrix, of the given rank or the lowest that keeps `energy` of |update|^2.

    Matrices that the merge did not change, up to rounding, get no adapter.
    """
    state: dict[str, Tensor] = {}
    kept: dict[str, LowRank] = {}
    transposed = set()
    for name, update in updates:
        module, _, parameter = name.rpartition(".")
        if update.norm() <= ROUNDING * base[name].norm():
            continue
        layer = base.model.get_submodule(module)
        if not isinstance(layer, nn.Linear | Conv1D) or parameter != "weight":
            raise CoramError(
                f"{name!r} belongs to a {type(layer).__name__}, but LoRA adapters support linear layers only"
            )
        transposed.add(isinstance(layer, Conv1D))
        A, B, kept[module] = _factor(update.mT if isinstance(layer, Conv1D) else update, rank, energy)
        state[f"{KEY_PREFIX}{module}.lora_A.weight"] = A
        state[f"{KEY_PREFIX}{module}.lora_B.weight"] = B
    if not kept:
        raise CoramError("the merged update is zero: there is nothing for an adapter to store")
    ranks = {module: found.rank for module, found in kept.items()}
    highest = max(ranks.values())
    config = LoraConfig(
        r=highest,
        lora_alpha=highest,
        target_modules=list(ranks),
        rank_pattern=ranks,
        alpha_pattern=ranks,
        fan_in_fan_out=transposed == {True},
        base_model_name_or_path=base.location,
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: t for k, t in state.items() if t.numel()}, folder / "adapter_model.safetensors", {"format": "pt"}
    )
    config.save_pretrained(str(folder))
    return kept


def _factor(update: Tensor, rank: int | None, energy: float) -> tuple[Tensor, Tensor, LowRank]:
    """A = sqrt(S) V^T (r x in) and B = U sqrt(S) (out x r), from the r leading singular directions."""
    U, S, Vh = torch.linalg.svd(update.double(), full_matrices=False)
    shares = S.square().cumsum(0) / S.square().sum()
    r = min(rank or int((shares < energy).sum()) + 1, int((S > ROUNDING * S[0]).sum()))
    root = S[:r].sqrt()
    error = float(S[r:].norm() / S.norm())
    A, B = root[:, None] * Vh[:r], U[:, :r] * root
    return A.float().contiguous(), B.float().contiguous(), LowRank(r, error)
