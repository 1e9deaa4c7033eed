"""What leaves the studio: card, report page, folders, and repositories on the Hub."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData, get_token

from coram_hf.config import CoramConfig
from coram_hf.errors import CoramError
from coram_hf.execution.workspace import check_target
from coram_hf.hub import push_folder
from coram_hf.hub.card import BEGIN, CARD, END, render_card, renew_card
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
    if session.report is not None and session.report.lam is not None:
        config = replace(config, kappa=None, scale="sqrt_n", lam=session.report.lam)
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
    _check_card(card)
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
    _check_card(card)
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
    if not adapter:
        result.save_pretrained(target)
        _edit_card(target, card)
        return "the model"
    made = ModelCard(card_text(session))
    report = result.save_adapter(
        target, overwrite=overwrite, card_data=_edited_fields(card, made), progress=False
    )
    _edit_card(target, _for_adapter(card, made, target))
    error = report.adapter.get("error")
    return "an adapter of the base" + ("" if error is None else f" (relative error {error:.2g})")


def _edit_card(folder: Path, card: str) -> None:
    """Write an edited card; the section between our markers follows the report."""
    if card.strip():
        renew_card(card, MergeReport.load(folder), folder)


def _check_card(card: str) -> None:
    """Raise if the metadata of an edited card cannot be read, before anything is written."""
    try:
        ModelCard(card)
    except (yaml.YAMLError, ValueError) as error:
        why = " ".join(str(error).split())
        raise CoramError(f"the card's metadata, between the --- lines, must be YAML: {why}") from None


def _edited_fields(card: str, made: ModelCard) -> ModelCardData | None:
    """Metadata that were edited; all others are the adapter's own, such as its library."""
    if not card.strip():
        return None
    before = made.data.to_dict()
    edited = ModelCard(card).data.to_dict()
    return ModelCardData(**{key: value for key, value in edited.items() if before.get(key) != value})


def _for_adapter(card: str, made: ModelCard, folder: Path) -> str:
    """The adapter's card, with the text around our section as it was edited."""
    if not card.strip():
        return ""
    own = ModelCard((folder / CARD).read_text(encoding="utf-8"))
    parts = zip(*(_around(found.text) for found in (ModelCard(card), made, own)), strict=True)
    text = "".join(ours if edited == before else edited for edited, before, ours in parts)
    return f"---\n{own.data.to_yaml().strip()}\n---\n{text}"


def _around(text: str) -> tuple[str, str, str]:
    """What is before our section, its markers if it has both, and what is after it."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.rpartition(END)
    return (before, BEGIN + END, after) if begin and end else (text, "", "")
