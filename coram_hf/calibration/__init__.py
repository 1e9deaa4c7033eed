"""Calibration: how strong each expert should be in a merge, found from a few unlabelled prompts."""

from coram_hf.calibration.calibrate import calibrate
from coram_hf.calibration.prompts import PromptSources
from coram_hf.calibration.teachers import check_calibration

__all__ = ["PromptSources", "calibrate", "check_calibration"]
