"""CoramCallback: merge checkpoints or experts when training with transformers or TRL ends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coram_hf.baselines import open_merger
from coram_hf.config import CoramConfig, check_names
from coram_hf.errors import CoramError
from coram_hf.execution.processes import Processes
from coram_hf.hub import PUSH_OPTIONS, push_folder
from coram_hf.inputs.internals.marks import is_peft_model
from coram_hf.inputs.opening import ModelSource
from coram_hf.methods.registry import DEFAULT, find_method
from coram_hf.report import MergeReport

CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class CoramCallback(TrainerCallback):
    """Merges when training ends, into a folder, and pushes the result if asked to.

    With `experts`, the trained model is merged with them; without, the checkpoints saved during training are
    merged with each other. folder, report: where the merge is, and its report, once it is made.

    Args:
        experts: other experts of the same base, by name, as for `CoramMerger`.
        base: the model that all were fine-tuned from, by default the one that the trained model was loaded
            from.
        config: the options of CORAM; or `method` and `parameters`, for any other method.
        name: the name of the trained model among the experts.
        last: how many checkpoints are merged, the latest ones; all by default.
        folder: where the merge goes, by default `merged` in the training's output folder.
        push_to_hub: the repository to push the merge to; `push_options` are those of `hub.push_folder`.
        overwrite: replace the folder if it exists.
        options: those of `MergeOptions`, such as `dtype`.
    """

    def __init__(
        self,
        experts: Mapping[str, ModelSource] | None = None,
        *,
        base: ModelSource | None = None,
        config: CoramConfig | None = None,
        method: str = DEFAULT,
        parameters: Mapping[str, Any] | None = None,
        name: str = "trained",
        last: int | None = None,
        folder: str | Path | None = None,
        push_to_hub: str | None = None,
        push_options: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        **options: Any,
    ) -> None:
        if config is not None and (method != DEFAULT or parameters is not None):
            raise CoramError("config and method or parameters are mutually exclusive; pass one of them")
        if experts is not None and (not isinstance(experts, Mapping) or name in experts):
            raise CoramError(
                f"experts must be a dict name -> expert without the name {name!r}, found {experts!r}"
            )
        if experts is not None and last is not None:
            raise CoramError(
                "last selects checkpoints, but with experts only the trained model is merged; remove last"
            )
        if last is not None and last < 1:
            raise CoramError(f"last must be a positive integer, found {last!r}")
        check_names(push_options or {}, PUSH_OPTIONS, "push option")
        self._parameters = config.to_dict() if config is not None else dict(parameters or {})
        find_method(method).choose(self._parameters)
        self._experts, self._base, self._method, self._name = experts, base, method, name
        self._last, self._overwrite, self._options = last, overwrite, options
        self._repository, self._push_options = push_to_hub, dict(push_options or {})
        self.folder = None if folder is None else Path(folder)
        self.report: MergeReport | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise for what would fail after training: no base, an existing folder, sharded weights."""
        self.folder = self.folder or Path(str(args.output_dir)) / "merged"
        if self.folder.exists() and not self._overwrite:
            raise CoramError(
                f"CoramCallback: {self.folder} exists; choose another folder, or pass overwrite=True"
            )
        self._base = self._base or origin_of(kwargs.get("model"))
        if self._base is None:
            raise CoramError(
                "CoramCallback: the model was not loaded from a folder or the Hub, so its base is unknown; "
                "pass base="
            )
        if self._experts is not None and (args.deepspeed or args.fsdp):
            raise CoramError(
                "CoramCallback: with DeepSpeed or FSDP no process has the whole trained model; save it, and "
                "merge it with the experts after training"
            )
        if self._experts is None and str(args.save_strategy) in ("no", "SaveStrategy.NO"):
            raise CoramError('CoramCallback: save_strategy="no" saves no checkpoints to merge; pass experts=')

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Merge, with all processes taking part, and push from the first."""
        assert self.folder is not None
        assert self._base is not None
        experts = dict(self._experts or {})
        if self._experts is None:
            experts |= checkpoints(Path(str(args.output_dir)), self._last)
        else:
            experts[self._name] = kwargs["model"]
        merger = open_merger(self._base, experts, self._method, **self._parameters, **self._options)
        self.report = merger.merge_to(self.folder, overwrite=self._overwrite)
        processes = Processes.find()
        if self._repository is not None and processes.first:
            push_folder(self.folder, self._repository, fresh=True, **self._push_options)
        processes.wait()


def origin_of(model: object) -> str | None:
    """The folder or Hub id that a model, or the model under its adapters, was loaded from."""
    inner = model.get_base_model() if is_peft_model(model) else model
    return (inner.name_or_path or None) if isinstance(inner, PreTrainedModel) else None


def checkpoints(folder: Path, last: int | None) -> dict[str, Path]:
    """The checkpoints in the output folder of a training run, in order; the last ones, or all."""
    steps = {int(found[1]): path for path in folder.iterdir() if (found := CHECKPOINT.fullmatch(path.name))}
    chosen = [steps[step] for step in sorted(steps)][-last if last else None :]
    if not chosen:
        raise CoramError(f"CoramCallback: {folder} holds no checkpoints; set save_strategy or pass experts=")
    return {path.name: path for path in chosen}
