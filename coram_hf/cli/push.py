"""`coram-hf push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def push(
    folder: Annotated[Path, typer.Argument(help="A merged folder or adapter.")],
    repo: Annotated[str, typer.Argument(help="The repository: org/name.")],
    private: Annotated[bool | None, typer.Option(help="Whether a new repository is private.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to push to.")] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    create_pr: Annotated[bool, typer.Option(help="Open a pull request.")] = False,
) -> None:
    """Push a merged folder or adapter to the Hub.

    Its hashes are verified first. The token is that of `hf auth login`, or HF_TOKEN. After an interrupted
    push, the same command sends only what has not arrived yet.
    """
    from coram_hf.cli.summary import conclude, facts
    from coram_hf.hub import push_folder

    address = push_folder(
        folder, repo, private=private, revision=revision, commit_message=message, create_pr=create_pr
    )
    found = {"folder": str(folder), "repository": repo, "address": str(address)}
    conclude(facts(f"pushed {folder} to {address}", found), found)
