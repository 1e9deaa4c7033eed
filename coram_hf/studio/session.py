"""Session: the models at hand, the plan, and the merge, of which there is one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from coram_hf.config import CoramConfig
from coram_hf.errors import CoramError
from coram_hf.merger import CoramMerger
from coram_hf.report import MergePlan, MergeReport
from coram_hf.result import MergeResult
from coram_hf.studio.job import Job
from coram_hf.studio.prompts import read_pasted
from coram_hf.studio.roots import Roots

LINES = {
    "recommended": "Recommended for most experts",
    "full": "full: the paper's plain line",
    "full.ties": "full.ties: and TIES outside the matrices",
    "nca+ave": "nca+ave: geometry where experts agree",
    "SS(ca+ave,variance).ties": "SS(ca+ave,variance).ties",
}
"""Lines to choose from; any other line may be typed."""


class Session:
    """What one user of the studio has open. Long work is a `Job`; while it is active, nothing else starts."""

    def __init__(self, roots: Roots) -> None:
        self.roots = roots
        self.job: Job | None = None
        self.merger: CoramMerger | None = None
        self.plan: MergePlan | None = None
        self.result: MergeResult | None = None
        self.report: MergeReport | None = None
        self.folder = ""
        self._inspected: object = None
        self.lock = threading.RLock()

    def inspect(self, base: str, experts: Sequence[str], line: str) -> MergePlan:
        """Open base and experts, check every weight, and return the plan; forgets an earlier merge."""
        if not experts:
            raise CoramError("no experts are chosen: choose two or more, or load the demo")
        sources = [self.roots.source(expert) for expert in experts]
        config = CoramConfig.from_line((line or "recommended").strip())
        with self.lock:
            self.idle()
            merger = CoramMerger(self.roots.source(base), sources, config, progress=False)
            self.plan = merger.inspect()
            self.merger, self.result, self.report, self.folder = merger, None, None, ""
            self._inspected = self._state(base, experts, line)
            return self.plan

    def is_inspected(self, base: str, experts: Sequence[str], line: str) -> bool:
        """Whether this choice is what was inspected last, and no file of it has changed since."""
        return self.merger is not None and self._inspected == self._state(base, experts, line)

    def _state(self, base: str, experts: Sequence[str], line: str) -> object:
        files = [(path, path.stat()) for path in self.input_files() if path.is_file()]
        stamps = [(path, stat.st_mtime_ns, stat.st_size) for path, stat in files]
        return base, tuple(experts), line, stamps

    def start_merge(self, folder: str = "") -> Job:
        """Merge in memory, to try it; or straight to a folder, where an interrupted merge resumes."""
        merger = self._opened()
        target = self.roots.output(folder) if folder.strip() else None

        def work() -> str:
            started = time.perf_counter()
            if target is None:
                self.result, self.folder = merger.merge(), ""
                self.report = self.result.report
            else:
                self.report, self.result = merger.merge_to(target), None
                self.folder = str(target)
            lam = "" if self.report.lam is None else f" at lambda {self.report.lam:.3g}"
            where = f" into {target}" if target else ""
            seconds = time.perf_counter() - started
            experts = "one expert" if self.report.n_experts == 1 else f"{self.report.n_experts} experts"
            return f"Merged {experts}{where}{lam} in {seconds:.0f} s."

        return self.start("Merging", work)

    def start_calibration(self, text: str, granularity: str, one_line: bool) -> Job:
        """Find lambda and factors from pasted prompts; the calibrated merge takes the place of the other."""
        result = self.merged()
        prompts = read_pasted(text, list(result.report.relative_updates))

        def work() -> str:
            options = {"granularity": granularity, "answer_line": one_line}
            self.result = result.calibrate(prompts, progress=False, **options)
            self.report = self.result.report
            count = sum(map(len, prompts.values()))
            before, after = result.report.lam, self.report.lam
            return f"Calibrated on {count} prompts: lambda {before:.3g} before, {after:.3g} now."

        return self.start("Calibrating", work)

    def rescale(self, lam: float) -> float:
        """Set lambda of the merge in memory, without merging again; returns the seconds it took."""
        with self.lock:
            self.idle()
            result = self.merged()
            started = time.perf_counter()
            if lam != result.report.lam:
                result.rescale_(lam)
                self.report = result.report
            return time.perf_counter() - started

    def merged(self) -> MergeResult:
        """The merge in memory; raises if there is none."""
        if self.result is None:
            raise CoramError(
                "there is no merge in memory yet: merge first"
                + (f" without a folder; {self.folder} was merged straight to files" if self.folder else "")
            )
        return self.result

    def input_files(self) -> list[Path]:
        """The files of base and experts, which no output may replace."""
        return list(self._opened().inputs.files())

    def idle(self) -> None:
        """Raise if a job is active."""
        if self.job is not None and self.job.active:
            how = (
                "stopped: resume or discard it" if self.job.state == "stopped" else "running: wait or stop it"
            )
            raise CoramError(f"one thing at a time; {self.job.title.lower()} is {how}")

    def discard(self) -> None:
        """Drop a job that is running or stopped."""
        if self.job is not None and self.job.active:
            self.job.drop()

    def start(self, title: str, work: Callable[[], str]) -> Job:
        """Start long work, unless other work is active."""
        with self.lock:
            self.idle()
            self.job = Job(title, work)
            return self.job

    def _opened(self) -> CoramMerger:
        if self.merger is None:
            raise CoramError("nothing is open yet: choose a base and experts, then inspect them")
        return self.merger
