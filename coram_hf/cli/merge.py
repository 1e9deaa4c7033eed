"""`coram-hf inspect` and `coram-hf merge`."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coram_hf.cli.shared import CALIBRATION, read_given, with_shared_options

if TYPE_CHECKING:
    from coram_hf.report import MergeReport


@with_shared_options
def inspect(given: dict[str, Any]) -> None:
    """Show what a merge would do: the parts of the model, D, kappa, lambda, warnings."""
    from coram_hf.report.tables import print_shown

    print_shown(read_given(given).merger().inspect())


Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for the merged model.")]
Shards = Annotated[str, typer.Option(help="Largest size of one weight file.")]
Overwrite = Annotated[bool, typer.Option(help="Replace an existing output folder.")]
DryRun = Annotated[
    bool, typer.Option(help="Print the plan and the disk, memory and time it needs, then stop.")
]


@partial(with_shared_options, more=CALIBRATION)
def merge(
    given: dict[str, Any],
    output: Output,
    max_shard_size: Shards = "50GB",
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> None:
    """Merge checkpoints and adapters into one model; the folder appears when it is complete.

    A merge that is interrupted or fails keeps its work, and the same command resumes it. With --calibrate,
    it is first merged and calibrated in memory.
    """
    merger = read_given(given).merger()
    if dry_run:
        import psutil

        opening = time.time() - psutil.Process().create_time()
        merger.check(output, overwrite=overwrite)
        disk, memory = merger.requirements(max_shard_size)
        print(merger.inspect())
        print(f"  disk: {disk / 2**30:.2f} GB for {output}")
        print(f"  memory: about {memory / 2**30:.2f} GB")
        forecast = merger.forecast(output)._replace(opening=opening)
        print(f"  time: about {duration(forecast.seconds)}, including startup")
        return
    try:
        report = merger.merge_to(output, overwrite=overwrite, max_shard_size=max_shard_size)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{report.line}: D {report.dispersion:.3g}{amplitude(report)}")
        print(f"merged {report.n_experts} experts into {output}")


def amplitude(report: MergeReport) -> str:
    """kappa and lambda as text, and the effective kappa where it is another; empty without amplification."""
    if report.lam is None:
        return ""
    effective, lam = f"{report.effective_kappa:.4g}", f"lambda {report.lam:.4g}"
    if report.kappa is None or f"{report.kappa:.4g}" == effective:
        return f", kappa {effective}, {lam}"
    return f", kappa {report.kappa:.4g}, {lam}, effective kappa {effective}"


def duration(seconds: float) -> str:
    """Seconds as text, in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
