"""Where weights come from; nothing here knows a merge method."""

from coram_hf.sources.experts import Experts, Models, open_models

__all__ = ["Experts", "Models", "open_models"]
