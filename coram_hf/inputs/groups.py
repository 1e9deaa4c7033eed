"""Positions of parameters: their layer, and whether they belong to its attention or its MLP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from transformers import PreTrainedModel

from coram_hf.config import Position

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


def find_positions(layers: Mapping[str, tuple[int, int]], kinds: Mapping[str, str]) -> dict[str, Position]:
    """Where every parameter is, given with its kind, that is inside a list of blocks."""
    return {
        name: Position(0 if kinds[name] in TOKEN_MIXERS else 1, layer, count)
        for name, (layer, count) in layers.items()
    }
