"""What calibration needs of a merge."""

from __future__ import annotations

from typing import Protocol, TypeVar

from transformers import PreTrainedModel

from coram_hf.report import MergeReport


class Merge(Protocol):
    """A merge in memory that can be reassembled at another lambda, in place."""

    @property
    def model(self) -> PreTrainedModel: ...
    @property
    def report(self) -> MergeReport: ...

    def rescale_(self, lam: float) -> None:
        """Reassemble the model at another lambda."""
        ...


AnyMerge = TypeVar("AnyMerge", bound=Merge)
