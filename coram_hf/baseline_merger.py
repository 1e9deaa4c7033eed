"""BaselineMerger: a Euclidean method on all floating tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from coram_hf.base_merger import Merger
from coram_hf.baselines import method_weights
from coram_hf.config import Balance, CoramConfig, check_names
from coram_hf.engine import Engine
from coram_hf.folder_merge import FolderMerge
from coram_hf.geometry import squared_norm, squared_norms
from coram_hf.inputs import ModelSource, ModelSources
from coram_hf.inputs.options import MergeOptions
from coram_hf.methods.record import Record
from coram_hf.methods.registry import find_method
from coram_hf.methods.ties import global_cuts
from coram_hf.methods.updates import Updates
from coram_hf.outputs.assembly import write, write_blocks
from coram_hf.outputs.file_tensor import Output
from coram_hf.report import MergePlan, MergeReport
from coram_hf.result import MergeResult


class BaselineMerger(Merger):
    """Merge all floating tensors by one of the baseline methods, with the report of a CORAM merge."""

    def __init__(
        self,
        base: ModelSource,
        experts: ModelSources,
        method: str,
        *,
        weights: Sequence[float] | None = None,
        balance: Balance | None = None,
        target_modules: str | Sequence[str] | None = None,
        keep_update: bool = False,
        **others: Any,
    ) -> None:
        """`others` are the parameters of the method, and any of `MergeOptions`."""
        self.method = find_method(method)
        shared = [*MergeOptions.__annotations__, "weights", "balance", "target_modules", "keep_update"]
        check_names(others, [*self.method.defaults, *shared], f"option of {method}")
        options = {key: value for key, value in others.items() if key in MergeOptions.__annotations__}
        parameters = {key: value for key, value in others.items() if key not in options}
        self.parameters = self.method.complete(parameters)
        self.keep_update = keep_update
        self.config = CoramConfig.from_dict(
            {"weights": weights, "balance": balance, "target_modules": target_modules, "lam": 1.0}
        )
        self._engine = Engine(
            base, experts, self.config, method, cast(MergeOptions, options), need_targets=False
        )
        self._cuts: tuple[float, ...] | None = None
        self._weights = method_weights(self.config.weights, len(self._engine.weights), self.parameters)

    def inspect(self) -> MergePlan:
        """Check every weight and say what the merge will do."""
        engine = self._engine
        return engine.plan(residual=engine.outside)

    def merge(self) -> MergeResult:
        """Merge tensor by tensor; targets are merged as matrices, whatever their layout."""
        engine, plan = self._engine, self.inspect()
        engine.announce(plan)
        self._cuts = self._global_cuts()
        sink = engine.new_sink()
        updates = {}

        def merge_one(name: str) -> Record:
            if not self.keep_update:
                return self._written(name, sink.tensor(name))
            record, updates[name] = self._merged(name, sink.tensor(name))
            return record

        records = engine.each((*plan.targets, *plan.residual), merge_one, "tensors")
        report = self._report(plan, records, sink.model.dtype, None)
        kept = updates if self.keep_update else None
        return MergeResult(sink.model, report, engine.origin(), kept, engine.retained(records))

    def _merged(self, name: str, out: Output) -> tuple[Record, Tensor]:
        engine, record = self._engine, Record()
        update = engine.new_update(name, self._merge_tensor)
        write(out, engine.models.base_tensor(name), update, 1.0, record)
        record.slices.squared_norm = self._counted(name, update)
        return record, update

    def _written(self, name: str, out: Output) -> Record:
        """The same without the update, of which by-row methods make no more than a few rows at a time."""
        if not self.method.by_rows:
            return self._merged(name, out)[0]
        engine, record = self._engine, Record()
        updates = Updates(*engine.models.tensors(name), self._weights, engine.factors, name)

        def update(rows: slice) -> Tensor:
            merged = self.method(updates.part(rows), self.parameters)
            record.slices.squared_norm += self._counted(name, merged)
            return merged

        write_blocks(out, updates.base, update, 1.0, record)
        return record

    def _counted(self, name: str, update: Tensor) -> float:
        """What an update adds to the squared norm of the merge: that of the targets, if there are any."""
        targets = self._engine.targets
        return squared_norm(update) if name in targets or not targets else 0.0

    def _copies(self, name: str) -> int:
        return 0 if self.method.by_rows else super()._copies(name)

    def _merges(self, name: str) -> bool:
        return name in self._engine.targets or name in self._engine.outside

    def _merge_parameter(self, name: str, out: Output, lam: float | None) -> Record:
        record = self._written(name, out)
        record.measure(*squared_norms(*self._engine.models.tensors(name)))
        return record

    def _coefficient(self, job: FolderMerge) -> float | None:
        if self.config.balance is not None:
            job.survey(sampled=False)
        self._cuts = self._global_cuts()
        return None

    def _report(
        self, plan: MergePlan, records: Mapping[str, Record], dtype: torch.dtype, lam: float | None
    ) -> MergeReport:
        return self._engine.report(
            plan,
            method=self.method.name,
            config={**self._shared_options(), **self.parameters},
            records=records,
            dtype=dtype,
        )

    def _settings(self) -> dict[str, Any]:
        return {"method": self.method.name, **self._shared_options(), **self.parameters}

    def _shared_options(self) -> dict[str, Any]:
        values = self.config.to_dict()
        return {key: values[key] for key in ("weights", "balance", "target_modules")}

    def _merge_tensor(self, name: str, base: Tensor, experts: list[Tensor], out: Tensor) -> None:
        updates = Updates(base, experts, self._weights, self._engine.factors, name, self._cuts)
        out.copy_(self.method(updates, self.parameters))

    def _global_cuts(self) -> tuple[float, ...] | None:
        """Magnitude cuts over all tensors of each expert, where the method trims globally."""
        if self.parameters.get("trim") != "global":
            return None
        engine = self._engine

        def every_tensor() -> Iterator[Updates]:
            for name in (*engine.targets, *engine.outside):
                base, experts = engine.models.tensors(name)
                yield Updates(base, experts, self._weights, engine.factors, name)

        return tuple(global_cuts(every_tensor, len(self._weights), self.parameters["density"]))
