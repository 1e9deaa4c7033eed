"""`coram-hf inspect` and `coram-hf merge`."""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coram_hf.cli.shared import ADAPTER, CALIBRATION, read_given, with_shared_options
from coram_hf.cli.starting import load_libraries
from coram_hf.cli.summary import conclude, conclude_shown, facts
from coram_hf.cli.voice import VOLUME
from coram_hf.errors import CoramError

if TYPE_CHECKING:
    from coram_hf.cli.recipe import Recipe
    from coram_hf.merger import Merger
    from coram_hf.report import MergeReport

logger = logging.getLogger(__name__)


@with_shared_options
def inspect(given: dict[str, Any]) -> None:
    """Show what a merge would do, and whether the experts fit together."""
    plan = read_given(given).merger().inspect()
    conclude_shown(plan, plan.to_dict())


Output = Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the merged model.")]
AdapterOut = Annotated[
    Path | None,
    typer.Option(help="Folder for the merge as an adapter of the base, in place of a model or beside it."),
]
Shards = Annotated[str, typer.Option(help="Largest size of one weight file.")]
Overwrite = Annotated[bool, typer.Option(help="Replace existing output folders.")]
KeepUpdate = Annotated[
    Path | None,
    typer.Option(help="Folder for the targets' update, from which `assemble` makes other lambdas."),
]
Intermediates = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the results of a recipe's earlier documents; OUTPUT-intermediates by default."
    ),
]
DryRun = Annotated[
    bool, typer.Option(help="Print the plan and the disk, memory and time it needs, then stop.")
]


@partial(with_shared_options, more={**ADAPTER, **CALIBRATION})
def merge(
    given: dict[str, Any],
    output: Output = None,
    adapter_out: AdapterOut = None,
    max_shard_size: Shards = "50GB",
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    intermediates: Intermediates = None,
    keep_update: KeepUpdate = None,
) -> None:
    """Merge checkpoints and adapters into one model, or an adapter.

    The folder appears when it is complete. A merge that is interrupted or fails keeps its work, and the same
    command resumes it; that of an adapter starts over. With both outputs, everything is merged twice. With
    --calibrate, it is first merged and calibrated in memory.
    """
    adapter = {key: given[key] for key in ADAPTER}
    _check_outputs(output, adapter_out, adapter)
    if keep_update is not None and output is None:
        raise CoramError("--keep-update keeps the update of a merged folder; pass -o as well")
    recipe = read_given(given)
    _check_early(recipe, output, adapter_out, max_shard_size, overwrite, disk=not dry_run)
    if recipe.stages and output is not None and not dry_run:
        kept = intermediates or output.with_name(f"{output.name}-intermediates")
        recipe = _after_stages(recipe, kept, overwrite)
    merger = recipe.merger()
    if adapter_out is not None:
        merger.adapter_folder(adapter_out, overwrite=overwrite, **adapter)
    if dry_run:
        _forecast(merger, output, max_shard_size, overwrite)
        return
    reports: dict[Path, MergeReport] = {}
    try:
        if output is not None:
            reports[output] = merger.merge_to(
                output, overwrite=overwrite, max_shard_size=max_shard_size, keep_update=keep_update
            )
        if adapter_out is not None:
            reports[adapter_out] = merger.merge_adapter_to(adapter_out, overwrite=overwrite, **adapter)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    conclude_merge(reports)


def _forecast(merger: Merger, output: Path | None, max_shard_size: str, overwrite: bool) -> None:
    """Print the plan, and what it needs for a folder."""
    plan = merger.inspect()
    if output is None or not VOLUME.get().json:
        conclude_shown(plan, plan.to_dict())
    if output is None:
        if not VOLUME.get().json:
            print("Disk, memory and time are estimated for --output only; an adapter takes less of each.")
        return
    import psutil

    opening = time.time() - psutil.Process().create_time()
    disk, memory = merger.requirements(max_shard_size)
    needs = {"disk": f"{disk / 2**30:.2f} GB", "memory": f"about {memory / 2**30:.2f} GB"}
    numbers = {**plan.to_dict(), "disk": disk, "memory": memory}
    try:
        merger.check(output, overwrite=overwrite)
        numbers["seconds"] = merger.forecast(output)._replace(opening=opening).seconds
        rest = ", without finding lambda" if merger.finds_lambda else ", including startup"
        needs["time"] = f"about {duration(numbers['seconds'])}{rest}"
    finally:
        conclude(facts(f"what {output} needs", needs), numbers)


def _after_stages(recipe: Recipe, folder: Path, overwrite: bool) -> Recipe:
    """Merge the earlier documents of a recipe, except those already merged; return the last one."""
    from coram_hf.report.build import is_result

    results: dict[str, str] = {}
    for name, stage in recipe.stages:
        target = folder / Path(name).name
        merger = stage.using(results).merger()
        if not is_result(target, merger.inputs, merger.method.settings):
            report = merger.merge_to(target, overwrite=overwrite)
            logger.info("merged %s: %s%s", target, report.line, amplitude(report))
        results[name] = str(target)
    return recipe.using(results)


def _check_outputs(output: Path | None, adapter_out: Path | None, adapter: dict[str, Any]) -> None:
    """Raise unless there is an output, and options of adapters only with one."""
    if output is None and adapter_out is None:
        raise CoramError("no output: pass -o for the merged model, or --adapter-out for an adapter")
    if adapter_out is None and any(value is not None for value in adapter.values()):
        raise CoramError("--rank and --energy are options of an adapter; pass --adapter-out as well")
    if output is not None and adapter_out is not None and output.resolve() == adapter_out.resolve():
        raise CoramError(f"{output} is named for both outputs; give each its own folder")


def _check_early(
    recipe: Recipe,
    output: Path | None,
    adapter_out: Path | None,
    max_shard_size: str,
    overwrite: bool,
    *,
    disk: bool,
) -> None:
    """Raise for outputs that cannot be written, before models are downloaded or opened."""
    load_libraries()
    from coram_hf.execution.files import shard_size

    shard_size(max_shard_size)
    if output is not None:
        recipe.check_output(output, overwrite=overwrite, disk=disk)
    if adapter_out is not None:
        empty = adapter_out.is_dir() and not any(adapter_out.iterdir())
        recipe.check_output(adapter_out, overwrite=overwrite or empty, disk=False)


def conclude_merge(reports: dict[Path, MergeReport]) -> None:
    """Print the outcome of a merge, in the first process."""
    from coram_hf.report.cost import cost_lines

    if int(os.environ.get("RANK", "0")) != 0:
        return
    folders = ", ".join(f"{'an adapter in ' if r.adapter else ''}{folder}" for folder, r in reports.items())
    first = next(iter(reports.values()))
    sizes = ", ".join(f"{name} {r:.3g}" for name, r in first.relative_updates.items())
    rows = {"line": first.line, "amplitude": f"D {first.dispersion:.3g}{amplitude(first)}", "r_i": sizes}
    for folder, report in reports.items():
        if (error := report.adapter.get("error")) is not None:
            rows["adapter"] = f"stored with a relative error of {error:.2g}"
        if report.warnings:
            rows["warnings"] = f"{len(report.warnings)}, see {folder / 'README.md'}"
        rows |= cost_lines(report.cost, report.lam_source)
    data = {str(folder): report.to_dict() for folder, report in reports.items()}
    experts = "one expert" if first.n_experts == 1 else f"{first.n_experts} experts"
    conclude(facts(f"merged {experts} into {folders}", rows), data)


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
