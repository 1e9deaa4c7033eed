"""The system's page cache: large files go through a small part of it, which is used again and again.

New pages are what costs when gigabytes are written or hashed: on a virtual machine the host has to find them
first, at several seconds a gigabyte.
"""

from __future__ import annotations

import os
from contextlib import suppress


def forget(handle: int, offset: int = 0, length: int = 0) -> None:
    """Let go of the cached pages of a file that are on the disk; by default of all."""
    if hasattr(os, "posix_fadvise"):  # macOS has no such call
        with suppress(OSError):
            os.posix_fadvise(handle, offset, length, os.POSIX_FADV_DONTNEED)
