"""What all mergers have in common: from any sources to a folder, in bounded memory."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coram_hf.engine import Engine
from coram_hf.errors import MergeError
from coram_hf.hub import publish_report, push_folder
from coram_hf.record import Record, norms
from coram_hf.report import MergePlan, MergeReport
from coram_hf.sinks.folder import FolderSink, Layout, units, write_index
from coram_hf.sinks.workspace import Workspace, check_target
from coram_hf.sources.files import fingerprint
from coram_hf.streaming import Done, Stream, Unit, split
from coram_hf.survey import Survey, check_finite, measure

SAMPLE = 8
"""Least number of matrices from which the side of the dispersion threshold is guessed."""

RESIDENT = 600 * 2**20
"""Memory of the interpreter, its libraries, and the working buffers."""

logger = logging.getLogger("coram_hf")


class Merger(ABC):
    """A method on the models of an engine, parameter by parameter."""

    _engine: Engine

    @abstractmethod
    def inspect(self) -> MergePlan:
        """Check every weight and say what the merge will do."""

    @abstractmethod
    def _merges(self, name: str) -> bool:
        """Whether a parameter is changed at all."""

    @abstractmethod
    def _merge_parameter(self, name: str, out: Tensor, lam: float | None) -> Record:
        """Fill `out` with the merged parameter, and measure the experts' updates on the way."""

    @abstractmethod
    def _coefficient(self, job: FolderMerge) -> float | None:
        """Lambda, or None for a method without one; may run phases of its own."""

    @abstractmethod
    def _confirm(self, lam: float | None) -> float | None:
        """Lambda by the exact norms, once they are known."""

    @abstractmethod
    def _report(
        self, plan: MergePlan, records: Mapping[str, Record], dtype: torch.dtype, lam: float | None
    ) -> MergeReport:
        """The record of a finished merge."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Everything about the method that decides the result."""

    def merge_to(
        self, folder: str | Path, *, overwrite: bool = False, max_shard_size: int | str = "50GB"
    ) -> MergeReport:
        """Merge from files to files, in memory for a few matrices, and return the report.

        The folder appears when it is whole. A merge that was stopped goes on where it was when the same
        call is made again; one whose inputs have changed starts again. Under `torchrun` every process
        writes a share of the shards.
        """
        job = FolderMerge(self._engine, Path(folder), _shard_size(max_shard_size), self._settings())
        try:
            finished = job.open(overwrite)
            return finished if finished is not None else self._merge_into(job)
        except KeyboardInterrupt:
            logger.warning("stopped; %s", job.keep())
            raise
        except OSError as error:
            raise MergeError(f"{error}; {job.keep()}") from error
        except ValueError:
            job.discard()
            raise
        finally:
            job.close()

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Merge into a folder that is pushed and forgotten; options: see `hub.push_folder`."""
        with tempfile.TemporaryDirectory() as folder:
            self.merge_to(Path(folder) / "merged")
            return push_folder(Path(folder) / "merged", repo_id, **options)

    def requirements(self, max_shard_size: int | str = "50GB") -> tuple[int, int]:
        """Bytes of disk that `merge_to` takes, and about how much memory."""
        job = FolderMerge(self._engine, Path("merged"), _shard_size(max_shard_size), self._settings())
        return job.requirements()

    def _merge_into(self, job: FolderMerge) -> MergeReport:
        engine = self._engine
        lam = self._coefficient(job)
        records = job.write(lam, self._merges, self._merge_parameter)
        job.conclude(records)
        exact = self._confirm(lam)
        if exact != lam:
            logger.warning(
                "the dispersion of all targets is %.3g, on the other side of the threshold than that of the "
                "sample: merging again with lambda %s in place of %s",
                engine.amplitude.dispersion,
                exact,
                lam,
            )
            lam = exact
            records = job.write(lam, self._merges, self._merge_parameter)
        plan = self.inspect()
        engine.announce(plan)
        return job.publish(self._report(plan, records, job.dtype, lam))


class FolderMerge:
    """One merge into one folder: its layout, its workspace, and its phases."""

    def __init__(
        self, engine: Engine, target: Path, max_shard_size: int | str, settings: dict[str, Any]
    ) -> None:
        self._engine = engine
        self._target = Path(os.path.abspath(target.expanduser()))
        self._overwrite = self._opened = False
        self._tensors = engine.models
        skeleton = engine.skeleton()
        self.dtype = skeleton.dtype
        self._first = engine.models.base.tied
        self._units = units(skeleton)
        self._state_dict = skeleton.state_dict()
        readers = 1 + len(engine.models.experts)
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in self._state_dict.items()}
        self._costs = {name: size * readers for name, size in sizes.items()}
        count = engine.processes.count
        shares = split(self._units, self._costs, count)
        origin = engine.origin()
        self._layout = Layout(skeleton, shares, max_shard_size, original_format=origin.original_format)
        self._share = shares[engine.processes.rank]
        self._state = _state(engine, settings | {"processes": count, "max_shard_size": max_shard_size})
        self._workspace = Workspace(self._target, engine.processes.rank)
        self._stream = Stream(
            self._workspace, engine.processes, self._prefetch, engine.label, engine.progress
        )

    def open(self, overwrite: bool) -> MergeReport | None:
        """Check the target, and make or take up the workspace.

        Returns the report of a merge that was killed after its last step.
        """
        processes = self._engine.processes
        published = self._workspace.is_published(self._state)
        if not published:
            check_target(self._target, overwrite, self._layout.total_bytes, self._inputs())
        self._overwrite = overwrite
        processes.wait()
        if processes.first:
            self._workspace.lock()
            self._opened = True
            if published:
                self._workspace.clean()
            else:
                self._workspace.open(self._state)
        processes.wait()
        return MergeReport.load(self._target) if published else None

    def _inputs(self) -> list[Path]:
        """Files that are read, and folders that models in memory were loaded from."""
        models = [weights for _, weights in self._engine.models.named()]
        loaded = [Path(m.model.name_or_path) for m in models if not m.files and m.model.name_or_path]
        return [*(path for m in models for path in m.files), *(path for path in loaded if path.is_dir())]

    def keep(self) -> str:
        """What becomes of the unfinished work, for the user."""
        if self._state is None:
            self.discard()
            return "nothing is kept, since models in memory cannot be known again"
        return f"run the same command again to go on from here ({self._workspace.folder})"

    def discard(self) -> None:
        """Leave nothing behind."""
        if self._opened:
            self._workspace.discard()
            self._opened = False

    def close(self) -> None:
        """Let other merges have the target."""
        self._workspace.unlock()

    def requirements(self) -> tuple[int, int]:
        """Bytes of disk, and about how much memory: libraries, chunks, and a few of the largest tensors."""
        largest = max(tensor.numel() * tensor.element_size() for tensor in self._state_dict.values())
        adapters = sum(weights.kind != "full" for weights in self._engine.models.experts.values())
        made = max((self._state_dict[name].numel() * 4 for name in self._engine.targets), default=0)
        return self._layout.total_bytes, RESIDENT + 3 * largest + adapters * made

    def survey(self, *, sampled: bool) -> None:
        """Measure all target matrices, or a sample of them, and take that for the survey."""
        names = list(self._engine.targets or self._engine.outside)
        if sampled:
            count = min(len(names), max(SAMPLE, len(names) // 32))
            names = [names[i] for i in sorted(random.Random(0).sample(range(len(names)), count))]
        records = self.phase("sample" if sampled else "survey", names, partial(measure, self._engine.models))
        self._engine.assume(norms(records.values(), list(self._engine.models.experts)))

    def phase(self, phase: str, names: Sequence[str], work: Any) -> dict[str, Record]:
        """A phase that only measures: `work` makes the record of one parameter."""
        processes = self._engine.processes
        share = split([(name,) for name in names], self._costs, processes.count)[processes.rank]
        return self._stream.run(phase, share, self._costs, lambda unit: Done([work(unit[0])], {}))

    def write(self, lam: float | None, merges: Any, merge: Any) -> dict[str, Record]:
        """Merge and write every parameter with this lambda."""
        files = self._layout.files(self._engine.processes.rank)
        sink = FolderSink(self._workspace.files, self._layout, files)
        try:
            work = partial(self._merge_unit, lam, merges, merge)
            return self._stream.run(f"write {lam!r}", self._share, self._costs, work, sink)
        finally:
            sink.close()

    def conclude(self, records: dict[str, Record]) -> None:
        """Take the exact norms that were measured while merging."""
        engine = self._engine
        by_parameter = {self._first.get(name, name): record for name, record in records.items()}
        measured = {name: record for name, record in by_parameter.items() if record.updates}
        experts = list(engine.models.experts)
        engine.conclude(Survey.of(measured, engine.targets, engine.outside, experts))

    def publish(self, report: MergeReport) -> MergeReport:
        """Write what belongs beside the weights, give the folder its name, and return the whole report."""
        if self._engine.processes.first:
            folder, model = self._workspace.files, self._layout.skeleton
            for path in folder.iterdir():
                if path.is_file() and path.name not in self._layout.headers:
                    path.unlink()
            write_index(folder, self._layout)
            for config in (
                model.config,
                *(getattr(model.config, key, None) for key in model.config.sub_configs),
            ):
                if config is not None:
                    config.dtype = str(self.dtype).removeprefix("torch.")
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
            self._engine.origin().save_companions(folder)
            publish_report(report, folder)
            self._workspace.publish(self._overwrite)
            self._opened = False
        self._engine.processes.wait()
        return MergeReport.load(self._target)

    def _merge_unit(self, lam: float | None, merges: Any, merge: Any, unit: Unit) -> Done:
        models = self._engine.models
        records, tensors = [], {}
        for name in unit:
            parameter, like = self._first.get(name, name), self._state_dict[name]
            if merges(parameter):
                tensors[name] = torch.empty(like.shape, dtype=like.dtype)
                record = merge(parameter, tensors[name], lam)
            else:
                tensors[name] = models.base_tensor(parameter).to(like.dtype)
                record = measure(models, parameter) if like.is_floating_point() else Record()
            if record.updates:
                check_finite(parameter, record, list(models.experts))
            records.append(record)
        return Done(records, tensors)

    def _prefetch(self, name: str) -> None:
        for _, weights in self._engine.models.named():
            weights.prefetch(name)


def _shard_size(size: int | str) -> int | str:
    """A number of bytes, or a text such as 5GB."""
    size = int(size) if isinstance(size, str) and size.isdigit() else size
    if (isinstance(size, int) and size > 0) or (isinstance(size, str) and re.fullmatch(r"\d+[KMGT]B", size)):
        return size
    raise ValueError(f"max_shard_size must be a number of bytes or a text such as 5GB, found {size!r}")


def _state(engine: Engine, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What a merge is made from, as far as a change of it must be noticed; None if it is not all on disk."""
    if not all(weights.files for _, weights in engine.models.named()):
        return None
    return {
        "settings": settings,
        "dtype": str(engine.dtype),
        "device": str(engine.device),
        "vocabulary": _vocabulary_hash(engine),
        "files": {name: [fingerprint(path) for path in w.files] for name, w in engine.models.named()},
    }


def _vocabulary_hash(engine: Engine) -> str:
    """A hash of how the rows of the vocabularies are lined up."""
    vocabulary = engine.models.vocabulary
    digest = hashlib.sha256(repr((vocabulary.size, vocabulary.new_rows.tolist())).encode())
    for name, rows in sorted(vocabulary.rows.items()):
        digest.update(repr((name, rows.tolist())).encode())
    return digest.hexdigest()
