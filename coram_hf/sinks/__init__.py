"""Where merged weights go."""

from coram_hf.sinks.folder import FolderSink, Layout, without_data
from coram_hf.sinks.memory import ModelSink
from coram_hf.sinks.workspace import Workspace

__all__ = ["FolderSink", "Layout", "ModelSink", "Workspace", "without_data"]
