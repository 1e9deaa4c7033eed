"""Where weights come from; nothing here knows a merge method."""

from coram_hf.sources.experts import Expert, Experts, Models, open_models

__all__ = ["Expert", "Experts", "Models", "open_models"]
