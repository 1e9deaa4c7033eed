"""Models saved in folders, and folders compared with each other."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from helpers.models import fine_tuned, tiny_llama
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = ("*.safetensors", "*.index.json", "config.json", "generation_config.json")


class Sources(NamedTuple):
    """Where a base and its experts are: what mergers take, in their order."""

    base: Path
    experts: dict[str, Path]


def on_disk(
    folder: Path,
    base: PreTrainedModel | None = None,
    experts: Sequence[float] | Mapping[str, float | nn.Module] = (0.03, 0.05),
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> Sources:
    """Save a base in `folder/base`, and its experts in folders of their names beside it.

    An expert is a model, an adapter, or the size of the noise that fine-tunes the base; without names they
    are e0, e1, ... Options go to `save_pretrained`.
    """
    base = tiny_llama() if base is None else base
    named = experts if isinstance(experts, Mapping) else {f"e{i}": size for i, size in enumerate(experts)}
    base.save_pretrained(folder / "base", **options)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "base")
    for seed, (name, expert) in enumerate(named.items()):
        model = expert if isinstance(expert, nn.Module) else fine_tuned(base, expert, seed)
        model.save_pretrained(folder / name, **options)
    return Sources(folder / "base", {name: folder / name for name in named})


def contents(folder):
    return {path.name: path.read_bytes() for pattern in WEIGHTS for path in folder.glob(pattern)}


def assert_same_files(found, expected):
    assert contents(found).keys() == contents(expected).keys()
    for name, data in contents(expected).items():
        assert contents(found)[name] == data, name


def tensors_of(folder):
    return {k: t for path in folder.glob("*.safetensors") for k, t in load_file(path).items()}


def assert_same_tensors(found, expected):
    ours, theirs = tensors_of(found), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
