"""Adapter folders: weights, card and report, which appear together or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCardData

from coram_hf.config import AdapterOptions
from coram_hf.errors import CoramError
from coram_hf.execution.processes import Processes
from coram_hf.execution.protocol import Sink
from coram_hf.execution.workspace import check_target
from coram_hf.hub.card import CARD
from coram_hf.hub.publish import publish_report
from coram_hf.inputs.inputs import Inputs
from coram_hf.outputs.files import new_folder
from coram_hf.outputs.lora import LoraAdapter, LoraSink, MeasuringSink
from coram_hf.report import MergeReport
from coram_hf.report.adapter import lora_report, oft_report
from coram_hf.report.kinds import Retained
from coram_hf.report.merge_report import REPORT_NAME

if TYPE_CHECKING:
    from peft import PeftModel


class AdapterFolder:
    """A folder for a merged adapter, checked before anything is merged.

    oft: the merged adapter of a merge of OFT adapters; any other merge becomes a LoRA adapter, `lora`.
    """

    def __init__(
        self,
        folder: str | Path,
        inputs: Inputs,
        oft: PeftModel | None,
        *,
        rank: int | None,
        energy: float | None,
        overwrite: bool,
    ) -> None:
        if oft is not None and (rank is not None or energy is not None):
            raise CoramError("remove rank and energy: a merge of OFT adapters is saved as an OFT adapter")
        self._options = AdapterOptions(rank, energy)
        if Processes.find().count > 1:
            raise CoramError("an adapter is merged and written by one process; start it without torchrun")
        self.target = Path(os.path.abspath(Path(folder).expanduser()))
        empty = self.target.is_dir() and not self.target.is_symlink() and not any(self.target.iterdir())
        check_target(self.target, overwrite or empty, 0, inputs.files())
        self.lora = LoraAdapter(inputs.base, self._options) if oft is None else None
        self._places = inputs.places()
        self._oft, self._targets, self._new_tokens = oft, inputs.targets, inputs.new_size is not None

    def sink(self) -> Sink:
        """Where merged parameters go: into LoRA factors; an OFT adapter already has what it needs."""
        return MeasuringSink() if self.lora is None else LoraSink(self.lora, self._targets)

    def write(
        self,
        report: MergeReport,
        retained: Retained,
        stored: Collection[str],
        card_data: ModelCardData | None = None,
    ) -> MergeReport:
        """Write adapter, report and card, in place of an earlier adapter, and return the report.

        A card of the earlier one that was edited keeps everything but our marked section.
        """
        if self._new_tokens:
            lost = "the adapter has no rows for the tokens that vocabulary='union' added; save the model"
            report = replace(report, warnings=(*report.warnings, lost))
        with new_folder(self.target) as files:
            if self._oft is not None:
                report = oft_report(report)
                self._oft.save_pretrained(str(files))
                (files / CARD).unlink(missing_ok=True)
            elif self.lora is not None:
                self.lora.save(files)
                report = lora_report(report, self._options, self.lora.kept, retained, stored)
            for name in (CARD, REPORT_NAME):
                if (self.target / name).is_file():
                    shutil.copy(self.target / name, files)
            publish_report(report, files, self._places, card_data)
        return MergeReport.load(self.target)
