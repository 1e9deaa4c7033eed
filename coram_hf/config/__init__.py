"""The configuration of a merge, its one-line name, and how options are declared and checked."""

from coram_hf.config.adapter import AdapterOptions
from coram_hf.config.calibration import CalibrationConfig, Granularity
from coram_hf.config.coram import (
    Balance,
    ComputeDtype,
    CoramConfig,
    Scale,
    Shared,
    as_plain,
    options_of,
)
from coram_hf.config.declared import Declared, PythonOnly, Range, check_names, check_number, declared
from coram_hf.config.factors import (
    GROUPS,
    Factors,
    Position,
    factors_in,
    group_names,
    read_factors,
    write_factors,
)
from coram_hf.config.line import DEFAULT_HEIGHT, Branch, Conflict, Decorrelate, Residual, Spread
from coram_hf.config.residual import write_residual_parameters
from coram_hf.config.settings import Place, Setting, Varies, with_fallback
from coram_hf.config.weights import (
    Weighing,
    check_weights,
    normalized_weights,
    typical_weights,
    weigh,
)

__all__ = [
    "DEFAULT_HEIGHT",
    "GROUPS",
    "AdapterOptions",
    "Balance",
    "Branch",
    "CalibrationConfig",
    "ComputeDtype",
    "Conflict",
    "CoramConfig",
    "Declared",
    "Decorrelate",
    "Factors",
    "Granularity",
    "Place",
    "Position",
    "PythonOnly",
    "Range",
    "Residual",
    "Scale",
    "Setting",
    "Shared",
    "Spread",
    "Varies",
    "Weighing",
    "as_plain",
    "check_names",
    "check_number",
    "check_weights",
    "declared",
    "factors_in",
    "group_names",
    "normalized_weights",
    "options_of",
    "read_factors",
    "typical_weights",
    "weigh",
    "with_fallback",
    "write_factors",
    "write_residual_parameters",
]
