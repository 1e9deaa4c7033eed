"""Where merged weights go."""

from coram_hf.sinks.memory import ModelSink

__all__ = ["ModelSink"]
