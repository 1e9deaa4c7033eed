"""The demo: five real adapters merged by CORAM and scored on held-out questions."""

from coram_hf.demo.base import build_base
from coram_hf.demo.run import run_demo

__all__ = ["build_base", "run_demo"]
