"""Roots: the folders that the studio may read from and write to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coram_hf.errors import CoramError
from coram_hf.inputs.locate import is_gguf, parse_source

MODEL, ADAPTER = "config.json", "adapter_config.json"
DEPTH = 3
"""How deep models are looked for below a root."""
HIDDEN = (".", "_")
"""How folders begin that are not looked into."""


class Roots:
    """Folders given by the user; everything outside of them is refused, also behind links and `..`."""

    def __init__(self, roots: Sequence[str | Path], readable: Sequence[Path] = (), hub: bool = True) -> None:
        """`readable`: folders to read from only, such as the demo's adapters; `hub`: whether to take ids."""
        self.folders = tuple(Path(root).expanduser().resolve() for root in roots)
        for folder in self.folders:
            if not folder.is_dir():
                raise CoramError(f"--root {folder} is not a folder; create it, or pass another one")
        if not self.folders:
            raise CoramError("the studio needs at least one --root, a folder to read from and write to")
        self._readable = (*self.folders, *(folder.resolve() for folder in readable))
        self._hub = hub

    def source(self, text: str) -> str:
        """`[name=]folder` below a root, with its whole path, or `[name=]Hub id`; raises for anything else."""
        name, mark, place = text.strip().rpartition("=")
        if not place:
            raise CoramError("no model is given: choose one, or type a folder or a Hub id")
        found = self._existing(place)
        if found is not None:
            return f"{name}{mark}{found}"
        if self._looks_local(place):
            raise CoramError(f"no such folder: {place!r}; it must be below {self._named()}")
        if not self._hub:
            raise CoramError(f"{place!r} is not below {self._named()}, and Hub ids are switched off")
        parse_source(text.strip())
        return text.strip()

    def output(self, text: str) -> Path:
        """A folder below a root, for something to be written; a relative one is below the first root."""
        if not text.strip():
            raise CoramError("no folder is given: type a name for it")
        path = (self.folders[0] / Path(text.strip()).expanduser()).resolve()
        if path in self.folders or not self._inside(path, self.folders):
            raise CoramError(f"{text.strip()!r} is refused: output must be in a folder below {self._named()}")
        return path

    def models(self) -> tuple[list[str], list[str]]:
        """Checkpoints and adapters below the roots, relative to the first root where they are below it."""
        checkpoints: list[str] = []
        adapters: list[str] = []
        for root in self.folders:
            for folder in _folders(root, DEPTH):
                below = folder.is_relative_to(self.folders[0])
                shown = str(folder.relative_to(self.folders[0]) if below else folder)
                if (folder / ADAPTER).is_file():
                    adapters.append(shown)
                elif (folder / MODEL).is_file() or any(is_gguf(path) for path in folder.iterdir()):
                    checkpoints.append(shown)
        return checkpoints, adapters

    def _existing(self, place: str) -> Path | None:
        for root in self.folders:
            path = (root / Path(place).expanduser()).resolve()
            if path.exists():
                if not self._inside(path, self._readable):
                    raise CoramError(f"{place!r} is refused: it is not below {self._named()}")
                return path
        return None

    def _looks_local(self, place: str) -> bool:
        return place.startswith((".", "/", "~")) or (place.count("/") > 1 and ":" not in place)

    def _inside(self, path: Path, folders: Sequence[Path]) -> bool:
        return any(path.is_relative_to(folder) for folder in folders)

    def _named(self) -> str:
        return " or ".join(map(str, self.folders)) + "; start the studio with --root to allow another folder"


def _folders(folder: Path, depth: int) -> list[Path]:
    """A folder and those below it; what is inside a model is not looked at."""
    if (folder / MODEL).is_file() or (folder / ADAPTER).is_file():
        return [folder]
    found = [folder]
    if depth:
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink() and not path.name.startswith(HIDDEN):
                found += _folders(path, depth - 1)
    return found
