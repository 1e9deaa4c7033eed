"""The configuration of a merge, its one-line name, and how options are declared and checked."""

from coram_hf.config.adapter import AdapterOptions
from coram_hf.config.coram import (
    Balance,
    ComputeDtype,
    CoramConfig,
    Scale,
    Shared,
    check_weights,
    normalized_weights,
    options_of,
)
from coram_hf.config.declared import Declared, PythonOnly, Range, check_names, check_number, declared
from coram_hf.config.line import DEFAULT_HEIGHT, Branch, Conflict, Decorrelate, Residual, Spread

__all__ = [
    "DEFAULT_HEIGHT",
    "AdapterOptions",
    "Balance",
    "Branch",
    "ComputeDtype",
    "Conflict",
    "CoramConfig",
    "Declared",
    "Decorrelate",
    "PythonOnly",
    "Range",
    "Residual",
    "Scale",
    "Shared",
    "Spread",
    "check_names",
    "check_number",
    "check_weights",
    "declared",
    "normalized_weights",
    "options_of",
]
