"""A quick start and a quick end: the thousands of modules of torch and transformers hold no garbage."""

from __future__ import annotations

import atexit
import gc
import sys


def load_libraries() -> None:
    """Import what merges need without garbage collection, which would take a quarter of the time.

    What is imported is left out of later collections, too; at the end of the process, so is everything.
    """
    if "coram_hf.merger" in sys.modules or not gc.isenabled():
        return
    atexit.register(gc.freeze)
    gc.disable()
    try:
        import coram_hf.merger  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
