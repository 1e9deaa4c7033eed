"""Calibration: how strong each expert should be in a merge, found from a few unlabelled prompts."""

from coram_hf.calibration.prompts import PromptSources
from coram_hf.calibration.run import calibrate
from coram_hf.calibration.teachers import Lessons

__all__ = ["Lessons", "PromptSources", "calibrate"]
