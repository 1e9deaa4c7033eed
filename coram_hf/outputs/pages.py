"""The system's page cache: large files pass through a small part of it, which is reused.

Fresh pages are the main cost of writing or hashing gigabytes: on a virtual machine the host must allocate
them first, at several seconds per gigabyte.
"""

from __future__ import annotations

import os
from contextlib import suppress


def forget(handle: int, offset: int = 0, length: int = 0) -> None:
    """Drop the cached pages of a file that are on the disk, by default all of them."""
    if hasattr(os, "posix_fadvise"):  # missing on macOS
        with suppress(OSError):
            os.posix_fadvise(handle, offset, length, os.POSIX_FADV_DONTNEED)
