"""CORAM: coherent orthogonal rotation for merging fine-tuned transformers models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coram_hf.assembly import assemble
    from coram_hf.callback import CoramCallback
    from coram_hf.config import CoramConfig
    from coram_hf.errors import CoramError
    from coram_hf.evaluation.ablation import run_ablation
    from coram_hf.evaluation.compare import compare_methods
    from coram_hf.evaluation.folder import evaluate_folder
    from coram_hf.evaluation.sweep import run_sweep
    from coram_hf.evaluation.tasks import dataset_task
    from coram_hf.hub import load_report
    from coram_hf.merger import CoramMerger
    from coram_hf.report import MergePlan, MergeReport
    from coram_hf.result import MergeResult

__version__ = "0.1.0"
__all__ = [
    "CoramCallback",
    "CoramConfig",
    "CoramError",
    "CoramMerger",
    "MergePlan",
    "MergeReport",
    "MergeResult",
    "assemble",
    "compare_methods",
    "dataset_task",
    "evaluate_folder",
    "load_report",
    "run_ablation",
    "run_sweep",
]

_HOME = {
    "CoramCallback": "coram_hf.callback",
    "CoramConfig": "coram_hf.config",
    "CoramMerger": "coram_hf.merger",
    "CoramError": "coram_hf.errors",
    "MergeError": "coram_hf.errors",
    "MergePlan": "coram_hf.report",
    "MergeReport": "coram_hf.report",
    "MergeResult": "coram_hf.result",
    "assemble": "coram_hf.assembly",
    "compare_methods": "coram_hf.evaluation.compare",
    "dataset_task": "coram_hf.evaluation.tasks",
    "evaluate_folder": "coram_hf.evaluation.folder",
    "load_report": "coram_hf.hub",
    "run_ablation": "coram_hf.evaluation.ablation",
    "run_sweep": "coram_hf.evaluation.sweep",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import coram_hf` loads neither torch nor transformers."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
