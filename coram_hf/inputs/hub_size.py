"""The size of a checkpoint on the Hub, without downloading it: from the cache, or from its files' headers."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from coram_hf.errors import CoramError
from coram_hf.inputs.files import read_json, stored_bytes, tensor_bytes, weight_files
from coram_hf.inputs.locate import Source

WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
"""Files that transformers reads; a repository may hold copies of the weights under other names."""


def hub_bytes(source: Source, itemsize: int | None = None) -> int:
    """The bytes of a checkpoint's tensors, with floats of `itemsize` bytes; 0 if they cannot be known yet."""
    cached = _cached(source)
    if cached is not None:
        return stored_bytes(cached, itemsize)
    try:
        return _remote(source, itemsize)
    except Exception:  # of any HTTP library; opening the source tells what is wrong with it
        return 0


def _cached(source: Source) -> Path | None:
    """The snapshot in the cache, if all its weights are there."""
    try:
        root = Path(snapshot_download(source.location, revision=source.revision, local_files_only=True))
        folder = root / (source.folder or "")
        weight_files(folder, allow_pickle=True)
    except (LocalEntryNotFoundError, CoramError, OSError, ValueError):
        return None
    return folder


def _remote(source: Source, itemsize: int | None) -> int:
    api, inside = HfApi(), f"{source.folder}/" if source.folder else ""
    names = set(api.list_repo_files(source.location, revision=source.revision))
    files = [name for name in names if name.startswith(inside) and WEIGHTS.fullmatch(name[len(inside) :])]
    config = {}
    if files and f"{inside}config.json" in names:
        path = hf_hub_download(source.location, f"{inside}config.json", revision=source.revision)
        config = read_json(Path(path))
    read = partial(api.parse_safetensors_file_metadata, source.location, revision=source.revision)
    with ThreadPoolExecutor(8) as threads:
        headers = list(threads.map(read, files))
    tensors = [(name, tensor) for header in headers for name, tensor in header.tensors.items()]
    return sum(tensor_bytes(name, t.dtype, t.data_offsets, itemsize, config) for name, t in tensors)
