"""Groups of modules: attention or MLP, in the first, second or last third of the depth."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from coram_hf.config.factors import THIRDS

ATTENTION = ("attention", "attn", "mixer")
"""Words in the classes of modules that mix tokens; all others of a block count as its MLP."""


def find_groups(model: PreTrainedModel, names: Iterable[str]) -> dict[str, int]:
    """The index in GROUPS of every named parameter that is inside a list of blocks.

    Blocks are counted in the outermost list that holds them, so an encoder and a decoder each have thirds.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {}
    for name in names:
        path = name.split(".")
        for depth, key in enumerate(path):
            blocks = modules.get(".".join(path[:depth]))
            if isinstance(blocks, nn.ModuleList) and key.isdecimal():
                inside = [modules[".".join(path[:end])] for end in range(depth + 1, len(path))]
                part = 0 if any(map(_is_attention, inside)) else 1
                third = len(THIRDS) * int(key) // len(blocks)
                found[name] = part * len(THIRDS) + third
                break
    return found


def _is_attention(module: nn.Module) -> bool:
    word = type(module).__name__.lower()
    return isinstance(module, nn.MultiheadAttention) or any(known in word for known in ATTENTION)
