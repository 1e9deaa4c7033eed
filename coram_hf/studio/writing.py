"""What leaves the studio: card, report page, folders, and repositories on the Hub."""

from __future__ import annotations

import tempfile
from pathlib import Path

from huggingface_hub import get_token

from coram_hf.config import CoramConfig
from coram_hf.errors import CoramError
from coram_hf.execution.workspace import check_target
from coram_hf.hub import push_folder
from coram_hf.hub.card import CARD, render_card, renew_card
from coram_hf.report import MergeReport
from coram_hf.report.diagnostics import diagnose_inputs
from coram_hf.report.merge_report import REPORT_NAME
from coram_hf.report.page import render_page
from coram_hf.studio.session import Session


def card_text(session: Session) -> str:
    """The card as it would be written now."""
    if session.folder:
        return (Path(session.folder) / CARD).read_text(encoding="utf-8")
    return str(render_card(session.merged().report).content)


def report_page(session: Session) -> str:
    """The report page of what is open, with the merge in memory or in its folder if there is one."""
    if session.merger is None:
        raise CoramError("nothing is open yet: choose a base and experts, then inspect them")
    merged = session.result.model if session.result is not None else session.folder
    config: CoramConfig = session.merger.config
    given = {"merge": merged} if merged else {}
    return render_page(diagnose_inputs(session.merger.inputs, config, merged=given, progress=False))


def save(session: Session, folder: str, card: str, adapter: bool, overwrite: bool = False) -> str:
    """Write the merge as a model or as an adapter of the base, with the edited card; returns a sentence."""
    target = session.roots.output(folder)
    session.idle()
    session.merged()
    if overwrite and target.is_dir() and any(target.iterdir()) and not (target / REPORT_NAME).is_file():
        raise CoramError(f"{target} is not a merge of coram_hf, so it is not replaced; choose another name")
    check_target(target, overwrite, 0, session.input_files())
    words = _write(session, target, card, adapter, overwrite)
    return f"Saved {words} to {target}."


def push(session: Session, repository: str, card: str, adapter: bool, private: bool) -> str:
    """Push the merge with the edited card and the token of `hf auth login`; returns the commit's address."""
    session.idle()
    if not repository.strip():
        raise CoramError("no repository is given: type a name such as me/my-merge")
    if get_token() is None:
        raise CoramError(
            "not logged in: run `hf auth login` in a terminal, or start the studio with HF_TOKEN"
        )
    with tempfile.TemporaryDirectory() as parent:
        if session.folder and not adapter:
            folder = Path(session.folder)
            _edit_card(folder, card)
        else:
            folder = Path(parent) / "merged"
            _write(session, folder, card, adapter, overwrite=False)
        return hidden(push_folder(folder, repository.strip(), private=private))


def hidden(text: str) -> str:
    """A text without the token of the Hub."""
    token = get_token()
    return text.replace(token, "***") if token else text


def _write(session: Session, target: Path, card: str, adapter: bool, overwrite: bool) -> str:
    result = session.merged()
    if adapter:
        report = result.save_adapter(target, overwrite=overwrite, progress=False)
        error = report.adapter.get("error")
        words = "an adapter of the base" + ("" if error is None else f" (relative error {error:.2g})")
    else:
        result.save_pretrained(target)
        words = "the model"
        _edit_card(target, card)
    return words


def _edit_card(folder: Path, card: str) -> None:
    """Write an edited card; the section between our markers follows the report."""
    if card.strip():
        renew_card(card, MergeReport.load(folder), folder)
