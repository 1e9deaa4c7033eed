"""Upload a folder to the Hub: in one commit, or a large one in several."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi

from coram_hf.hub.recipe import RECIPE_NAME
from coram_hf.inputs.parent_card import HUB_ID

ADAPTER_CONFIG = "adapter_config.json"
HIDDEN = [".*", "**/.*"]


class Size(NamedTuple):
    """A number of files, and of bytes."""

    files: int
    bytes: int

    def holds(self, sizes: Sequence[int]) -> bool:
        """Whether files of these sizes are within both numbers."""
        return len(sizes) <= self.files and sum(sizes) <= self.bytes


LARGE = Size(200, 100 * 10**9)
"""The client warns of large folders above 200 files, and documents them as "hundreds of GB"."""


def upload(
    api: HfApi,
    folder: Path,
    repository: str,
    *,
    revision: str | None,
    message: str,
    create_pr: bool,
    stale: list[str],
    weights: Sequence[str],
    large: Size,
) -> str:
    """Upload a folder, delete stale files, and return the address of the last commit or the pull request.

    The weights of a large folder come first, in commits of at most the size `large`, so that a push that
    fails late resumes after those; config, index, card and report are the last commit. The client's own
    `upload_large_folder` is gone since its version 2.0, and takes neither messages nor pull requests.
    """
    parts: list[list[str]] = []
    if not large.holds([path.stat().st_size for path in _files(folder)]):
        parts = batches({name: (folder / name).stat().st_size for name in weights}, large)
    address = None
    for number, names in enumerate([*parts, None], 1):
        commit: Any = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=revision,
            commit_message=message if names is None else f"{message} (weights, {number} of {len(parts)})",
            create_pr=create_pr,
            allow_patterns=None if names is None else [escape(name) for name in names],
            delete_patterns=stale if names is None else None,
            ignore_patterns=list(HIDDEN),
        )
        if create_pr:
            address, revision, create_pr = commit.pr_url, commit.pr_revision, False
    return str(address or commit.commit_url)


def batches(sizes: dict[str, int], most: Size) -> list[list[str]]:
    """Names in order, in groups that are within `most`; a larger file is a group of its own."""
    found: list[list[str]] = []
    for name, size in sizes.items():
        if found and most.holds([*(sizes[other] for other in found[-1]), size]):
            found[-1].append(name)
        else:
            found.append([name])
    return found


@contextmanager
def without_local_paths(folder: Path, recipe: str) -> Iterator[Path]:
    """The folder; if its files name local paths, a copy in which those files do not, and the rest are links.

    Local paths may be in the base of an adapter, and in the sources of the recipe, which `recipe` replaces.
    """
    public = {}
    if (folder / RECIPE_NAME).is_file() and (folder / RECIPE_NAME).read_text(encoding="utf-8") != recipe:
        public[RECIPE_NAME] = recipe
    path = folder / ADAPTER_CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    base = str(config.get("base_model_name_or_path") or "")
    if base and not (HUB_ID.fullmatch(base) and not Path(base).exists()):
        text = json.dumps({**config, "base_model_name_or_path": None}, indent=2, sort_keys=True)
        public[ADAPTER_CONFIG] = f"{text}\n"
    if not public:
        yield folder
        return
    with tempfile.TemporaryDirectory() as parent:
        linked = Path(parent)
        for source in _files(folder):
            link = linked / source.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source.resolve())
        for name, text in public.items():
            (linked / name).unlink()
            (linked / name).write_text(text, encoding="utf-8")
        yield linked


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
