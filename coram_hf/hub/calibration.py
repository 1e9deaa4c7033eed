"""The part of a model card about a calibration: what it was given, what it found, and what it changed."""

from __future__ import annotations

from coram_hf.hub.text import inline, number
from coram_hf.report import MergeReport
from coram_hf.report.calibration import Calibration
from coram_hf.report.figures import CALIBRATION_FIGURE
from coram_hf.report.tables import markdown as table

FITTED = {
    "lambda": "Lambda alone was searched",
    "expert": "A factor per expert was fitted, and then lambda searched",
    "group": "A factor per expert and group of modules was fitted, and then lambda searched",
    "layer": "A factor per expert for attention and MLP of every layer was fitted, and then lambda searched",
}


def calibration_text(report: MergeReport) -> str:
    """The text, tables and figure of a calibration; empty without one."""
    if not report.calibration:
        return ""
    found = Calibration.from_dict(report.calibration)
    prompts, tokens = sum(found.prompts.values()), sum(found.answer_tokens.values())
    why = "did not help" if found.requested in found.held_back else "needs more prompts"
    finer = "" if found.granularity == found.requested else f" ({inline(found.requested)} {why})"
    rows = [
        (inline(name), str(found.prompts[name]), number(found.before[name]), number(found.after[name]))
        for name in found.before
    ]
    shift = [number(found.neutral[when]) for when in ("before", "after")]
    rows.append(("neutral sentences, by the base", "", shift[0], shift[1]))
    parts = [
        f"{FITTED.get(found.granularity, inline(found.granularity))}{finer}, on {prompts} unlabelled prompts "
        f"(sha256 {found.sha256[:16]}) and the {tokens} tokens that the experts answered: the merge should "
        "speak there as the expert does. No answer was compared with a truth. KL divergence per token:",
        table(["answers of", "prompts", "before", "after"], rows),
        f"![KL divergence against lambda]({CALIBRATION_FIGURE.as_posix()})",
    ]
    fitted = next((one for one in found.tables() if one.title == "Fitted factors"), None)
    if fitted is not None:
        cells = [[inline(name), *(number(value) for value in values)] for name, *values in fitted.rows]
        parts.append(table([inline(head) for head in fitted.header], cells))
    return "\n\n".join(parts)
