"""BaselineMerger: a Euclidean method on all floating tensors of models in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.baselines import method_weights
from coram_hf.baselines.registry import find_method
from coram_hf.baselines.ties import global_cuts
from coram_hf.baselines.updates import Updates
from coram_hf.config import Balance, CoramConfig
from coram_hf.engine import Engine, logger
from coram_hf.geometry import SliceStats, squared_norm
from coram_hf.options import MergeOptions
from coram_hf.report import MergePlan
from coram_hf.result import MergeResult
from coram_hf.sources import Experts


class BaselineMerger:
    """Merge all floating tensors by one of the baseline methods, with the report of a CORAM merge."""

    def __init__(
        self,
        base: PreTrainedModel,
        experts: Experts,
        method: str,
        *,
        weights: Sequence[float] | None = None,
        balance: Balance | None = None,
        target_modules: str | Sequence[str] | None = None,
        keep_update: bool = False,
        **others: Any,
    ) -> None:
        """`others` are the parameters of the method, and any of `MergeOptions`."""
        options = {key: value for key, value in others.items() if key in MergeOptions.__annotations__}
        parameters = {key: value for key, value in others.items() if key not in options}
        self.method = find_method(method)
        self.parameters = self.method.complete(parameters)
        self.options = {"weights": weights, "balance": balance, "target_modules": target_modules}
        self.keep_update = keep_update
        config = CoramConfig.from_dict({**self.options, "lam": 1.0})
        self._engine = Engine(base, experts, config, method, cast(MergeOptions, options))
        self._weights = method_weights(config.weights, len(self._engine.weights), self.parameters)

    def inspect(self) -> MergePlan:
        """Check every weight and say what the merge will do."""
        engine = self._engine
        return engine.plan(residual=engine.outside, lam=None, warnings=engine.amplitude.warnings)

    def merge(self) -> MergeResult:
        """Merge tensor by tensor; targets are merged as matrices, whatever their layout."""
        engine, plan = self._engine, self.inspect()
        for warning in plan.warnings:
            logger.warning(warning)
        self._cuts = self._global_cuts()
        sink = engine.new_sink()
        stats, updates = SliceStats(), {}
        for name in engine.track((*plan.targets, *plan.residual), "tensors"):
            update = engine.new_update(name, self._merge_tensor)
            sink.write(name, engine.models.tensors(name)[0], update)
            if name in engine.targets:
                stats.squared_norm += squared_norm(update)
            if self.keep_update:
                updates[name] = update
        report = engine.report(
            plan,
            method=self.method.name,
            config={**self.options, **self.parameters},
            lam=None,
            lam_source=None,
            slice_height=None,
            stats=stats,
            sink=sink,
        )
        return MergeResult(sink.model, report, engine.origin(), updates if self.keep_update else None)

    def _merge_tensor(self, name: str, base: Tensor, experts: list[Tensor], out: Tensor) -> None:
        updates = Updates(base, experts, self._weights, self._engine.factors, name, self._cuts)
        out.copy_(self.method.update(updates, **self.parameters))

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
