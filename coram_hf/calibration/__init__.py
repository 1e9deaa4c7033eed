"""Calibration: how strong each expert should be in a merge, found from a few unlabelled prompts."""

from coram_hf.calibration.prompts import PromptSources
from coram_hf.calibration.run import Calibrate, calibrate
from coram_hf.calibration.scale import check_neutral, settle
from coram_hf.calibration.teachers import Lessons

__all__ = ["Calibrate", "Lessons", "PromptSources", "calibrate", "check_neutral", "settle"]
