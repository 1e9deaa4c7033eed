"""Sources of models and adapters: a folder, a Hub repository, or a folder in one, at a revision."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from coram_hf.errors import CoramError

_HUB = re.compile(r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?::(?P<folder>[^@:]+))?(?:@(?P<revision>[\w./-]+))?")

OTHER_FORMATS = ("*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.ot", "original/*", "onnx/*")
"""Copies of the weights for other libraries, which are not downloaded."""


class Source(NamedTuple):
    """The parts of `[name=]path` or `[name=]org/repo[:folder/inside][@revision]`."""

    name: str
    location: str
    folder: str | None = None
    revision: str | None = None


def parse_source(text: str) -> Source:
    """Parse a source; its name defaults to that of its folder or repository."""
    name, mark, rest = text.partition("=")
    if not mark or "/" in name or Path(text).expanduser().is_dir():
        name, rest = "", text
    path = Path(rest).expanduser()
    if rest and path.is_dir():
        return Source(name or path.resolve().name, str(path))
    if rest and path.is_file():
        raise CoramError(f"{text!r} is a file; a source must be a folder or a Hub repository")
    match = _HUB.fullmatch(rest)
    if match is None or rest.startswith((".", "/", "~")):
        raise CoramError(
            f"{text!r} is neither a folder nor a Hub repository; "
            "write path, org/repo, org/repo@revision or org/repo:folder/inside@revision"
        )
    label = Path(match["folder"]).name if match["folder"] else match["repo"]
    return Source(name or label, match["repo"], match["folder"], match["revision"])


def split_adapter(text: str) -> tuple[str, str | None]:
    """The parts of `model+adapter`, as mergekit writes it; a folder with a + in its name is one part."""
    model, mark, adapter = text.partition("+")
    if not mark or Path(text.partition("=")[2] or text).expanduser().is_dir():
        return text, None
    return model, adapter


class Located(NamedTuple):
    """A local folder, where it comes from, and its commit on the Hub."""

    folder: Path
    location: str
    commit: str | None = None


def fetch(source: Source) -> Located:
    """The local folder of a source, downloaded if it is on the Hub."""
    if Path(source.location).is_dir():
        return Located(Path(source.location), source.location)
    inside = f"{source.folder}/" if source.folder else ""
    try:
        root = Path(
            snapshot_download(
                source.location,
                revision=source.revision,
                allow_patterns=[f"{inside}*"] if inside else None,
                ignore_patterns=[f"{inside}{pattern}" for pattern in OTHER_FORMATS],
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).partition("\n")[0]
        raise CoramError(
            f"{source.name!r}: {source.location!r} cannot be downloaded from the Hub ({why})"
        ) from error
    folder = root / source.folder if source.folder else root
    if not folder.is_dir():
        raise CoramError(f"{source.name!r}: {source.location!r} has no folder {source.folder!r}")
    commit = root.name if root.parent.name == "snapshots" else None
    location = f"{source.location}:{source.folder}" if source.folder else source.location
    return Located(folder, location, commit)
