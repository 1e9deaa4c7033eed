"""OrthoMerge on OFT adapters: the mean of their own skew generators, at their mean magnitude."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor
from typing_extensions import Unpack

from coram_hf.base_merger import Merger
from coram_hf.config import CoramConfig
from coram_hf.engine import Engine
from coram_hf.errors import CoramError
from coram_hf.folder_merge import FolderMerge
from coram_hf.geometry import squared_norm, squared_norms
from coram_hf.inputs import ModelSource, ModelSources
from coram_hf.inputs.adapters import adapted_modules, open_adapters, shadow
from coram_hf.inputs.internals import oft_rotation
from coram_hf.inputs.options import MergeOptions
from coram_hf.inputs.weights import Weights
from coram_hf.methods.linear import sum_weighted
from coram_hf.methods.orthomerge import with_norm
from coram_hf.methods.record import Record
from coram_hf.outputs.assembly import write
from coram_hf.outputs.file_tensor import Output
from coram_hf.report import MergePlan, MergeReport
from coram_hf.result import MergeResult


class OftMerger(Merger):
    """W = W_0 R^T, with R of the generator (sum w_i Q_i) * (sum w_i |Q_i|) / |sum w_i Q_i| in every layer.

    All experts must be OFT adapters of one shape. `save_adapter` of the result writes the merged adapter.
    """

    def __init__(
        self,
        base: ModelSource,
        experts: ModelSources,
        *,
        weights: Sequence[float] | None = None,
        **options: Unpack[MergeOptions],
    ) -> None:
        self.config = CoramConfig.from_dict({"weights": weights, "lam": 1.0})
        self._engine = Engine(base, experts, self.config, "orthomerge on OFT", options)
        self.adapter = _merged_adapter(self._engine)
        origin = self._engine.models.base
        self._rotated = open_adapters("the merged adapter", self.adapter, origin)["default"]
        layers = [f"{module}.weight" for module, _ in adapted_modules(self.adapter.get_base_model())]
        self._layers = {origin.tied.get(layer, layer): layer for layer in layers}

    def inspect(self) -> MergePlan:
        """Check every weight and say what the merge will do."""
        return self._engine.plan(residual=[name for name in self._engine.outside if self._merges(name)])

    def merge(self) -> MergeResult:
        """Rotate every matrix that the adapters rotate."""
        engine, plan = self._engine, self.inspect()
        engine.announce(plan)
        sink = engine.new_sink()
        names = [name for name in (*plan.targets, *plan.residual) if self._merges(name)]
        records = engine.each(
            names, lambda name: self._merge_parameter(name, sink.tensor(name), None), "rotations"
        )
        report = self._report(plan, records, sink.model.dtype, None)
        return MergeResult(sink.model, report, engine.origin(), None, engine.retained(records), self.adapter)

    def _merges(self, name: str) -> bool:
        return name in self._layers

    def _merge_parameter(self, name: str, out: Output, lam: float | None) -> Record:
        engine, record = self._engine, Record()
        origin, experts = engine.models.tensors(name)
        record.measure(*squared_norms(origin, experts))
        update = self._rotated[self._layers[name]].to(torch.float64) - origin.to(torch.float64)
        write(out, origin, update, 1.0, record)
        if name in engine.targets:
            record.slices.squared_norm = squared_norm(update)
        return record

    def _coefficient(self, job: FolderMerge) -> float | None:
        return None

    def _report(
        self, plan: MergePlan, records: Mapping[str, Record], dtype: torch.dtype, lam: float | None
    ) -> MergeReport:
        return self._engine.report(
            plan, method="orthomerge", config=self._parameters(), records=records, dtype=dtype
        )

    def _settings(self) -> dict[str, Any]:
        return {"method": "orthomerge", **self._parameters()}

    def _parameters(self) -> dict[str, Any]:
        return {"space": "oft", "weights": self.config.to_dict()["weights"]}


def _generators(name: str, expert: Weights, base: Weights) -> tuple[PeftConfig, dict[str, Tensor]]:
    """The settings of one OFT adapter, and the skew entries of its every layer, as PEFT stores them."""
    if expert.adapter is None or expert.kind != "OFT":
        layout = " in the layout of PEFT before 0.16" if expert.kind == "OFT" else ""
        raise CoramError(f"expert {name!r} is {expert.kind}{layout}, not an OFT adapter of today's layout")
    model, adapter = expert.adapter
    found = {
        module: cast(Tensor, rotation.weight).detach().double()
        for module, layer in adapted_modules(model.get_base_model())
        if (rotation := oft_rotation(layer, adapter)) is not None
    }
    rotated = {f"{module}.weight" for module in found}
    for key in sorted(set(expert.overrides) - rotated):
        if not torch.equal(expert[key], base[key].to(expert[key])):
            raise CoramError(f"expert {name!r} also trains {key!r}, which no OFT layer rotates")
    return model.peft_config[adapter], found


def _merged_adapter(engine: Engine) -> PeftModel:
    """An OFT adapter over a shadow of the base, with the averaged generators of the experts."""
    opened = {
        name: _generators(name, expert, engine.models.base) for name, expert in engine.models.experts.items()
    }
    first, (settings, reference) = next(iter(opened.items()))
    for name, (config, found) in opened.items():
        for key in ("use_cayley_neumann", "num_cayley_neumann_terms", "coft", "eps", "block_share"):
            values = getattr(settings, key), getattr(config, key)
            if values[0] != values[1]:
                raise CoramError(f"expert {name!r} has {key}={values[1]!r}, but {first!r} has {values[0]!r}")
        if {m: q.shape for m, q in found.items()} != {m: q.shape for m, q in reference.items()}:
            raise CoramError(
                f"expert {name!r} has OFT blocks on other modules or of other sizes than {first!r}"
            )
    merged = get_peft_model(shadow(engine.base), copy.deepcopy(settings))
    layers = dict(adapted_modules(merged.get_base_model()))
    for module in reference:
        parts = [found[module] for _, found in opened.values()]
        magnitude = sum(w * float(q.norm()) for w, q in zip(engine.weights, parts, strict=True))
        mean = with_norm(sum_weighted(parts, engine.weights), magnitude)
        rotation: Any = oft_rotation(layers[module], "default")
        rotation.weight.data.copy_(mean)
    return merged
