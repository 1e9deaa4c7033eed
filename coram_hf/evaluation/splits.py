"""Datasets by address: `datasets` objects, repositories on the Hub, folders and files, split by split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coram_hf.errors import CoramError, reason
from coram_hf.evaluation.questions import name_of_file

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "hf://datasets/"
BUILDERS: dict[str, tuple[str, dict[str, str]]] = {
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
}
"""Single files by their ending: the builder of `load_dataset`, and its options."""


@dataclass(frozen=True)
class Splits:
    """The splits of a dataset, which are loaded on request; `where` names it in messages."""

    where: str
    name: str
    names: tuple[str, ...]
    load: Callable[[str], Dataset]

    def chosen(self, split: str | None) -> str:
        """The split that was asked for, else `test`, else the only one."""
        if split is None:
            split = "test" if "test" in self.names else self.names[0] if len(self.names) == 1 else None
        if split is None or split not in self.names:
            found = ", ".join(map(repr, self.names))
            asked = "choose a split" if split is None else f"no split {split!r}"
            raise CoramError(f"{self.where}: {asked}; it has {found}, as in ?split={self.names[0]}")
        return split

    def __getitem__(self, split: str) -> Dataset:
        try:
            return self.load(split)
        except Exception as error:  # other people's files fail in many ways
            raise CoramError(f"{self.where}: split {split!r} cannot be read: {reason(error)}") from error


def open_splits(data: Any, config: str | None, revision: str | None) -> Splits:
    """The splits of a dataset, a dictionary of datasets, an address on the Hub, a folder or a file."""
    if isinstance(data, str | Path):
        return _of_address(str(data), config, revision)
    if config is not None or revision is not None:
        raise CoramError("config and revision belong to an address; a loaded dataset already has them")
    return _of_object(data)


def is_dataset(data: object) -> bool:
    """Whether an object is one of the `datasets` library, which is not imported to find out."""
    return type(data).__module__.partition(".")[0] == "datasets"


def _of_object(data: Any) -> Splits:
    from datasets import Dataset, DatasetDict

    if isinstance(data, DatasetDict):
        first = next(iter(data.values()), None)
        name = getattr(getattr(first, "info", None), "dataset_name", None) or "dataset"
        return Splits(f"dataset {name!r}", name, tuple(map(str, data)), data.__getitem__)
    if isinstance(data, Dataset):
        name = data.info.dataset_name or "dataset"
        return Splits(f"dataset {name!r}", name, (str(data.split or "data"),), lambda _: data)
    raise CoramError(
        f"a task must be a datasets.Dataset or DatasetDict, found {type(data).__name__}; "
        "load it without streaming=True"
    )


def _of_address(address: str, config: str | None, revision: str | None) -> Splits:
    if address.startswith(HUB):
        repository, _, marked = address.removeprefix(HUB).partition("@")
        parts = repository.split("/")
        if not all(parts) or len(parts) > 2:
            raise CoramError(f"{address}: must be {HUB}org/name, with options after a question mark")
        if marked and revision:
            raise CoramError(f"{address}: has a revision after @ and one in the query; remove one")
        return _built(address, parts[-1], repository, name=config, revision=revision or marked or None)
    path = Path(address)
    if revision is not None:
        raise CoramError(f"{address}: revision is only for datasets on the Hub; remove it")
    if not path.exists():
        raise CoramError(f"{address}: no such file or folder")
    if path.is_dir():
        if any((path / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            return _saved(path, config)
        return _built(address, path.resolve().name, str(path), name=config)
    if path.suffix not in BUILDERS:
        raise CoramError(f"{address}: not a dataset; files must end in {', '.join(BUILDERS)}")
    if config is not None:
        raise CoramError(f"{address}: config is for folders and the Hub; remove it")
    builder, options = BUILDERS[path.suffix]
    return _built(address, name_of_file(path), builder, data_files=str(path), **options)


def _saved(path: Path, config: str | None) -> Splits:
    """A folder that `save_to_disk` wrote."""
    from datasets import DatasetDict, load_from_disk

    if config is not None:
        raise CoramError(f"{path}: config is not for folders of save_to_disk; remove it")
    try:
        found = load_from_disk(path)
    except Exception as error:  # damaged files fail in many ways
        raise CoramError(f"{path} cannot be read as a saved dataset: {reason(error)}") from error
    if isinstance(found, DatasetDict):
        return Splits(str(path), path.resolve().name, tuple(map(str, found)), found.__getitem__)
    return Splits(str(path), path.resolve().name, (str(found.split or "data"),), lambda _: found)


def _built(where: str, called: str, source: str, **options: Any) -> Splits:
    """What `load_dataset` reads; the names of the splits are known before anything is prepared."""
    from datasets import load_dataset_builder

    try:
        builder: Any = load_dataset_builder(source, **options)
    except Exception as error:  # other people's files, and the network
        raise CoramError(f"{where} cannot be opened as a dataset: {reason(error)}") from error
    names = tuple(map(str, builder.config.data_files or builder.info.splits or ()))
    if not names:
        raise CoramError(f"{where}: no splits found in this dataset")

    def load(split: str) -> Dataset:
        builder.download_and_prepare()
        return builder.as_dataset(split=split)

    return Splits(where, called, names, load)
