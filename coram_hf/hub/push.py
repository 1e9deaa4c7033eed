"""Push a merged folder to the Hub in one commit, and load reports from there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

from coram_hf.config import check_names
from coram_hf.errors import CoramError
from coram_hf.hub.card import CARD, edited_card, renew_card, write_card
from coram_hf.hub.recipe import recipe_text
from coram_hf.hub.upload import ADAPTER_CONFIG, LARGE, Size, upload, without_local_paths
from coram_hf.outputs.hashing import file_hashes
from coram_hf.outputs.heads import FOLDER as HEADS
from coram_hf.report import MergeReport
from coram_hf.report.eval_results import EVAL_NAME
from coram_hf.report.merge_report import REPORT_NAME

PUSH_OPTIONS = ("private", "revision", "commit_message", "create_pr", "token")
STALE = [
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*",
    "adapter_model*",
    "config.json",
    ADAPTER_CONFIG,
    EVAL_NAME,
    f"{HEADS}/*",
]
"""Weights, scores and kind of an earlier push, which must not remain beside the new ones."""

ADVICE = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a token with write access",
    403: "the token has no write access there; check its permissions and the name of the repository",
    409: "someone else changed the repository at the same time; push again",
}


def push_new(make: Callable[[Path], object], repo_id: str, options: Mapping[str, Any]) -> str:
    """Push the folder that `make` fills; the options are those of `push_folder`."""
    check_names(options, PUSH_OPTIONS, "push option")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "merged"
        make(folder)
        return push_folder(folder, repo_id, fresh=True, **options)


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
    fresh: bool = False,
    large: Size = LARGE,
) -> str:
    """Upload a merged folder or adapter, and return the address of the commit or pull request.

    The hashes in the folder's report are verified first. Everything is one commit, unless the folder is above
    the size `large`: then the weights come first, in commits of at most that size. Files that an interrupted
    push has already uploaded are not sent again. A card that was edited, here or on the Hub, keeps everything
    but our marked section; `fresh` says that the local card has just been made, so that only edits on the Hub
    count. Local paths of sources, in the recipe and in an adapter's config, are not published.
    """
    folder = Path(folder)
    if create_pr and revision is not None:
        raise CoramError("create_pr opens a pull request to the main branch; remove revision")
    report = check_whole(folder)
    api = HfApi(token=token)
    try:
        repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr:
            api.create_branch(repository, branch=revision, exist_ok=True)
        _renew_card(api, folder, repository, revision, report, fresh)
        with without_local_paths(folder, recipe_text(report)) as files:
            return upload(
                api,
                files,
                repository,
                revision=revision,
                message=commit_message or f"Merge of {report.n_experts} experts with {report.line}",
                create_pr=create_pr,
                stale=_stale(api, repository, revision, folder),
                weights=list(report.files),
                large=large,
            )
    except HfHubHTTPError as error:
        raise CoramError(_explain(f"cannot push to {repo_id!r}", error, token)) from None
    except HFValidationError as error:
        raise CoramError(f"cannot push to {repo_id!r}: {_hidden(str(error), token)}") from None
    except CoramError:
        raise
    except Exception as error:  # connections fail in many ways; a second push resumes
        why = _hidden(f"{type(error).__name__}: {error}", token)
        raise CoramError(f"cannot push to {repo_id!r}: {why}; push again to resume") from None


def check_whole(folder: Path) -> MergeReport:
    """The report of a merged folder or adapter, after its weight files are verified."""
    if not (folder / REPORT_NAME).is_file():
        raise CoramError(f"{folder} holds no {REPORT_NAME}: it is not a merge of coram_hf")
    report = MergeReport.load(folder)
    if not report.files:
        raise CoramError(f"{folder / REPORT_NAME} has no hashes of the weights; merge again")
    config = ADAPTER_CONFIG if report.adapter else "config.json"
    if not (folder / config).is_file():
        raise CoramError(f"{folder} lacks {config}, so it is incomplete; merge again")
    found = file_hashes(folder)
    for name, expected in report.files.items():
        if name not in found:
            raise CoramError(f"{folder} lacks {name}, so it is incomplete; merge again")
        if found[name] != expected:
            raise CoramError(
                f"{folder / name} is not what was merged: its size or sha256 has changed; merge again"
            )
    extra = sorted(set(found) - set(report.files))
    if extra:
        raise CoramError(f"{folder} has {extra[0]}, which is not part of the merge; move or delete it")
    return report


def load_report(source: str | Path, *, revision: str | None = None, token: str | None = None) -> MergeReport:
    """The report of a merge in a folder or on the Hub."""
    if Path(source).is_dir():
        if not (Path(source) / REPORT_NAME).is_file():
            raise CoramError(f"{source} holds no {REPORT_NAME}: it is not a merge of coram_hf")
        return MergeReport.load(source)
    try:
        path = hf_hub_download(str(source), REPORT_NAME, revision=revision, token=token)
    except EntryNotFoundError as error:
        raise CoramError(f"{str(source)!r} holds no {REPORT_NAME}: it is not a merge of coram_hf") from error
    except HfHubHTTPError as error:
        raise CoramError(_explain(f"cannot get {str(source)!r} from the Hub", error, token)) from None
    except (OSError, ValueError) as error:
        raise CoramError(f"cannot get {str(source)!r} from the Hub: {_hidden(str(error), token)}") from None
    return MergeReport.load(Path(path).parent)


def _stale(api: HfApi, repository: str, revision: str | None, folder: Path) -> list[str]:
    """Weights, settings and heads of an earlier push that this one does not replace."""
    try:
        names = api.list_repo_files(repository, revision=revision)
    except HfHubHTTPError:
        return []
    old = [name for name in names if any(fnmatch(name, pattern) for pattern in STALE)]
    own = [name for name in old if "/" not in name or name.startswith(f"{HEADS}/")]
    return [name for name in own if not (folder / name).is_file()]


def _renew_card(
    api: HfApi, folder: Path, repository: str, revision: str | None, report: MergeReport, fresh: bool
) -> None:
    """Update the card in the folder, keeping what was written into it, or else into the one on the Hub."""
    path = folder / CARD
    text = "" if fresh else edited_card(path, folder)
    text = text or _remote_edited(api, repository, revision)
    if text:
        renew_card(text, report, folder)
    elif not path.is_file():
        write_card(report, folder)


def _remote_edited(api: HfApi, repository: str, revision: str | None) -> str:
    """The text of the card on the Hub if it was edited, else ""."""
    found = {}
    for name in (CARD, REPORT_NAME):
        try:
            found[name] = Path(api.hf_hub_download(repository, name, revision=revision))
        except EntryNotFoundError:
            continue
    if CARD not in found:
        return ""
    if REPORT_NAME in found:
        return edited_card(found[CARD], found[REPORT_NAME].parent)
    return found[CARD].read_text(encoding="utf-8")


def _explain(what: str, error: HfHubHTTPError, token: str | None) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    why = _hidden(str(error).partition("\n")[0], token)
    advice = ADVICE.get(status) if status is not None else None
    return f"{what}: {why}" + (f"; {advice}" if advice else "")


def _hidden(text: str, token: Any) -> str:
    """A message on one line, without the token."""
    line = " ".join(text.split())
    return line.replace(token, "***") if isinstance(token, str) and token else line
