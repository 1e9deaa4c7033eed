"""Where weights come from; nothing here knows a merge method."""

from coram_hf.sources.experts import Models, open_models

__all__ = ["Models", "open_models"]
