"""Layer-wise retention: how much of the experts' update each group of modules keeps in the merge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GROUPS = ("q", "k", "v", "o", "gate", "up", "down", "embed", "norm", "other")
NAMES = {
    "q": ("q_proj", "query", "q"),
    "k": ("k_proj", "key", "k"),
    "v": ("v_proj", "value", "v"),
    "o": ("o_proj", "out_proj", "o"),
    "gate": ("gate_proj", "wi_0", "w1"),
    "up": ("up_proj", "wi_1", "w3", "fc1", "c_fc"),
    "down": ("down_proj", "wo", "w2", "fc2"),
    "embed": ("embed_tokens", "lm_head", "wte", "wpe", "word_embeddings", "shared"),
}


def module_group(name: str) -> str:
    """The group of a parameter, by the name of its module."""
    parts = name.split(".")
    module = parts[-2] if parts[-1] in ("weight", "bias") and len(parts) > 1 else parts[-1]
    for group, names in NAMES.items():
        if module in names:
            return group
    if "norm" in module or module.startswith("ln_"):
        return "norm"
    return "embed" if "embed" in module else "other"


@dataclass(frozen=True)
class Retained:
    """Squared norms by parameter: of the merged update (0 if missing), and of every expert's update."""

    moved: Mapping[str, float]
    updates: Mapping[str, Sequence[float]]

    def by_group(self) -> dict[str, float]:
        """r_group = |W_merge - W_0| / RMS_i |W_i - W_0| over all tensors of a group.

        Groups that no expert changed are left out.
        """
        merged = dict.fromkeys(GROUPS, 0.0)
        experts = dict.fromkeys(GROUPS, 0.0)
        for name, squares in self.updates.items():
            group = module_group(name)
            merged[group] += self.moved.get(name, 0.0)
            experts[group] += math.fsum(squares) / len(squares)
        return {group: math.sqrt(merged[group] / experts[group]) for group in GROUPS if experts[group] > 0}
