"""MergeResult: the merged model, its report, and the update to reassemble it at another lambda."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCardData
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.amplitude import relative_size
from coram_hf.calibration import Lessons, PromptSources, calibrate
from coram_hf.config import CalibrationConfig, CoramConfig, check_names, check_number
from coram_hf.errors import CoramError
from coram_hf.execution.progress import Progress
from coram_hf.execution.tasks import in_threads, thread_count
from coram_hf.execution.telling import Teller
from coram_hf.hub import PUBLISHED, publish_report, push_new
from coram_hf.hub.adapter import AdapterFolder
from coram_hf.inputs.inputs import Inputs
from coram_hf.methods.record import Record, total
from coram_hf.outputs.files import filled_folder
from coram_hf.outputs.heads import with_head
from coram_hf.outputs.memory import copied_model
from coram_hf.outputs.model_files import save_companions
from coram_hf.outputs.place import write_update
from coram_hf.outputs.placed import Outputs
from coram_hf.outputs.saving import WEIGHTS, is_partly_offloaded, save_offloaded
from coram_hf.report import MergeReport
from coram_hf.report.kinds import Retained
from coram_hf.report.tables import Facts, Shown

if TYPE_CHECKING:
    from peft import PeftModel

OFFLOADED_OPTIONS = ("max_shard_size", "save_original_format")
"""Options of `save_pretrained` for a model with offloaded parts."""

Again = Callable[[CoramConfig], "MergeResult"]


class MergeResult(Shown):
    """A merged model of the base's class, with the report of its merge.

    The kept geometric update costs 4 bytes per target parameter (8 for float64 models), of memory, or of the
    disk if a part of the model is there; merge with `keep_update=False` to save that, at the price of
    `with_lambda`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        report: MergeReport,
        inputs: Inputs,
        updates: dict[str, Tensor] | None,
        retained: Retained,
        adapter: PeftModel | None = None,
        again: Again | None = None,
    ) -> None:
        """`again` merges the same inputs with another configuration, for `calibrate`."""
        self.model = model
        self.report = report
        self._inputs = inputs
        self._updates = updates
        self._retained = retained
        self._adapter = adapter
        self._again = again

    def with_adapter(self, adapter: PeftModel) -> MergeResult:
        """This result with its merged adapter, for `save_adapter` to write."""
        return MergeResult(
            self.model, self.report, self._inputs, self._updates, self._retained, adapter, self._again
        )

    def without_update(self) -> MergeResult:
        """This result without the kept update, which frees its memory but rules out another lambda."""
        return MergeResult(self.model, self.report, self._inputs, None, self._retained, self._adapter)

    def facts(self) -> Facts:
        facts = self.report.facts()
        return facts._replace(
            title=f"{type(self.model).__name__}, {facts.title}",
            single={"parameters": self.model.num_parameters(), **facts.single},
        )

    def with_lambda(self, lam: float, *, progress: bool = True) -> MergeResult:
        """Reassemble the merge at another coefficient, W_0 + lam * update, as a new model.

        The base is read again, so it must still hold the weights that were merged. `progress` shows a bar.
        """
        updates = self._check_lambda(lam)
        model = copied_model(self._inputs, self.model, updates)
        other = MergeResult(
            model, self.report, self._inputs, self._updates, self._retained, again=self._again
        )
        other.rescale_(lam, progress=progress)
        Teller(self.report.warnings)(other.report.warnings)
        return other

    def with_head(self, expert: str) -> PreTrainedModel:
        """The merged backbone with the head of one expert, after a merge with `heads="keep"`.

        The model is of the expert's class, and shares its backbone's memory with this result.
        """
        return with_head(self.model, self._inputs, expert)

    def calibrate(self, prompts: PromptSources, *, progress: bool = True, **options: Any) -> MergeResult:
        """Find lambda, and factors for the experts, from a few unlabelled prompts per expert.

        Every expert answers its own prompts greedily; the result has the lowest mean divergence
        KL(expert || merge) on these answers. `prompts` maps names of experts to lists of texts or chats,
        files or splits of datasets, or is a folder with a file per expert; "base" may have some, too. Nothing
        is compared with a truth. The options are those of `CalibrationConfig`, such as `granularity`; without
        `decorrelate` in the merge's configuration, factors gain little. This result stays as it is.
        """
        config = CalibrationConfig.from_dict(options)
        start = self.report.lam
        CoramConfig.from_report(self.report)
        if self._again is None or start is None or start <= 0:
            raise CoramError("calibrate needs a CORAM merge in memory with a positive lambda")
        self._check_lambda(start)
        if config.granularity != "lambda" and is_partly_offloaded(self.model):
            raise CoramError(
                f"calibrate: granularity {config.granularity!r} needs the whole model in memory, and a part "
                'of it is offloaded; pass granularity="lambda"'
            )
        lessons = Lessons(self._inputs, prompts, config)
        found, calibration = calibrate(
            self.with_lambda(start, progress=progress), self._inputs, lessons, config, self._again, progress
        )
        found.report = found.report.with_calibration(calibration)
        return found

    def rescale_(self, lam: float, *, progress: bool = False) -> None:
        """Reassemble this result's own model at another coefficient, in place, and update the report.

        Sweeps use this for every lambda: it neither repeats the geometry nor copies the model.
        """
        updates = self._check_lambda(lam)
        outputs, records = Outputs(self.model), {name: Record() for name in updates}

        def write(name: str) -> None:
            base = self._inputs.parameter(name).base
            records[name].write(*write_update(outputs[name], base, updates[name], lam))

        _core_each(write, updates, f"lambda {lam:g}", progress)
        moved = {name: record.moved for name, record in records.items()}
        self._retained = replace(self._retained, moved={**self._retained.moved, **moved})
        config, amplitude = self.report.config, relative_size(lam, self.report.c_rms)
        rescaled = {"amplitude": amplitude} if config.get("amplitude") is not None else {}
        self.report = replace(
            self.report,
            config={**config, **({"lam": lam} if "lam" in config else {}), **rescaled},
            lam=lam,
            lam_source="given",
            amplitude=amplitude,
            calibration={},
            neutral={},
            retention=self._retained.by_kind(),
        ).with_rounding(total(records.values()).rounding_loss, self.model.dtype)

    def _check_lambda(self, lam: float) -> dict[str, Tensor]:
        """Return the kept updates; raise if there are none, or if lambda is not a number."""
        check_number("lam", lam)
        if self._updates is None:
            raise CoramError("the geometric update was not kept; merge with keep_update=True")
        return self._updates

    def save_adapter(
        self,
        folder: str | Path,
        *,
        rank: int | None = None,
        energy: float | None = None,
        overwrite: bool = False,
        card_data: ModelCardData | None = None,
        progress: bool = True,
    ) -> MergeReport:
        """Write the merged update as an adapter of the base, with card and report, and return the report.

        A merge of OFT adapters is written as an OFT adapter. Any other becomes a LoRA adapter, by a truncated
        SVD of every matrix: of the given rank, or the lowest that keeps a share `energy` of its squared
        norm (by default 0.99). The report contains the relative error of each matrix. What a residual pathway
        changed outside the target matrices is not part of the adapter. The folder appears when it is whole.
        """
        adapter = AdapterFolder(
            folder, self._inputs, self._adapter, rank=rank, energy=energy, overwrite=overwrite
        )
        updates = self._updates or {}
        if adapter.lora is not None:
            if self._updates is None:
                raise CoramError("the merged update was not kept; merge with keep_update=True")
            lam = 1.0 if self.report.lam is None else self.report.lam
            add = adapter.lora.add
            _core_each(lambda name: add(name, lam * updates[name]), updates, "adapter: factors", progress)
        return adapter.write(self.report, self._retained, updates, card_data)

    def save_pretrained(
        self, folder: str | Path, *, card_data: ModelCardData | None = None, **options: Any
    ) -> None:
        """Write everything needed to run the model, with its card (README.md) and coram_report.json.

        `card_data` adds fields to the card's metadata, or overrides them. Options go to
        `PreTrainedModel.save_pretrained`; a model with offloaded parts is written one parameter at a time,
        and takes `max_shard_size` and `save_original_format`. Tokenizer, chat template and processor files
        are the base's, or those of the merged tokenizer; custom code is copied only if it is trusted. The
        files appear when all of them are complete. Earlier weights are removed; other files stay.
        """
        target, offloaded = Path(folder).expanduser(), is_partly_offloaded(self.model)
        if target.exists() and not target.is_dir():
            raise CoramError(f"{target} is a file; the output must be a folder")
        if not self._inputs.original_format:
            options.setdefault("save_original_format", False)
        if offloaded:
            check_names(options, OFFLOADED_OPTIONS, "save option of a model with offloaded parts")
        with filled_folder(target.resolve(), PUBLISHED, WEIGHTS) as files:
            if offloaded:
                save_offloaded(self.model, self._inputs, files, **options)
            else:
                self.model.save_pretrained(files, **options)
                save_companions(self._inputs, files)
            publish_report(self.report, files, self._inputs.places(), card_data)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        adapter: bool = False,
        rank: int | None = None,
        energy: float | None = None,
        card_data: ModelCardData | None = None,
        **options: Any,
    ) -> str:
        """Push weights, tokenizer, card and report, and return the URL of the commit.

        `adapter=True` pushes what `save_adapter` writes, with `rank` or `energy`. Options: `private`,
        `revision`, `commit_message`, `create_pr`, `token`; see `hub.push_folder`.
        """
        if not adapter and (rank is not None or energy is not None):
            raise CoramError("rank and energy are those of an adapter; pass adapter=True as well")
        save = partial(self.save_adapter, rank=rank, energy=energy) if adapter else self.save_pretrained
        return push_new(partial(save, card_data=card_data), repo_id, options)


def _core_each(work: Callable[[str], object], names: Collection[str], label: str, progress: bool) -> None:
    """Run a function for every name, each on one core, with a progress bar."""
    with Progress(label, len(names), progress, unit="tensors") as bar:
        for _ in in_threads(work, names, thread_count(torch.device("cpu"))):
            bar.add()
