"""Groups of modules: attention or MLP, in the first, second or last third of the depth."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from coram_hf.config.factors import THIRDS

TOKEN_MIXERS = ("attention", "mixer")
"""Kinds that mix tokens; all others of a block count with its MLP."""


def find_groups(model: PreTrainedModel, kinds: Mapping[str, str]) -> dict[str, int]:
    """The index in GROUPS of every parameter, given with its kind, that is inside a list of blocks.

    Blocks are counted in the outermost list that holds them, so an encoder and a decoder each have thirds.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {}
    for name, kind in kinds.items():
        path = name.split(".")
        for depth, key in enumerate(path):
            blocks = modules.get(".".join(path[:depth]))
            if isinstance(blocks, nn.ModuleList) and key.isdecimal():
                part = 0 if kind in TOKEN_MIXERS else 1
                found[name] = part * len(THIRDS) + len(THIRDS) * int(key) // len(blocks)
                break
    return found
