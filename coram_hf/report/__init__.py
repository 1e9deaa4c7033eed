"""Plans and reports: what a merge will do, and what it did."""

from coram_hf.report.merge_report import MergeReport, library_versions
from coram_hf.report.plan import MergePlan

__all__ = ["MergePlan", "MergeReport", "library_versions"]
