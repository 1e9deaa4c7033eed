"""CoramMerger: the method from end to end, for models in memory."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from typing_extensions import Unpack

from coram_hf.amplitude import require_coefficient
from coram_hf.baselines.residual import merge_residual
from coram_hf.baselines.updates import Updates
from coram_hf.config import CoramConfig
from coram_hf.engine import Engine
from coram_hf.errors import MergeError
from coram_hf.geometry import SliceStats, merge_rows, merge_update
from coram_hf.options import MergeOptions
from coram_hf.report import MergePlan
from coram_hf.result import MergeResult
from coram_hf.sinks import ModelSink
from coram_hf.sources import Expert, Experts


class CoramMerger:
    """Merge experts that were fine-tuned from one base, by CORAM.

    The base and the experts are read, never changed. Memory beyond them: the result, the kept update
    (4 bytes a target parameter, none with `keep_update=False`), and some tens of megabytes; a residual
    pathway also needs a few times its largest tensor.

    Args:
        base: the model that all experts were fine-tuned from, or its folder or Hub id.
        experts: a list, or a dict name -> expert; an expert is a model, a PeftModel (each of its adapters
            is an expert), or the folder or Hub id of either.
        config: what to do; the default is the paper's `full` line under its kappa rule.
        options: vocabulary, tokenizers, dtype, trust_remote_code, progress; see `MergeOptions`.
    """

    def __init__(
        self,
        base: Expert,
        experts: Experts,
        config: CoramConfig | None = None,
        **options: Unpack[MergeOptions],
    ) -> None:
        if config is not None and not isinstance(config, CoramConfig):
            raise MergeError(
                f"config must be a CoramConfig, found {config!r}; CoramConfig.from_line(...) reads a line"
            )
        self.config = config or CoramConfig()
        self._engine = Engine(base, experts, self.config, self.config.line, options)

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

    def merge(self, *, keep_update: bool = True) -> MergeResult:
        """W* = W_0 + lambda (W_merge - W_0) on the targets, and W_0 + rho on the residual pathway.

        `keep_update=False` forgets each update once it is written, so that the result cannot be
        reassembled by `with_lambda`; with `scale="c_rms"` all are held until lambda is known.
        """
        engine = self._engine
        plan = self.inspect()
        require_coefficient(engine.amplitude, self.config)
        engine.announce(plan)

        sink = engine.new_sink()
        updates: dict[str, Tensor] = {}
        stats = SliceStats()
        lam = plan.lam
        for name in engine.track(plan.targets, "targets"):
            if lam is not None and not keep_update:
                self._merge_into(sink, name, lam, stats)
                continue
            updates[name] = engine.new_update(name, partial(self._merge_matrix, stats))
            if lam is not None:
                sink.write(name, engine.models.base_tensor(name), updates[name], lam)

        if lam is None:
            lam = engine.amplitude.coefficient(self.config, engine.contraction(stats.squared_norm))
            if lam is None:
                raise MergeError('the merged update is zero, so scale="c_rms" is undefined; pass lam=')
            for name, update in updates.items():
                sink.write(name, engine.models.base_tensor(name), update, lam)

        for name in engine.track(plan.residual, "residual"):
            rho = engine.new_update(name, self._merge_residual)
            sink.write(name, engine.models.base_tensor(name), rho)

        report = engine.report(
            plan,
            method="coram",
            config=self.config.to_dict(),
            lam=lam,
            lam_source=self.config.lam_source,
            slice_height=self.config.slice_height,
            stats=stats,
            sink=sink,
        )
        return MergeResult(sink.model, report, engine.origin(), updates if keep_update else None)

    def _merge_into(self, sink: ModelSink, name: str, lam: float, stats: SliceStats) -> None:
        """Merge one target straight into the result, a chunk of rows at a time."""
        out = sink.tensor(name)
        for _, target, base, experts in self._engine.matrices(name, out):
            for merged in merge_rows(base, experts, self.config, factors=self._engine.factors):
                sink.write_rows(target, base, merged.rows, merged.update, lam)
                stats += merged.stats

    def _merge_matrix(
        self, stats: SliceStats, name: str, base: Tensor, experts: list[Tensor], out: Tensor
    ) -> None:
        stats += merge_update(base, experts, self.config, factors=self._engine.factors, out=out)[1]

    def _merge_residual(self, name: str, base: Tensor, experts: list[Tensor], out: Tensor) -> None:
        assert self.config.residual is not None
        updates = Updates(base, experts, self._engine.weights, self._engine.factors, name)
        out.copy_(merge_residual(updates, self.config.residual))
