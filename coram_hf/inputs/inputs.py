"""Inputs: the weights of one merge, opened once and shared by merges, comparisons, sweeps and diagnostics."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.config import Factors, Place, Position, factors_in
from coram_hf.inputs.files import fingerprint
from coram_hf.inputs.groups import find_layers, find_positions
from coram_hf.inputs.heads import Head
from coram_hf.inputs.kinds import find_kinds
from coram_hf.inputs.parent_card import provenance
from coram_hf.inputs.placement import Placement
from coram_hf.inputs.quantized import stored_quantized
from coram_hf.inputs.surroundings import Surroundings
from coram_hf.inputs.transplant import Transplant
from coram_hf.inputs.vocabulary import Vocabulary
from coram_hf.inputs.weights import Target, Weights


class Matrix(NamedTuple):
    """One matrix (output neurons x inputs) of a parameter, in the base and in every expert."""

    name: str
    base: Tensor
    experts: list[Tensor]


class Parameter:
    """One parameter of the base and of all experts, each computed at most once, on first use.

    target: the layout of its matrices, if it is merged geometrically.
    device: where it is merged; methods move some rows or a matrix there at a time. None: where the base is.
    """

    device: torch.device | None = None

    def __init__(self, inputs: Inputs, name: str) -> None:
        self.name = name
        self.target = inputs.targets.get(name)
        self._inputs = inputs

    @cached_property
    def base(self) -> Tensor:
        """W_0."""
        grown = self._by_token and self._inputs.vocabulary.grows
        return self._aligned[0] if grown else self._inputs.base[self.name]

    @cached_property
    def experts(self) -> list[Tensor]:
        """W_1 .. W_N, with vocabulary rows aligned with the base's."""
        return self._aligned[1] if self._by_token else list(self._stored().values())

    @property
    def _by_token(self) -> bool:
        return self.name in self._inputs.vocabulary.token_axis

    def _stored(self) -> dict[str, Tensor]:
        return {name: weights[self.name] for name, weights in self._inputs.experts.items()}

    @cached_property
    def _aligned(self) -> tuple[Tensor, list[Tensor]]:
        return self._inputs.vocabulary.align(self.name, self._inputs.base[self.name], self._stored())

    def matrices(self) -> Iterator[Matrix]:
        """The matrices of a target, whatever its layout; any other parameter is returned unchanged."""
        if self.target is None:
            yield Matrix(self.name, self.base, self.experts)
            return
        stacked = zip(*(self.target.matrices(t) for t in (self.base, *self.experts)), strict=True)
        for i, (base, *experts) in enumerate(stacked):
            yield Matrix(self.name if self.base.ndim == 2 else f"{self.name}[{i}]", base, experts)


@dataclass(frozen=True)
class Inputs:
    """A base and the named experts fine-tuned from it, opened and checked.

    targets: the parameters that are merged geometrically; outside: all other floating-point tensors;
    frozen: the rest, which stay as in the base.
    surroundings: tokenizer, chat template and generation config, where they are not the base's.
    dtype: that of the result, by default the base's. device: where all matrices are merged, if it was given.
    placement: of the base, and so of the result; None: a model that accelerate has not placed.
    told: options to record in the report; files_told: the files and folders that options name.
    heads: those of the experts to save beside the merged backbone.
    """

    base: Weights
    experts: Mapping[str, Weights]
    vocabulary: Vocabulary
    targets: Mapping[str, Target]
    outside: tuple[str, ...]
    frozen: tuple[str, ...]
    surroundings: Surroundings = field(default_factory=Surroundings)
    warnings: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    placement: Placement | None = None
    trust_remote_code: bool = False
    told: Mapping[str, Any] | None = None
    files_told: Mapping[str, Path] = field(default_factory=dict)
    heads: Mapping[str, Head] = field(default_factory=dict)

    @property
    def model(self) -> PreTrainedModel:
        """The model of the base."""
        return self.base.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of the merged model, if it is not the one stored with the base."""
        return self.surroundings.tokenizer

    @cached_property
    def kinds(self) -> dict[str, str]:
        """What every parameter is: attention, MLP, norm and so on; see `find_kinds`."""
        return find_kinds(self.model)

    @cached_property
    def positions(self) -> dict[str, Position]:
        """Where every parameter inside a block is."""
        return find_positions(self.layers, self.kinds)

    @cached_property
    def layers(self) -> dict[str, tuple[int, int]]:
        """The layer of every parameter inside a list of blocks, and the number of layers there."""
        return find_layers(self.model, self.kinds)

    def place(self, name: str) -> Place:
        """Where a parameter is, for weights and parameters that differ by layer and module."""
        layer, count = self.layers.get(name, (0, 2))
        return Place(name, layer / (count - 1) if count > 1 else 1.0)

    def factors(self, factors: Factors, name: str) -> tuple[float, ...]:
        """Which of the given factors apply to a parameter, in expert order."""
        return factors_in(factors, self.positions.get(name))

    @property
    def library(self) -> str:
        """The library that loads the result."""
        return "transformers" if self.surroundings.modules is None else "sentence-transformers"

    @property
    def floating(self) -> tuple[str, ...]:
        """The names of all floating-point tensors, targets first."""
        return (*self.targets, *self.outside)

    @property
    def new_size(self) -> int | None:
        """The number of rows of the merged vocabulary if it grows, else None."""
        return self.vocabulary.size if self.vocabulary.grows else None

    @property
    def original_format(self) -> bool:
        """Whether weights are saved in the layout of the base's checkpoint; not if that was quantised."""
        return stored_quantized(self.model) is None

    def device_of(self, name: str) -> torch.device:
        """Where a parameter is merged: as given, on the execution device of its module, or where it lies."""
        if self.device is not None:
            return self.device
        first = self.base.tied.get(name, name)
        if self.placement is not None:
            return self.placement.execution(first)
        lies = self.base.original(first).device
        return torch.device("cpu") if lies.type == "meta" else lies

    @property
    def devices(self) -> list[torch.device]:
        """All devices on which parameters are merged, in the order of the parameters."""
        return list(dict.fromkeys(self.device_of(name) for name in self.base))

    @property
    def members(self) -> tuple[str, ...]:
        """The experts that are the base itself, as in an average of models that includes the base."""
        return tuple(n for n, w in self.experts.items() if w.files and w.files == self.base.files)

    def named(self) -> Iterator[tuple[str, Weights]]:
        """The base, under an empty name, and the experts."""
        yield "", self.base
        yield from self.experts.items()

    def parameter(self, name: str) -> Parameter:
        """One parameter, whose weights are computed on first use."""
        return Parameter(self, name)

    def expert_tensor(self, expert: str, name: str) -> Tensor:
        """One tensor of one expert, with the rows of the merged vocabulary."""
        if self.vocabulary.grown(name):
            return self.parameter(name).experts[list(self.experts).index(expert)]
        return self.vocabulary.align(name, self.base[name], {expert: self.experts[expert][name]})[1][0]

    def prefetch(self, name: str) -> None:
        """Start reading a parameter from the disk, without waiting for it."""
        for _, weights in self.named():
            weights.prefetch(name)

    def files(self) -> list[Path]:
        """Every file that is read, and the folders that in-memory models were loaded from."""
        models = [read for _, weights in self.named() for read in weights.read_from]
        loaded = [Path(m.model.name_or_path) for m in models if not m.files and m.model.name_or_path]
        return [*(path for m in models for path in m.files), *(path for path in loaded if path.is_dir())]

    def sources(self) -> dict[str, dict[str, Any]]:
        """Where base and experts come from; unknown for experts trained in memory from the base."""
        found = {name: provenance(weights.read_from[0]) for name, weights in self.named()}
        for name, weights in self.experts.items():
            if not weights.read_from[0].files and weights.location == self.base.location:
                found[name] = {"source": None, "hub": False, "commit": None, "files": None}
        for name, transplant in self.transplants.items():
            found[name]["base"] = provenance(transplant.own)
        return found

    @property
    def transplants(self) -> dict[str, Transplant]:
        """For experts with a base of their own, what of their updates was matched with this base."""
        return {name: w.transplant for name, w in self.experts.items() if w.transplant is not None}

    def places(self) -> dict[str, str]:
        """Where base, experts, their own bases and files that options name can be opened again.

        That is a repository at a commit, or a local path.
        """
        moved = self.transplants
        found = {name: moved[name].expert if name in moved else weights for name, weights in self.named()}
        found |= {base_of(name): transplant.own for name, transplant in moved.items()}
        known = {name: place for name, weights in found.items() if (place := weights.place) is not None}
        return known | {file_of(option): str(path) for option, path in self.files_told.items()}

    def identity(self) -> dict[str, Any] | None:
        """A fingerprint of the inputs, so that changes are noticed; None if a model is only in memory."""
        if not all(weights.files for _, weights in self.named()):
            return None
        return {
            "dtype": str(self.dtype),
            "devices": [str(device) for device in self.devices],
            "vocabulary": self._vocabulary_hash(),
            "surroundings": dict(self.surroundings.said),
            "files": {name: [fingerprint(path) for path in w.files] for name, w in self.named()},
        }

    def _vocabulary_hash(self) -> str:
        """A hash of how the rows of the vocabularies are aligned."""
        vocabulary = self.vocabulary
        digest = hashlib.sha256(repr((vocabulary.size, vocabulary.new_rows.tolist())).encode())
        for name, rows in sorted(vocabulary.rows.items()):
            digest.update(repr((name, rows.tolist())).encode())
        for name, transplant in sorted(self.transplants.items()):
            digest.update(repr((name, transplant.alignment)).encode())
        return digest.hexdigest()


def base_of(name: str) -> str:
    """The name of an expert's own base among the places of the inputs."""
    return f"base of {name}"


def file_of(option: str) -> str:
    """The name of an option's file among the places of the inputs."""
    return f"file of {option}"
