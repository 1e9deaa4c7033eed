"""`coram-hf push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def push(
    folder: Annotated[Path, typer.Argument(help="A folder that was merged before.")],
    repo: Annotated[str, typer.Argument(help="Where to: org/name.")],
    private: Annotated[bool | None, typer.Option(help="Whether a new repository is private.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to push to.")] = None,
    message: Annotated[str | None, typer.Option(help="Message of the commit.")] = None,
    create_pr: Annotated[bool, typer.Option(help="Open a pull request.")] = False,
) -> None:
    """Push a merged folder to the Hub in one commit, once it is seen to be whole.

    The token is that of `hf auth login`, or HF_TOKEN. A push that was interrupted does not send again what
    has arrived.
    """
    from coram_hf.hub import push_folder

    address = push_folder(
        folder, repo, private=private, revision=revision, commit_message=message, create_pr=create_pr
    )
    print(f"pushed {folder} to {address}")
