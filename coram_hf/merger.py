"""CoramMerger: the method from end to end, in memory or from files to files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from coram_hf.amplitude import ideal_contraction, require_coefficient
from coram_hf.base_merger import Merger
from coram_hf.config import CoramConfig
from coram_hf.engine import Engine
from coram_hf.errors import CoramError
from coram_hf.folder_merge import FolderMerge
from coram_hf.geometry import SliceStats, merge_rows, merge_update, squared_norms
from coram_hf.inputs import ModelSource, ModelSources
from coram_hf.inputs.options import MergeOptions
from coram_hf.methods.record import Record, total
from coram_hf.methods.residual import BY_ROWS, merge_residual
from coram_hf.methods.updates import Updates
from coram_hf.outputs.assembly import write, write_blocks, write_rows
from coram_hf.outputs.file_tensor import Output
from coram_hf.report import MergePlan, MergeReport
from coram_hf.result import MergeResult


class CoramMerger(Merger):
    """Merge experts that were fine-tuned from one base, by CORAM.

    The base and the experts are read, never changed. Memory beyond them: the result, the kept update
    (4 bytes a target parameter, none with `keep_update=False`), and some tens of megabytes; the
    residual pathways `ties` and `tsvm` also need a few times their largest tensor.

    Args:
        base: the model that all experts were fine-tuned from, or its folder or Hub id.
        experts: a list, or a dict name -> expert; an expert is a model, a PeftModel (each of its adapters
            is an expert), or the folder or Hub id of either.
        config: what to do; the default is the paper's `full` line under its kappa rule.
        options: vocabulary, tokenizers, dtype, trust_remote_code, progress; see `MergeOptions`.
    """

    def __init__(
        self,
        base: ModelSource,
        experts: ModelSources,
        config: CoramConfig | None = None,
        **options: Unpack[MergeOptions],
    ) -> None:
        if config is not None and not isinstance(config, CoramConfig):
            raise CoramError(
                f"config must be a CoramConfig, found {config!r}; CoramConfig.from_line(...) reads a line"
            )
        self.config = config or CoramConfig()
        self._engine = Engine(base, experts, self.config, self.config.line, options)
        self._passes = 2 if self.config.scale == "c_rms" and self.config.lam is None else 1

    def inspect(self) -> MergePlan:
        """Check every weight and say what the merge will do: the parts, D, kappa, lambda."""
        engine = self._engine
        share = engine.survey.total_outside_share()
        left_behind = []
        if self.config.residual is None and share > 0:
            left_behind.append(
                f"{share:.1%} of the experts' update norm lies outside the target matrices and stays at the "
                f"base; the lines {', '.join(self.config.residual_lines)} would carry it"
            )
        return engine.plan(
            residual=engine.outside if self.config.residual else [],
            kappa=engine.amplitude.kappa,
            lam=engine.amplitude.coefficient(self.config, c_rms=None),
            left_behind=left_behind,
        )

    def check(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """The same, and whether lambda can be told."""
        super().check(folder, overwrite=overwrite)
        require_coefficient(self._engine.amplitude, self.config)

    def merge(self, *, keep_update: bool = True) -> MergeResult:
        """W* = W_0 + lambda (W_merge - W_0) on the targets, and W_0 + rho on the residual pathway.

        `keep_update=False` forgets each update once it is written, so that the result cannot be
        reassembled by `with_lambda`; with `scale="c_rms"` all are held until lambda is known.
        """
        engine = self._engine
        plan = self.inspect()
        require_coefficient(engine.amplitude, self.config)
        engine.announce(plan)

        sink, lam = engine.new_sink(), plan.lam
        updates: dict[str, Tensor] = {}

        def merge_target(name: str) -> Record:
            if lam is not None and not keep_update:
                return self._merge_parameter(name, sink.tensor(name), lam)
            record = Record()
            updates[name] = engine.new_update(name, partial(self._merge_matrix, record.slices))
            return record

        def write_target(name: str) -> None:
            assert lam is not None
            write(sink.tensor(name), engine.models.base_tensor(name), updates[name], lam, records[name])

        records = engine.each(plan.targets, merge_target, "targets")
        if lam is None:
            square = total(records.values()).slices.squared_norm
            lam = _require_update(engine.amplitude.coefficient(self.config, engine.contraction(square)))
        engine.each(list(updates), write_target, "writing")
        records |= engine.each(
            plan.residual, lambda name: self._merge_parameter(name, sink.tensor(name), None), "residual"
        )
        report = self._report(plan, records, sink.model.dtype, lam)
        return MergeResult(
            sink.model, report, engine.origin(), updates if keep_update else None, engine.retained(records)
        )

    def _merges(self, name: str) -> bool:
        return name in self._engine.targets or (
            self.config.residual is not None and name in self._engine.outside
        )

    def _copies(self, name: str) -> int:
        by_rows = name in self._engine.targets or not self._merges(name) or self.config.residual in BY_ROWS
        return 0 if by_rows else super()._copies(name)

    def _merge_parameter(self, name: str, out: Output, lam: float | None) -> Record:
        """A target amplified by lambda, or a parameter of the residual pathway."""
        if name in self._engine.targets:
            return self._merge_target(name, out, lam)
        base, experts = self._engine.models.tensors(name)
        record = Record()
        record.measure(*squared_norms(base, experts))
        how = self.config.residual
        assert how is not None
        updates = Updates(base, experts, self._engine.weights, self._engine.factors, name)
        if how in BY_ROWS:
            write_blocks(out, base, lambda rows: merge_residual(updates.part(rows), how), 1.0, record)
        else:
            write(out, base, merge_residual(updates, how), 1.0, record)
        return record

    def _merge_target(self, name: str, out: Output | None, lam: float | None) -> Record:
        """Merge one target a chunk of rows at a time; without `out` it is only measured."""
        engine, record = self._engine, Record()
        for _, part, base, experts in engine.matrices(name, out):
            chunks = merge_rows(
                base, experts, self.config, factors=engine.factors, device=engine.device, measure=True
            )
            for merged in chunks:
                assert merged.squares is not None
                of_base, *of_updates = merged.squares.tolist()
                record.measure(of_base, of_updates)
                record.slices += merged.stats
                if part is not None and lam is not None:
                    write_rows(part, base, merged.rows, merged.update, lam, record)
        return record

    def _merge_matrix(
        self, stats: SliceStats, name: str, base: Tensor, experts: list[Tensor], out: Tensor
    ) -> None:
        engine = self._engine
        merged = merge_update(
            base, experts, self.config, factors=engine.factors, out=out, device=engine.device
        )
        stats += merged[1]

    def _coefficient(self, job: FolderMerge) -> float | None:
        """Lambda before merging: by the rule from a sample of the targets; c_RMS from a pass over all."""
        engine, config = self._engine, self.config
        if config.balance is not None:
            job.survey(sampled=False)
        elif config.lam_source == "rule" and config.scale == "sqrt_n":
            job.survey(sampled=True)
            if math.isinf(engine.amplitude.dispersion):
                job.survey(sampled=False)
        if config.lam is not None:
            return config.lam
        if config.scale == "c_rms":
            records = job.phase(
                "geometry", list(engine.targets), partial(self._merge_target, out=None, lam=None)
            )
            job.conclude(records)
            require_coefficient(engine.amplitude, config)
            square = total(records.values()).slices.squared_norm
            return _require_update(engine.amplitude.coefficient(config, engine.contraction(square)))
        if config.kappa is not None:
            return config.kappa * ideal_contraction(engine.weights)
        require_coefficient(engine.amplitude, config)
        return engine.amplitude.coefficient(config, None)

    def _confirm(self, lam: float | None) -> float | None:
        by_rule = self.config.lam_source == "rule" and self.config.scale == "sqrt_n"
        return self._engine.amplitude.coefficient(self.config, None) if by_rule else lam

    def _report(
        self, plan: MergePlan, records: Mapping[str, Record], dtype: torch.dtype, lam: float | None
    ) -> MergeReport:
        return self._engine.report(
            plan,
            method="coram",
            config=self.config.to_dict(),
            lam=lam,
            lam_source=self.config.lam_source,
            slice_height=self.config.slice_height,
            records=records,
            dtype=dtype,
        )

    def _settings(self) -> dict[str, Any]:
        return {"method": "coram", **self.config.to_dict()}


def _require_update(lam: float | None) -> float:
    if lam is None:
        raise CoramError('the merged update is zero, so scale="c_rms" is undefined; pass lam=')
    return lam
