"""MergeResult: the merged model, its report, and what is needed to reassemble it at another lambda."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.errors import MergeError
from coram_hf.report import MergeReport
from coram_hf.sinks import ModelSink
from coram_hf.sources.loaded import LoadedModel


class MergeResult:
    """A merged model in the base's class and dtype, with the report of its merge.

    The kept geometric update costs 4 bytes a target parameter (8 for float64 models); merge with
    `keep_update=False` to do without it, and without `with_lambda`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        report: MergeReport,
        base: LoadedModel,
        updates: dict[str, Tensor] | None,
    ) -> None:
        self.model = model
        self.report = report
        self._base = base
        self._updates = updates

    def with_lambda(self, lam: float) -> MergeResult:
        """The same merge reassembled at another coefficient, W_0 + lam * update, as a new model."""
        if self._updates is None:
            raise MergeError("the geometric update was not kept; merge with keep_update=True")
        sink = ModelSink(self.model)
        for name, update in self._updates.items():
            sink.write(name, self._base[name], update, lam)
        report = replace(self.report, lam=lam, lam_source="given")
        return MergeResult(sink.model, report, self._base, self._updates)

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Write the model as `PreTrainedModel.save_pretrained` does, and coram_report.json beside it."""
        self.model.save_pretrained(folder, **options)
        self.report.save(folder)
