"""Prompts: unlabelled inputs of every expert's own kind, from lists, files, or splits of datasets."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coram_hf.config import CalibrationConfig, check_names
from coram_hf.config.declared import suggestion
from coram_hf.errors import CoramError

logger = logging.getLogger(__name__)

BASE = "base"
"""The name under which the base itself may be given prompts, to keep what it can do."""

SUFFIXES = (".txt", ".jsonl")
KEYS = ("prompt", "messages")
"""Where a row of JSON or of a dataset holds its prompt; everything else in it is ignored."""

Message = Mapping[str, Any]
Prompt = str | tuple[Message, ...]
"""A text that an expert continues, or the messages of a chat that it answers."""

PromptSource = str | Path | Iterable[Any]
PromptSources = str | Path | Mapping[str, PromptSource]
"""A folder with a file per expert, or a source per expert: a file, a list, or a split of a dataset."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of every teacher: of all experts, and of the base if it has any."""

    of: Mapping[str, tuple[Prompt, ...]]
    chat: bool = False

    @property
    def counts(self) -> dict[str, int]:
        """The number of prompts by teacher."""
        return {name: len(prompts) for name, prompts in self.of.items()}

    @property
    def sha256(self) -> str:
        """A hash of all prompts, and of whether they are sent as a chat."""
        text = json.dumps([self.chat, self.of], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read_prompts(given: PromptSources, experts: Sequence[str], config: CalibrationConfig) -> Prompts:
    """The prompts of all experts; raises if an expert has none, or a name is no expert's."""
    sources = _in_folder(Path(given), experts) if isinstance(given, str | Path) else given
    if not isinstance(sources, Mapping):
        raise CoramError(
            "calibrate takes a dict expert -> prompts, or a folder with a file per expert, "
            f"found {given!r:.60}"
        )
    check_names(sources, [*experts, BASE], "expert with prompts for calibration")
    for name in experts:
        if name not in sources:
            raise CoramError(
                f"calibrate: no prompts for expert {name!r}; every expert needs a few of its own"
            )
    names = [name for name in dict.fromkeys((*experts, BASE)) if name in sources]
    found = {name: _read(sources[name], f"prompts of {name!r}", config.prompt_limit) for name in names}
    return Prompts(found, config.chat)


def _in_folder(folder: Path, experts: Sequence[str]) -> dict[str, Path]:
    """The file of every expert in a folder, and of the base; files of unrelated names are left alone."""
    if not folder.is_dir():
        raise CoramError(
            f"calibrate: {folder} is not a folder; make one with a file of prompts per expert, "
            f"such as {experts[0]}.txt with one prompt per line, or {experts[0]}.jsonl"
        )
    found: dict[str, Path] = {}
    for suffix in SUFFIXES:
        for path in sorted(folder.rglob(f"*{suffix}")):
            name = path.relative_to(folder).as_posix().removesuffix(suffix)
            if name in found:
                raise CoramError(f"calibrate: {found[name]} and {path} are both called {name!r}; delete one")
            found[name] = path
    for name in [name for name in found if name not in (*experts, BASE)]:
        if not suggestion(name, (*experts, BASE)):
            logger.warning("calibrate: %s belongs to no expert, and is left alone", found.pop(name))
    for name in experts:
        if name not in found:
            raise CoramError(
                f"calibrate: {folder} has no prompts for expert {name!r}; "
                f"write some to {name}.txt, one per line, or to {name}.jsonl"
            )
    return found


def _read(source: PromptSource, who: str, limit: int | None) -> tuple[Prompt, ...]:
    rows = _file(Path(source)) if isinstance(source, str | Path) else source
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise CoramError(f"{who}: expected a file, a list or a split of a dataset, found {rows!r:.80}")
    prompts: list[Prompt] = []
    for number, row in enumerate(rows, start=1):
        if limit is not None and len(prompts) >= limit:
            break
        prompts.append(_prompt(row, f"{who}, prompt {number}"))
    if not prompts:
        raise CoramError(f"{who}: none found; give at least one")
    return tuple(prompts)


def _file(path: Path) -> list[Any]:
    """The prompts of a text file, one per line, or the objects of a JSONL file."""
    if path.suffix not in SUFFIXES or not path.is_file():
        raise CoramError(f"{path} is not a .txt or .jsonl file of prompts")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise CoramError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    numbered = [(number, line.rstrip("\r")) for number, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix == ".txt":
        return [line for _, line in numbered]
    return [_json(line, f"{path}, line {number}") for number, line in numbered]


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CoramError(f"{where}: is not JSON ({error})") from None


def _prompt(row: Any, where: str) -> Prompt:
    """A text or messages, as such or under one of KEYS."""
    if isinstance(row, Mapping):
        found = next((row[key] for key in KEYS if key in row), None)
        if found is None:
            wanted, keys = " or ".join(map(repr, KEYS)), ", ".join(map(repr, row))
            raise CoramError(f"{where}: expected {wanted}, found only {keys}")
        row = found
    if isinstance(row, str) and row:
        return row
    messages = row if isinstance(row, list | tuple) else []
    if messages and all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in messages):
        return tuple(dict(one) for one in messages)
    raise CoramError(f"{where}: expected text or chat messages with role and content, found {row!r:.80}")
