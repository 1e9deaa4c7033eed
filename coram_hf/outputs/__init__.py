"""Where merged weights go."""

from coram_hf.outputs.folder import FolderSink
from coram_hf.outputs.layout import Layout, without_data
from coram_hf.outputs.memory import ModelSink

__all__ = ["FolderSink", "Layout", "ModelSink", "without_data"]
