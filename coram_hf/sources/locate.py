"""Where a model or an adapter is: a folder, a Hub repository, a folder inside one, at some revision."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoModel, PreTrainedModel

from coram_hf.errors import MergeError

_HUB = re.compile(r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?::(?P<folder>[^@:]+))?(?:@(?P<revision>[\w./-]+))?")


class Source(NamedTuple):
    """`[name=]path` or `[name=]org/repo[:folder/inside][@revision]`, read apart."""

    name: str
    location: str
    folder: str | None = None
    revision: str | None = None


def parse_source(text: str) -> Source:
    """Read a source; without a name it is called after its last folder, or after its repository."""
    name, mark, rest = text.partition("=")
    if not mark or "/" in name:
        name, rest = "", text
    path = Path(rest).expanduser()
    if rest and path.is_dir():
        return Source(name or path.resolve().name, str(path))
    match = _HUB.fullmatch(rest)
    if match is None or rest.startswith((".", "/", "~")):
        raise MergeError(
            f"{text!r} is neither a folder nor a Hub repository; "
            "a source is path, org/repo, org/repo@revision or org/repo:folder/inside@revision"
        )
    label = Path(match["folder"]).name if match["folder"] else match["repo"]
    return Source(name or label, match["repo"], match["folder"], match["revision"])


def fetch(source: Source) -> Path:
    """The local folder of a source, downloaded from the Hub if it is there."""
    if Path(source.location).is_dir():
        return Path(source.location)
    patterns = [f"{source.folder}/*"] if source.folder else None
    try:
        root = Path(snapshot_download(source.location, revision=source.revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).partition("\n")[0]
        raise MergeError(f"{source.name!r}: cannot get {source.location!r} from the Hub ({why})") from error
    folder = root / source.folder if source.folder else root
    if not folder.is_dir():
        raise MergeError(f"{source.name!r}: {source.location!r} has no folder {source.folder!r}")
    return folder


def load_model(folder: Path, trust_remote_code: bool = False) -> PreTrainedModel:
    """A checkpoint in the class that its config names and the dtype that it is stored in."""
    if not (folder / "config.json").is_file():
        raise MergeError(f"{folder} holds neither a model (config.json) nor an adapter (adapter_config.json)")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    name = (config.architectures or [""])[0]
    loader = getattr(transformers, name, AutoModel)
    model: PreTrainedModel = loader.from_pretrained(folder, dtype="auto")
    return model
