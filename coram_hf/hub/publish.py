"""What is saved beside merged weights: report, recipe, figures and card."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from coram_hf.hub.card import CARD, edited_card, renew_card, write_card
from coram_hf.hub.recipe import RECIPE_NAME, recipe_text
from coram_hf.hub.usage import companions_in
from coram_hf.outputs.files import write_whole
from coram_hf.outputs.hashing import file_hashes
from coram_hf.report import MergeReport
from coram_hf.report.calibration import Calibration
from coram_hf.report.eval_results import EVAL_NAME, EvalResults
from coram_hf.report.figures import draw_calibration, draw_updates


def publish_report(
    report: MergeReport,
    folder: Path,
    places: Mapping[str, str] | None = None,
    card_data: ModelCardData | None = None,
    hashes: Mapping[str, dict[str, Any]] | None = None,
) -> None:
    """Write report, recipe, figure and card beside the weights; the report gets the weights' hashes.

    `places`: the sources of base and experts, as in `Inputs.places`; `hashes`: those of weights that were
    hashed while they were written.
    """
    with ThreadPoolExecutor(1) as pool:
        files = pool.submit(file_hashes, folder, hashes, keep_cached=False)
        draw_updates(report, folder)
        if report.calibration:
            draw_calibration(Calibration.from_dict(report.calibration), folder)
        complete = replace(report, files=files.result(), companions=companions_in(folder))
    edited = edited_card(folder / CARD, folder)
    if EvalResults.load(folder, complete.files) is None:
        (folder / EVAL_NAME).unlink(missing_ok=True)
    complete.save(folder)
    write_whole(folder / RECIPE_NAME, recipe_text(complete, places))
    if edited:
        renew_card(edited, complete, folder)
    else:
        write_card(complete, folder, card_data)
