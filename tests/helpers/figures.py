"""The card's figure, drawn once for every number of experts: it takes longer than merging tiny models."""

from pathlib import Path

from coram_hf.report import MergeReport
from coram_hf.report.figures import FIGURE, draw_updates

_drawn: dict[int, bytes] = {}


def draw_once(report: MergeReport, folder: Path) -> Path:
    """Write the figure of the first merge with so many experts."""
    count = len(report.relative_updates)
    if count not in _drawn:
        _drawn[count] = draw_updates(report, folder).read_bytes()
    path = folder / FIGURE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_drawn[count])
    return path
