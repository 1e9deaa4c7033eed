"""Sources of models and adapters: a folder, a Hub repository, or a folder in one, at a revision."""

from __future__ import annotations

import difflib
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
        if is_gguf(path):
            return Source(name or path.stem, str(path))
        raise CoramError(f"{text!r} is a file; a source must be a folder, a .gguf file or a Hub repository")
    match = _HUB.fullmatch(rest)
    if match is None or rest.startswith((".", "/", "~")):
        form = (
            ""
            if rest.startswith((".", "/", "~"))
            else "; on the Hub, a source is org/repo[:folder][@revision]"
        )
        raise CoramError(f"no such folder: {rest!r}{_nearest(path)}{form}")
    inside = Path(match["folder"] or "")
    label = (inside.stem if is_gguf(inside) else inside.name) or match["repo"]
    return Source(name or label, match["repo"], match["folder"], match["revision"])


def is_gguf(path: Path) -> bool:
    """Whether a path has the name of a GGUF file."""
    return path.suffix.lower() == ".gguf"


def gguf_in(found: Path) -> Path | None:
    """The GGUF file that a source is: itself, or the only one in a folder without another model."""
    if found.is_file():
        return found
    files = sorted(path for path in found.iterdir() if is_gguf(path))
    if not files or any((found / name).is_file() for name in ("config.json", "adapter_config.json")):
        return None
    if len(files) > 1:
        raise CoramError(
            f"{found} contains {len(files)} GGUF files, such as {files[0].name}; pass the path of one of them"
        )
    return files[0]


def _nearest(path: Path) -> str:
    """A hint at a folder with a similar name."""
    parent = path.parent
    names = [found.name for found in parent.iterdir() if found.is_dir()] if parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {str(parent / near[0])!r}?)" if near else ""


def split_adapter(text: str) -> tuple[str, str | None]:
    """The parts of `model+adapter`, as mergekit writes it; a folder with a + in its name is one part."""
    model, mark, adapter = text.partition("+")
    if not mark or Path(text.partition("=")[2] or text).expanduser().is_dir():
        return text, None
    return model, adapter


class Located(NamedTuple):
    """A local folder or GGUF file, where it comes from, and its commit on the Hub."""

    folder: Path
    location: str
    commit: str | None = None


def fetch(source: Source) -> Located:
    """The local folder or GGUF file of a source, downloaded if it is on the Hub."""
    if Path(source.location).exists():
        return Located(Path(source.location), source.location)
    one_file = bool(source.folder) and is_gguf(Path(source.folder or ""))
    inside = f"{source.folder}/" if source.folder else ""
    allowed = [str(source.folder)] if one_file else [f"{inside}*"] if inside else None
    ignored = [] if one_file else [f"{inside}{pattern}" for pattern in OTHER_FORMATS]
    try:
        root = Path(
            snapshot_download(
                source.location,
                revision=source.revision,
                allow_patterns=allowed,
                ignore_patterns=ignored,
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).partition("\n")[0]
        raise CoramError(
            f"no such folder: {source.location!r}{_nearest(Path(source.location))}, and it cannot be "
            f"downloaded from the Hub ({why})"
        ) from error
    folder = root / source.folder if source.folder else root
    if not folder.exists():
        what = "file" if one_file else "folder"
        raise CoramError(f"{source.name!r}: {source.location!r} has no {what} {source.folder!r}")
    commit = root.name if root.parent.name == "snapshots" else None
    location = f"{source.location}:{source.folder}" if source.folder else source.location
    return Located(folder, location, commit)
