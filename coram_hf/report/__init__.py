"""What a merge has to say about itself."""

from coram_hf.report.merge_report import MergeReport, library_versions
from coram_hf.report.plan import MergePlan

__all__ = ["MergePlan", "MergeReport", "library_versions"]
