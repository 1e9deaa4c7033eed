"""OrthoMerge on OFT adapters: the mean of their own skew generators, at their mean magnitude."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor

from coram_hf.amplitude import Strength
from coram_hf.config import Shared, Weighing, check_names, normalized_weights, weigh
from coram_hf.errors import CoramError
from coram_hf.geometry import SliceStats, squared_norm
from coram_hf.geometry.slices import as_rows, row_blocks
from coram_hf.inputs.adapters import adapted_modules, open_adapters, shadow
from coram_hf.inputs.inputs import Inputs, Parameter
from coram_hf.inputs.internals.adapters import oft_rotation
from coram_hf.inputs.weights import Weights
from coram_hf.methods.entry import Choice
from coram_hf.methods.linear import sum_weighted
from coram_hf.methods.orthomerge import with_norm
from coram_hf.methods.protocol import Block, How, Method, Work

SPACE = "oft"
"""The value of OrthoMerge's parameter `space` that selects this method."""


class OftMerge:
    """W = W_0 R^T, with R of the generator (sum w_i Q_i) * (sum w_i |Q_i|) / |sum w_i Q_i| in every layer.

    All experts must be OFT adapters of the same shape. adapter: the merged adapter.
    """

    def __init__(self, inputs: Inputs, shared: Shared) -> None:
        self._shared = shared
        self.adapter = _merged_adapter(inputs, weigh(shared.weights, len(inputs.experts)))
        self._rotated = open_adapters("the merged adapter", self.adapter, inputs.base)["default"]
        layers = [f"{module}.weight" for module, _ in adapted_modules(self.adapter.get_base_model())]
        self._layers = {inputs.base.tied.get(layer, layer): layer for layer in layers}

    @property
    def settings(self) -> dict[str, Any]:
        """The method and the weights of the experts."""
        return {"method": "orthomerge", "space": SPACE, "weights": self._shared.to_dict()["weights"]}

    def names(self, inputs: Inputs) -> dict[str, How]:
        """The parameters that the adapters rotate."""
        return {n: How(amplified=False, by_rows=False) for n in inputs.floating if n in self._layers}

    def bind(self, inputs: Inputs, factors: Sequence[float], *, measure: bool = False) -> Work:
        """Rotate each matrix with the merged adapter's own layer."""

        def work(parameter: Parameter) -> Iterator[Block]:
            rotated = self._rotated[self._layers[parameter.name]].to(parameter.base.device, torch.float64)
            update = as_rows(rotated - parameter.base.to(torch.float64))
            counted = parameter.target is not None
            for rows in row_blocks(parameter.base):
                square = squared_norm(update[rows]) if counted else 0.0
                yield Block(None, rows, update[rows], SliceStats(squared_norm=square))

        return work


def merged_adapter(method: Method) -> PeftModel | None:
    """The merged adapter of a merge of OFT adapters; None for any other method."""
    return method.adapter if isinstance(method, OftMerge) else None


def choose_oft(parameters: Mapping[str, Any]) -> Choice:
    """OrthoMerge on the generators of OFT adapters, with the given parameters."""
    check_names([parameters["space"]], (SPACE,), "space of orthomerge")
    check_names(parameters, ("space", "weights"), "parameter of orthomerge on OFT")
    shared = Shared(weights=parameters.get("weights"))
    return Choice(
        label="orthomerge on OFT",
        make=partial(OftMerge, shared=shared),
        strength=lambda inputs: Strength(normalized_weights(shared.weights, len(inputs.experts)), lam=1.0),
    )


def _generators(name: str, expert: Weights, base: Weights) -> tuple[PeftConfig, dict[str, Tensor]]:
    """The settings of one OFT adapter, and the skew entries of each of its layers, as PEFT stores them."""
    if expert.transplant is not None:
        raise CoramError(
            f"expert {name!r} has a base of its own, and rotations of different bases cannot be merged; "
            "merge its weights instead, by removing space"
        )
    if expert.adapter is None or expert.kind != "OFT":
        layout = " in the layout of PEFT before 0.16" if expert.kind == "OFT" else ""
        raise CoramError(
            f"expert {name!r} is {expert.kind}{layout}; expected an OFT adapter of PEFT 0.16 or later"
        )
    model, adapter = expert.adapter
    found = {
        module: cast(Tensor, rotation.weight).detach().double()
        for module, layer in adapted_modules(model.get_base_model())
        if (rotation := oft_rotation(layer, adapter)) is not None
    }
    rotated = {f"{module}.weight" for module in found}
    for key in sorted(set(expert.overrides) - rotated):
        if not torch.equal(expert[key], base[key].to(expert[key])):
            raise CoramError(
                f"expert {name!r} also trains {key!r}, which no OFT layer rotates; it cannot be merged"
            )
    return model.peft_config[adapter], found


def _merged_adapter(inputs: Inputs, weighing: Weighing) -> PeftModel:
    """An OFT adapter over a shadow of the base, with the averaged generators of the experts."""
    opened = {name: _generators(name, expert, inputs.base) for name, expert in inputs.experts.items()}
    first, (settings, reference) = next(iter(opened.items()))
    for name, (config, found) in opened.items():
        for key in ("use_cayley_neumann", "num_cayley_neumann_terms", "coft", "eps", "block_share"):
            values = getattr(settings, key), getattr(config, key)
            if values[0] != values[1]:
                raise CoramError(f"expert {name!r} has {key}={values[1]!r}, but {first!r} has {values[0]!r}")
        if {m: q.shape for m, q in found.items()} != {m: q.shape for m, q in reference.items()}:
            raise CoramError(
                f"expert {name!r} has OFT blocks on different modules or of different sizes than {first!r}"
            )
    merged = get_peft_model(shadow(inputs.model), copy.deepcopy(settings))
    layers = dict(adapted_modules(merged.get_base_model()))
    for module in reference:
        parts = [found[module] for _, found in opened.values()]
        magnitude = sum(w * float(q.norm()) for w, q in zip(weighing.shares, parts, strict=True))
        mean = with_norm(sum_weighted(parts, weighing.signed(weighing.shares)), magnitude)
        rotation: Any = oft_rotation(layers[module], "default")
        rotation.weight.data.copy_(mean)
    return merged
