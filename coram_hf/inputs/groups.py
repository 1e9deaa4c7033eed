"""Positions of parameters: their layer, and their group, attention or MLP in a third of the depth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from transformers import PreTrainedModel

from coram_hf.config.factors import THIRDS

TOKEN_MIXERS = ("attention", "mixer")
"""Kinds that mix tokens; all others of a block count with its MLP."""


def find_layers(model: PreTrainedModel, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """The layer of every parameter inside a list of blocks, and how many layers that list has.

    Blocks are counted in the outermost list that holds them, so an encoder and a decoder are counted apart.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {}
    for name in names:
        path = name.split(".")
        for depth, key in enumerate(path):
            blocks = modules.get(".".join(path[:depth]))
            if isinstance(blocks, nn.ModuleList) and key.isdecimal():
                found[name] = int(key), len(blocks)
                break
    return found


def find_groups(layers: Mapping[str, tuple[int, int]], kinds: Mapping[str, str]) -> dict[str, int]:
    """The index in GROUPS of every parameter, given with its kind, that is inside a list of blocks."""
    return {
        name: (0 if kinds[name] in TOKEN_MIXERS else 1) * len(THIRDS) + len(THIRDS) * layer // count
        for name, (layer, count) in layers.items()
    }
