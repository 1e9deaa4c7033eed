"""What all mergers have in common: merging from any sources to a folder, and on to the Hub."""

from __future__ import annotations

import logging
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData

from coram_hf.config import check_names
from coram_hf.engine import Engine
from coram_hf.errors import CoramError
from coram_hf.execution.forecast import Forecast
from coram_hf.folder_merge import FolderMerge, shard_size
from coram_hf.hub import push_folder, write_card
from coram_hf.methods.record import Record
from coram_hf.outputs.file_tensor import Output
from coram_hf.report import MergePlan, MergeReport

PUSH_OPTIONS = ("private", "revision", "commit_message", "create_pr", "token")
logger = logging.getLogger("coram_hf")


class Merger(ABC):
    """A method on the models of an engine, parameter by parameter."""

    _engine: Engine
    _passes = 1
    """How often the geometry of every parameter is computed."""

    @abstractmethod
    def inspect(self) -> MergePlan:
        """Check every weight and say what the merge will do."""

    @abstractmethod
    def _merges(self, name: str) -> bool:
        """Whether a parameter is changed at all."""

    @abstractmethod
    def _merge_parameter(self, name: str, out: Output, lam: float | None) -> Record:
        """Fill `out` with the merged parameter, and measure the experts' updates on the way."""

    def _copies(self, name: str) -> int:
        """How many float32 copies of a parameter are made to merge it."""
        return 2

    @abstractmethod
    def _coefficient(self, job: FolderMerge) -> float | None:
        """Lambda, or None for a method without one; may run phases of its own."""

    def _confirm(self, lam: float | None) -> float | None:
        """Lambda by the exact norms, once they are known; the same, unless it was guessed from a sample."""
        return lam

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
        job = FolderMerge(self._engine, Path(folder), shard_size(max_shard_size), self._settings())
        try:
            finished = job.open(overwrite)
            return finished if finished is not None else self._merge_into(job)
        except KeyboardInterrupt:
            logger.warning("stopped; %s", job.keep())
            raise
        except OSError as error:
            raise CoramError(f"{error}; {job.keep()}") from error
        except ValueError:
            job.discard()
            raise
        finally:
            job.close()

    def push_to_hub(self, repo_id: str, *, card_data: ModelCardData | None = None, **options: Any) -> str:
        """Merge into a folder that is pushed and forgotten; options: see `hub.push_folder`."""
        check_names(options, PUSH_OPTIONS, "push option")
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "merged"
            report = self.merge_to(folder)
            if card_data is not None:
                write_card(report, folder, card_data)
            return push_folder(folder, repo_id, fresh=True, **options)

    def requirements(self, max_shard_size: int | str = "50GB") -> tuple[int, int]:
        """Bytes of disk that `merge_to` takes, and about how much memory."""
        job = FolderMerge(self._engine, Path("merged"), shard_size(max_shard_size), self._settings())
        return job.requirements(self._copies)

    def check(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Raise what `merge_to` would raise before it merges: about the folder, the disk, the coefficient."""
        FolderMerge(self._engine, Path(folder), "50GB", self._settings()).check(overwrite)

    def forecast(self, folder: str | Path) -> Forecast:
        """How long `merge_to` would take; merges one parameter of every shape to find out."""
        job = FolderMerge(self._engine, Path(folder), "50GB", self._settings())
        return job.forecast(self._merges, self._merge_parameter, self._passes)

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
