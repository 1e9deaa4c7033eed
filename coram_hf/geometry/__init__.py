"""The method on plain tensors, independent of any model."""

from coram_hf.geometry.kernel import SUMS, SliceStats
from coram_hf.geometry.merge import check_tensors, merge_matrix, merge_rows, merge_update, update_dtype
from coram_hf.geometry.norms import squared_norm, squared_norms

__all__ = [
    "SUMS",
    "SliceStats",
    "check_tensors",
    "merge_matrix",
    "merge_rows",
    "merge_update",
    "squared_norm",
    "squared_norms",
    "update_dtype",
]
