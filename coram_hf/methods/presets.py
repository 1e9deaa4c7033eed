"""Ready parameter sets, by the names of the paper's tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A method and the parameters that differ from its defaults."""

    method: str
    parameters: dict[str, Any] = field(default_factory=dict)


PAPER_PRESETS = {
    "Linear": Preset("linear"),
    "Task Arithmetic": Preset("task_arithmetic"),
    "TIES": Preset("ties"),
    "DARE-TIES": Preset("dare_ties"),
    "OrthoMerge TA+G": Preset("orthomerge", {"residual": "ta"}),
    "OrthoMerge TIES+G": Preset("orthomerge", {"residual": "ties"}),
    "OrthoMerge TSV-M+G": Preset("orthomerge", {"residual": "tsvm"}),
    "OrthoMerge TA+C": Preset("orthomerge", {"residual": "ta", "conflict": True}),
    "OrthoMerge TIES+C": Preset("orthomerge", {"residual": "ties", "conflict": True}),
    "OrthoMerge TSV-M+C": Preset("orthomerge", {"residual": "tsvm", "conflict": True}),
}
"""The rivals in the paper's tables, at the defaults of their authors."""

MERGEBENCH_PRESETS = {
    "MergeBench Task Arithmetic": Preset("task_arithmetic", {"scale": 0.4}),
    "MergeBench TIES": Preset("ties", {"density": 0.3, "scale": 0.4, "combine": "sum"}),
    "MergeBench DARE-TIES": Preset("dare_ties", {"drop": 0.9, "scale": 0.4, "combine": "sum"}),
}
"""The coefficients that MergeBench runs (`scripts/merge.sh` of uiuctml/MergeBench: task arithmetic with
--scaling-coef 0.4, TIES with --K 0.3 --scaling-coef 0.4, DARE with --p 0.9 --scaling-coef 0.4), which
the paper's protocol follows. TIES and DARE sum the agreeing entries there."""

PRESETS = PAPER_PRESETS | MERGEBENCH_PRESETS
