"""Where weights come from; nothing here knows a merge method."""

from coram_hf.inputs.models import Models, ModelSource, ModelSources, open_models

__all__ = ["ModelSource", "ModelSources", "Models", "open_models"]
