"""`coram-hf studio`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Root = Annotated[
    list[Path] | None,
    typer.Option(help="Folder to read models from and write merges to; repeatable; by default this folder."),
]


def studio(
    root: Root = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets everybody on the network in.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="Port; by default the first free one from 7860 on.")
    ] = None,
    hub: Annotated[
        bool, typer.Option(help="Whether Hub ids may be typed; --no-hub keeps it offline.")
    ] = True,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
) -> None:
    """Merge by looking, in a browser: plan, merge, chat, save.

    Needs the extra `studio`: pip install 'coram-hf[studio]'
    """
    from coram_hf.studio import run_studio

    run_studio(root or [Path.cwd()], host=host, port=port, hub=hub, browser=browser)
