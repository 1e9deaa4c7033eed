"""Configurations as JSON files, in folders and on the Hub, with the method names of transformers."""

from __future__ import annotations

import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from coram_hf.errors import CoramError

CONFIG_FILE = "coram_config.json"
REPORT_FILE = "coram_report.json"
"""The report beside a merge, which holds its configuration as well."""


class Saved(ABC):
    """A configuration that is saved as JSON and read back."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Every field as plain values."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write coram_config.json into a folder."""
        path = Path(folder)
        if path.is_file():
            raise CoramError(f"{path} is a file; pass a folder for {CONFIG_FILE}")
        path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        (path / CONFIG_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, revision: str | None = None, token: str | None = None
    ) -> Self:
        """The configuration in a JSON file, a folder or a Hub repository, or of a merge that is there."""
        path = Path(source).expanduser()
        if path.is_dir():
            path = next((p for name in (CONFIG_FILE, REPORT_FILE) if (p := path / name).is_file()), path)
        if not path.is_file():
            path = _download(str(source), path.is_dir(), revision, token)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, ValueError) as error:
            raise CoramError(f"{path} is not JSON ({error})") from error
        if not isinstance(content, dict):
            raise CoramError(f"{path} must hold a mapping of options, found {type(content).__name__}")
        if path.name == REPORT_FILE:
            if content.get("slice_height") is None:
                raise CoramError(
                    f"{path}: the merge was made by {content.get('method')}, without a CoramConfig"
                )
            content = content.get("config", {})
        return cls.from_dict(content)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        create_pr: bool = False,
        token: str | None = None,
    ) -> str:
        """Upload coram_config.json, to a new repository if there is none, and return the commit's address."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            try:
                repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
                return api.upload_file(
                    path_or_fileobj=Path(folder) / CONFIG_FILE,
                    path_in_repo=CONFIG_FILE,
                    repo_id=repository,
                    revision=revision,
                    commit_message=commit_message or "CORAM configuration",
                    create_pr=create_pr,
                ).commit_url
            except (HfHubHTTPError, HFValidationError) as error:
                why = str(error).partition("\n")[0]
                raise CoramError(
                    f"cannot push to {repo_id!r}: {why}; check its name and your token"
                ) from None


def _download(source: str, is_folder: bool, revision: str | None, token: str | None) -> Path:
    """The first of the files that the Hub repository has."""
    if is_folder or source.startswith((".", "/", "~")) or source.endswith(".json"):
        raise CoramError(f"{source} has no {CONFIG_FILE}; pass a folder, a JSON file or a Hub repository")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    for name in (CONFIG_FILE, REPORT_FILE):
        try:
            return Path(hf_hub_download(source, name, revision=revision, token=token))
        except EntryNotFoundError:
            continue
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            why = str(error).partition("\n")[0]
            raise CoramError(f"{source!r} is not a folder, and cannot be read from the Hub ({why})") from None
    raise CoramError(f"{source!r} has neither {CONFIG_FILE} nor {REPORT_FILE} on the Hub")
