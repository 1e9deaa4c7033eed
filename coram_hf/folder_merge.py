"""One merge into one folder: its layout, its workspace, its phases, and what it is made from."""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from heapq import nlargest
from pathlib import Path
from typing import Any

from coram_hf.engine import Engine
from coram_hf.errors import CoramError
from coram_hf.execution.forecast import HASH_RATE, Forecast, computing, read_seconds, write_cost
from coram_hf.execution.stream import Done, Stream, split
from coram_hf.execution.survey import Survey, check_finite, measure
from coram_hf.execution.workspace import Workspace, check_target
from coram_hf.geometry.slices import CHUNK_BYTES
from coram_hf.hub import publish_report
from coram_hf.inputs.files import fingerprint
from coram_hf.methods.record import Record, norms
from coram_hf.outputs.file_tensor import Output
from coram_hf.outputs.folder import FolderSink
from coram_hf.outputs.layout import Layout, Unit, units, write_index
from coram_hf.report import MergeReport
from coram_hf.report.figures import preload

SAMPLE = 8
"""Least number of matrices from which the side of the dispersion threshold is guessed."""

RESIDENT = 320 * 2**20
"""Memory of the interpreter and its libraries."""

Merges = Callable[[str], bool]
Merge = Callable[[str, Output, float | None], Record]


class FolderMerge:
    """One merge into one folder: its layout, its workspace, and its phases."""

    def __init__(
        self, engine: Engine, target: Path, max_shard_size: int | str, settings: dict[str, Any]
    ) -> None:
        self._engine = engine
        self._target = Path(os.path.abspath(target.expanduser()))
        self._overwrite = self._opened = False
        skeleton = engine.skeleton()
        self.dtype = skeleton.dtype
        self._first = engine.models.base.tied
        self._state_dict = skeleton.state_dict()
        readers = 1 + len(engine.models.experts)
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in self._state_dict.items()}
        self._costs = {name: size * readers for name, size in sizes.items()}
        count = engine.processes.count
        shares = split(units(skeleton), self._costs, count)
        origin = engine.origin()
        self._layout = Layout(skeleton, shares, max_shard_size, original_format=origin.original_format)
        self._share = shares[engine.processes.rank]
        self._state = merge_state(engine, settings | {"processes": count, "max_shard_size": max_shard_size})
        self._workspace = Workspace(self._target, engine.processes.rank)
        self._stream = Stream(
            self._workspace, engine.processes, self._prefetch, engine.threads, engine.label, engine.progress
        )

    def open(self, overwrite: bool) -> MergeReport | None:
        """Check the target, and make or take up the workspace.

        Returns the report of a merge that was killed after its last step.
        """
        processes = self._engine.processes
        published = self._workspace.is_published(self._state)
        if not published:
            self.check(overwrite)
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

    def check(self, overwrite: bool) -> None:
        """Refuse a target that could not be written in the end."""
        check_target(self._target, overwrite, self._layout.total_bytes, self._inputs())

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

    def requirements(self, copies: Callable[[str], int]) -> tuple[int, int]:
        """Bytes of disk, and about how much memory.

        That is the libraries, and for every thread its chunks, the float32 copies of a parameter that the
        method makes, and those of adapters: one each, and three while one is made.
        """
        sizes = {name: 4 * tensor.numel() for name, tensor in self._state_dict.items()}
        adapters = sum(weights.kind != "full" for weights in self._engine.models.experts.values())
        made = max((sizes[name] for name in self._engine.targets), default=0) if adapters else 0
        of_thread = 2 * CHUNK_BYTES + (adapters + 3) * made
        held = (copies(name) * size for name, size in sizes.items() if name not in self._first)
        whole = nlargest(self._engine.threads, held)
        return self._layout.total_bytes, RESIDENT + self._engine.threads * of_thread + sum(whole)

    def forecast(self, merges: Merges, merge: Merge, passes: int) -> Forecast:
        """How long the merge will take, with so many passes over the targets."""
        units = {unit[0]: unit for unit in self._share}

        def work(name: str) -> None:
            self._merge_unit(self._layout.empty, 1.0, merges, merge, units[name])

        likes = {name: self._state_dict[name] for name in units}
        models = self._engine.models.named()
        written, cost = self._layout.total_bytes, write_cost(self._target.parent)
        handing_over = written * cost.core / self._engine.threads
        return Forecast(
            computing=passes * computing(likes, work, self._engine.threads) + handing_over,
            reading=passes * read_seconds(path for _, weights in models for path in weights.files),
            writing=written * cost.disk,
            hashing=written / HASH_RATE / min(self._engine.threads, len(self._layout.headers)),
            opening=self._engine.opening,
        )

    def survey(self, *, sampled: bool) -> None:
        """Measure all target matrices, or a sample of them, and take that for the survey."""
        names = list(self._engine.targets or self._engine.outside)
        if sampled:
            count = min(len(names), max(SAMPLE, len(names) // 32))
            names = [names[i] for i in sorted(random.Random(0).sample(range(len(names)), count))]
        records = self.phase("sample" if sampled else "survey", names, partial(measure, self._engine.models))
        self._engine.assume(norms(records.values(), list(self._engine.models.experts)))

    def phase(self, phase: str, names: Sequence[str], work: Callable[[str], Record]) -> dict[str, Record]:
        """A phase that only measures: `work` makes the record of one parameter."""
        processes = self._engine.processes
        share = split([(name,) for name in names], self._costs, processes.count)[processes.rank]
        return self._stream.run(phase, share, self._costs, lambda unit: Done([work(unit[0])], {}))

    def write(self, lam: float | None, merges: Merges, merge: Merge) -> dict[str, Record]:
        """Merge and write every parameter with this lambda."""
        files = self._layout.files(self._engine.processes.rank)
        sink = FolderSink(self._workspace.files, self._layout, files)
        work = partial(self._merge_unit, partial(self._output, sink), lam, merges, merge)
        with closing(sink), ThreadPoolExecutor(1) as beside:
            beside.submit(preload)
            return self._stream.run(f"write {lam!r}", self._share, self._costs, work, sink)

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

    def _output(self, sink: FolderSink, name: str) -> Output:
        """Where a parameter goes: targets that are stored by input, or in stacks, are not written by rows."""
        target = self._engine.targets.get(self._first.get(name, name))
        by_rows = target is None or (not target.transposed and self._state_dict[name].ndim == 2)
        return sink.output(name, by_rows=by_rows)

    def _merge_unit(
        self, place: Callable[[str], Output], lam: float | None, merges: Merges, merge: Merge, unit: Unit
    ) -> Done:
        models = self._engine.models
        records: list[Record] = []
        tensors: dict[str, Output] = {}
        for name in unit:
            parameter, like = self._first.get(name, name), self._state_dict[name]
            if merges(parameter):
                tensors[name] = out = place(name)
                record = merge(parameter, out, lam)
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


def shard_size(size: int | str) -> int | str:
    """A number of bytes, or a text such as 5GB."""
    size = int(size) if isinstance(size, str) and size.isdigit() else size
    if (isinstance(size, int) and size > 0) or (isinstance(size, str) and re.fullmatch(r"\d+[KMGT]B", size)):
        return size
    raise CoramError(f"max_shard_size must be a number of bytes or a text such as 5GB, found {size!r}")


def merge_state(engine: Engine, settings: dict[str, Any]) -> dict[str, Any] | None:
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
