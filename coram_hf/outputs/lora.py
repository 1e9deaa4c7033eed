"""A merged update as a LoRA adapter: the leading singular directions of every matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from coram_hf.config import AdapterOptions
from coram_hf.errors import CoramError
from coram_hf.geometry import squared_norm
from coram_hf.inputs.inputs import Parameter
from coram_hf.inputs.internals.marks import KEY_PREFIX
from coram_hf.inputs.weights import Target, Weights
from coram_hf.methods.protocol import Block, Work
from coram_hf.methods.record import Record
from coram_hf.outputs.place import InMemory, KeptPlace, Place, Written

ROUNDING = 1e-12
"""Values below this fraction of the largest, or of a matrix's norm, are rounding errors."""


@dataclass(frozen=True)
class LowRank:
    """One matrix as it is stored: A (r x in) and B (out x r), |update|^2, and |update - B A|^2."""

    A: Tensor
    B: Tensor
    square: float
    lost: float

    @property
    def rank(self) -> int:
        return len(self.A)

    @property
    def error(self) -> float:
        """|update - B A| / |update|."""
        return float((self.lost / self.square) ** 0.5)


class LoraAdapter:
    """update ~ B A for every matrix, of the given rank or the lowest that keeps `energy` of |update|^2.

    Matrices that the merge did not change, up to rounding, get no adapter. kept: the others, by module.
    """

    def __init__(self, base: Weights, options: AdapterOptions) -> None:
        self.kept: dict[str, LowRank] = {}
        self._base, self._options = base, options
        self._transposed: set[bool] = set()

    def add(self, name: str, update: Tensor) -> Written:
        """Factor the update of one parameter, which must be the weight of a linear layer."""
        module, _, parameter = name.rpartition(".")
        if update.norm() <= ROUNDING * self._base[name].norm():
            return Written()
        layer = self._base.model.get_submodule(module)
        if not isinstance(layer, nn.Linear | Conv1D) or parameter != "weight":
            raise CoramError(
                f"{name!r} belongs to a {type(layer).__name__}, but LoRA adapters support linear layers only"
            )
        self._transposed.add(isinstance(layer, Conv1D))
        found = _factor(update.mT if isinstance(layer, Conv1D) else update, self._options)
        self.kept[module] = found
        return Written(found.square, found.lost)

    def save(self, folder: Path) -> None:
        """Write adapter_model.safetensors and adapter_config.json."""
        from peft import LoraConfig

        kept = {module: self.kept[module] for module in sorted(self.kept)}
        if not kept:
            raise CoramError("the merged update is zero: there is nothing for an adapter to store")
        ranks = {module: found.rank for module, found in kept.items()}
        highest, kind = max(ranks.values()), type(self._base.model)
        config = LoraConfig(
            r=highest,
            lora_alpha=highest,
            target_modules=list(ranks),
            rank_pattern=ranks,
            alpha_pattern=ranks,
            fan_in_fan_out=self._transposed == {True},
            base_model_name_or_path=_from_anywhere(self._base.location),
            revision=self._base.commit,
            task_type="CAUSAL_LM" if kind.__name__.endswith(("ForCausalLM", "LMHeadModel")) else None,
            auto_mapping={"base_model_class": kind.__name__, "parent_library": kind.__module__},
            inference_mode=True,
        )
        state = {f"{KEY_PREFIX}{module}.lora_A.weight": found.A for module, found in kept.items()}
        state |= {f"{KEY_PREFIX}{module}.lora_B.weight": found.B for module, found in kept.items()}
        save_file(state, folder / "adapter_model.safetensors", {"format": "pt"})
        config.save_pretrained(str(folder))


def _from_anywhere(location: str | None) -> str | None:
    """A Hub id, or the absolute path of a folder, which also holds where the adapter is loaded."""
    return str(Path(location).resolve()) if location and Path(location).is_dir() else location


class LoraSink:
    """Takes merged parameters one by one, and keeps only the factors of their updates."""

    def __init__(self, adapter: LoraAdapter, targets: Mapping[str, Target]) -> None:
        self._adapter, self._targets = adapter, targets

    def place(self, name: str) -> KeptPlace:
        """Where the rows of one update are collected until it can be factored."""
        return _Factored(self._targets.get(name), self._adapter)

    def keep(self, name: str) -> Place:
        """A place that only measures: whole updates are merged again once lambda is known."""
        return _Measured(InMemory(torch.empty(0)), None)

    def kept(self, work: Work, records: Mapping[str, Record]) -> Work:
        """Return the work unchanged: whole updates are not kept."""
        return work


class MeasuringSink:
    """Takes merged parameters and keeps nothing of them but the size of their updates."""

    def place(self, name: str) -> Place:
        """A place that forgets what is written to it."""
        return _Measured(InMemory(torch.empty(0)), None)

    def keep(self, name: str) -> Place:
        """A place that forgets what is written to it."""
        return self.place(name)

    def kept(self, work: Work, records: Mapping[str, Record]) -> Work:
        """Return the work unchanged."""
        return work


class _Measured(Place):
    """A place that measures |lambda * update|^2 and forgets the update."""

    def add(self, block: Block, parameter: Parameter, lam: float | None) -> Written:
        return Written(moved=(lam or 0.0) ** 2 * squared_norm(block.update))


class _Factored(KeptPlace):
    """A place that factors lambda * update on `close`, and forgets it."""

    def __init__(self, target: Target | None, adapter: LoraAdapter) -> None:
        super().__init__(InMemory(torch.empty(0)), target, {})
        self._adapter = adapter

    def close(self, parameter: Parameter, lam: float | None) -> Written:
        update = self._updates.pop(parameter.name, None)
        return Written() if update is None or lam is None else self._adapter.add(parameter.name, lam * update)


def _factor(update: Tensor, options: AdapterOptions) -> LowRank:
    """A = sqrt(S) V^T and B = U sqrt(S), from the r leading singular directions, in float32."""
    update = update.double()
    U, S, Vh = torch.linalg.svd(update, full_matrices=False)
    r = int((S > ROUNDING * S[0]).sum())
    if options.rank is not None:
        r = min(r, options.rank)
    elif options.energy is not None:
        shares = S.square().cumsum(0) / S.square().sum()
        r = min(r, int((shares < options.energy).sum()) + 1)
    root = S[:r].sqrt()
    A, B = (root[:, None] * Vh[:r]).float().contiguous(), (U[:, :r] * root).float().contiguous()
    lost = update.addmm(B.double(), A.double(), alpha=-1).square().sum()
    return LowRank(A, B, float(S.square().sum()), float(lost))
