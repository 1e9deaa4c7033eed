"""assemble: a merge at another lambda from a kept update, without the geometry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coram_hf.config import check_number
from coram_hf.errors import CoramError
from coram_hf.inputs.inputs import Inputs
from coram_hf.merger import Merger
from coram_hf.methods.coram import choose_coram
from coram_hf.methods.protocol import Method
from coram_hf.outputs.spool import FromUpdates, Spool, read_index
from coram_hf.report import MergeReport

AMPLITUDE = ("lam", "kappa", "scale", "lambda_step", "dispersion_threshold")
"""Options that the update of a merge does not depend on."""


def assemble(
    merger: Merger,
    updates: str | Path,
    lam: float,
    folder: str | Path,
    *,
    overwrite: bool = False,
    max_shard_size: int | str = "50GB",
) -> MergeReport:
    """Write W_0 + lam * update to a folder, and return its report.

    `updates` is what `merger.merge_to(..., keep_update=updates)` kept, with the same inputs and options; the
    result has the bytes of a merge at that lambda. A residual pathway, which lambda does not change, is
    merged again.
    """
    check_number("lam", lam)
    config = merger.choice.config
    if config is None:
        raise CoramError("assemble: only merges by CORAM keep an update for other lambdas")
    source = Path(updates).expanduser()
    state, records = read_index(source)
    identity = merger.inputs.identity()
    if state is None or identity is None:
        raise CoramError("assemble: a model in memory cannot be known again; pass folders or Hub ids")
    _check_same(source, _known(state), _known({"settings": merger.method.settings, **identity}))
    choice = choose_coram(replace(config, lam=lam))

    def make(inputs: Inputs) -> Method:
        return FromUpdates(choice.make(inputs), Spool(source), records)

    again = Merger(
        merger.inputs, replace(choice, make=make), progress=merger.progress, opening=merger.opening
    )
    return again.merge_to(folder, overwrite=overwrite, max_shard_size=max_shard_size)


def _known(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as it is written, without the paths of its files, which may be relative."""
    plain: dict[str, Any] = json.loads(json.dumps(state))
    for files in plain["files"].values():
        for file in files:
            file.pop("file", None)
    return plain


def _check_same(source: Path, kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise unless updates are of these inputs, and of these settings but for the amplitude."""
    before, after = kept["settings"], now["settings"]
    differing = [k for k in after if k not in AMPLITUDE and before.get(k) != after[k]]
    differing += [key for key in now if key != "settings" and kept.get(key) != now[key]]
    if differing:
        raise CoramError(
            f"{source} keeps the update of another merge, which differs in {', '.join(differing)}; merge "
            "again with keep_update (--keep-update)"
        )
