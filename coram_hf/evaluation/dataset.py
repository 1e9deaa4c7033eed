"""Tasks from `datasets`: which columns of which split are asked, and how."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from coram_hf.config import check_names
from coram_hf.errors import CoramError
from coram_hf.evaluation.questions import Picture, Question, Task, is_text
from coram_hf.evaluation.splits import open_splits

if TYPE_CHECKING:
    from datasets import Dataset

FIELD = re.compile(r"\{([^{}]+)\}")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TRUTH = {"1": True, "true": True, "0": False, "false": False}


def read_dataset(
    data: Any,
    *,
    name: str | None = None,
    split: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    prompt: str = "prompt",
    target: str | None = None,
    choices: str | Sequence[str] | None = None,
    answer: str | None = None,
    labels: str | None = None,
    images: str | None = None,
    fewshot: int = 0,
    fewshot_split: str | None = None,
    chat: bool = False,
    limit: int | None = None,
) -> Task:
    """The questions in a dataset; see `dataset_task`."""
    if type(fewshot) is not int or fewshot < 0:
        raise CoramError(f"fewshot must be a number of examples, found {fewshot!r}")
    if fewshot_split is not None and not fewshot:
        raise CoramError(f"fewshot_split={fewshot_split!r} is given, but no fewshot=; add it")
    splits = open_splits(data, config, revision)
    chosen = splits.chosen(split)
    columns = _Columns(prompt, target, choices, answer, labels, images)
    questions = columns.read(splits[chosen], f"{splits.where}, split {chosen!r}", limit)
    shots: tuple[Question, ...] = ()
    if fewshot:
        source = splits.chosen(fewshot_split or "train")
        if source == chosen:
            raise CoramError(
                f"{splits.where}: fewshot_split and split are both {chosen!r}; examples must be from another"
            )
        shots = columns.read(splits[source], f"{splits.where}, split {source!r}", fewshot)
        if len(shots) < fewshot:
            raise CoramError(f"{splits.where}: fewshot={fewshot}, but split {source!r} has {len(shots)} rows")
    return Task(name or splits.name, questions, bool(chat), shots)


@dataclass(frozen=True)
class _Columns:
    """Where the parts of a question are: names of columns, or texts with columns in braces."""

    prompt: str
    target: str | None
    choices: str | Sequence[str] | None
    answer: str | None
    labels: str | None
    images: str | None

    def read(self, data: Dataset, where: str, limit: int | None) -> tuple[Question, ...]:
        """The questions of the first rows."""
        chosen = self._resolved(data.column_names, where)
        names, paths = data.column_names, chosen.paths()
        for path in paths:
            if path not in names and (path == self.images or _first(path, names) is None):
                raise CoramError(f"{where}: no column {path!r}; it has {_quoted(names)}")
        used = {_first(path, names) for path in paths}
        rows = data.select_columns([column for column in names if column in used])
        if limit is not None:
            rows = rows.select(range(min(limit, len(rows))))
        if not len(rows):
            raise CoramError(f"{where}: holds no rows")
        if self.images is not None:
            rows = _undecoded(rows, self.images, where)
        return tuple(chosen.question(row, f"{where}, row {i}") for i, row in enumerate(rows))

    def _resolved(self, names: Sequence[str], where: str) -> _Columns:
        """With the columns `target`, or `choices` and `answer`, if neither was given."""
        target, choices = self.target, self.choices
        if target is None and choices is None:
            known = [column for column in ("target", "choices") if column in names]
            if len(known) != 1:
                found = "it has both target and choices" if known else f"it has {_quoted(names)}"
                raise CoramError(f"{where}: name the column of the answers, as target= or choices=; {found}")
            target, choices = ("target", None) if known == ["target"] else (None, "choices")
        if target is not None and choices is not None:
            raise CoramError(f"{where}: target and choices are mutually exclusive; remove one")
        if choices is None and (self.answer is not None or self.labels is not None):
            raise CoramError(f"{where}: answer and labels belong to choices; use target alone, or choices")
        answer = None if choices is None else self.answer or "answer"
        return _Columns(self.prompt, target, choices, answer, self.labels, self.images)

    def paths(self) -> list[str]:
        """All columns that are used."""
        choices = [self.choices] if isinstance(self.choices, str) else self.choices or ()
        texts = [text for text in (self.prompt, self.target, *choices) if text is not None]
        found = [path for text in texts for path in (FIELD.findall(text) or [text])]
        return found + [path for path in (self.answer, self.labels, self.images) if path is not None]

    def question(self, row: Mapping[str, Any], where: str) -> Question:
        prompt, images = _text(row, self.prompt, where), self._pictures(row, where)
        if self.target is not None:
            return Question(prompt, (_text(row, self.target, where),), 0, images)
        if isinstance(self.choices, str) and not FIELD.search(self.choices):
            found = _value(row, self.choices, where)
            if not isinstance(found, list):
                raise CoramError(f"{where}: {self.choices!r} must be a list of texts, found {_short(found)}")
            choices = tuple(_as_text(one, f"{where}: {self.choices!r}") for one in found)
        else:
            several = [self.choices] if isinstance(self.choices, str) else self.choices or ()
            choices = tuple(_text(row, one, where) for one in several)
        if len(choices) < 2:
            raise CoramError(f"{where}: {len(choices)} choices; at least two are needed")
        return Question(prompt, choices, self._index(row, choices, where), images)

    def _index(self, row: Mapping[str, Any], choices: tuple[str, ...], where: str) -> int:
        """Which choice is right: a number from 0, one of the labels, the text of a choice, or a letter."""
        found = _value(row, self.answer or "", where)
        if self.labels is not None:
            labels = _value(row, self.labels, where)
            if not isinstance(labels, list) or len(labels) != len(choices) or labels.count(found) != 1:
                raise CoramError(f"{where}: answer {_short(found)} is not one of the labels {_short(labels)}")
            return labels.index(found)
        if type(found) is int and 0 <= found < len(choices):
            return found
        if isinstance(found, str) and choices.count(found) == 1:
            return choices.index(found)
        if isinstance(found, str) and found in list(LETTERS[: len(choices)]):
            return LETTERS.index(found)
        raise CoramError(
            f"{where}: answer {_short(found)} is not one of the {len(choices)} choices: expected a number "
            "from 0, a letter, or the text of one; for others, name the column of the labels"
        )

    def _pictures(self, row: Mapping[str, Any], where: str) -> tuple[Picture, ...]:
        if self.images is None:
            return ()
        found = row[self.images]
        several = found if isinstance(found, list) else [] if found is None else [found]
        return tuple(_picture(one, where) for one in several)


def _first(path: str, names: Sequence[str]) -> str | None:
    """The column that a path begins with; a path has dots between the keys of nested columns."""
    parts = path.split(".")
    heads = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return next((head for head in reversed(heads) if head in names), None)


def _value(row: Mapping[str, Any], path: str, where: str) -> Any:
    head = _first(path, list(row)) or ""
    found: Any = row[head]
    for key in path[len(head) :].split(".")[1:]:
        if not isinstance(found, dict) or key not in found:
            has = f"it has {_quoted(found)}" if isinstance(found, dict) else f"found {_short(found)}"
            raise CoramError(f"{where}: no {key!r} in {path!r}; {has}")
        found = found[key]
    return found


def _text(row: Mapping[str, Any], text: str, where: str) -> str:
    """A column's text, or a text whose braces are filled with columns."""
    if not FIELD.search(text):
        return _as_text(_value(row, text, where), f"{where}: {text!r}")
    return FIELD.sub(lambda field: _as_text(_value(row, field[1], where), f"{where}: {field[1]!r}"), text)


def _as_text(value: Any, what: str) -> str:
    """Text, or an integer as text: CSV files do not tell them apart."""
    if type(value) is int:
        return str(value)
    if not is_text(value):
        raise CoramError(f"{what} must be non-empty text, found {_short(value)}")
    return str(value)


def _undecoded(rows: Dataset, column: str, where: str) -> Dataset:
    """The rows with images as stored bytes, not pixels."""
    from datasets import Image, Sequence

    feature: Any = rows.features[column]
    inner = feature if isinstance(feature, Image) else getattr(feature, "feature", None)
    if not isinstance(inner, Image):
        raise CoramError(
            f"{where}: column {column!r} has no images; cast it to datasets.Image, or use a folder of images "
            "with metadata.jsonl"
        )
    stored = Image(decode=False)
    return rows.cast_column(column, stored if feature is inner else Sequence(stored))


def _picture(stored: Any, where: str) -> Picture:
    data, path = stored.get("bytes"), stored.get("path")
    try:
        return Picture(data if data is not None else Path(str(path)).read_bytes())
    except OSError as error:
        raise CoramError(f"{where}: image {path!r} cannot be read: {error.strerror}") from error


def parse_query(query: str, where: str) -> dict[str, Any]:
    """The options after the question mark of an address: `split=test&prompt=question`, percent-encoded."""
    declared = inspect.signature(read_dataset).parameters
    valid = [key for key in declared if key not in ("data", "limit")]
    found: dict[str, Any] = {}
    for part in query.split("&"):
        key, mark, value = part.partition("=")
        if not mark or not value:
            raise CoramError(f"{where}: {part!r} after the question mark is not name=value")
        check_names([key], valid, "option of a dataset")
        text, default = unquote(value), declared[key].default
        if key == "choices" and key in found:
            found[key] = [*([found[key]] if isinstance(found[key], str) else found[key]), text]
        elif key in found:
            raise CoramError(f"{where}: {key} is given twice")
        elif isinstance(default, bool):
            if text.lower() not in TRUTH:
                raise CoramError(f"{where}: {key} must be 1 or 0, found {text!r}")
            found[key] = TRUTH[text.lower()]
        elif isinstance(default, int):
            if not text.isdecimal():
                raise CoramError(f"{where}: {key} must be a number, found {text!r}")
            found[key] = int(text)
        else:
            found[key] = text
    return found


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _short(value: object) -> str:
    return repr(value)[:60]
