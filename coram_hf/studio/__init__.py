"""`coram-hf studio`: merge by looking, in a browser on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from coram_hf.errors import CoramError

INSTALL = "pip install 'coram-hf[studio]'"
LOCAL = "127.0.0.1"


def run_studio(
    roots: Sequence[str | Path],
    *,
    host: str = LOCAL,
    port: int | None = None,
    hub: bool = True,
    browser: bool = False,
    block: bool = True,
) -> Any:
    """Serve the studio, and return the address if it is not to `block`."""
    if find_spec("gradio") is None:
        raise CoramError(f"the studio needs Gradio, which is not installed; run: {INSTALL}")
    from coram_hf.demo.run import SUITE
    from coram_hf.studio.app import appearance, build
    from coram_hf.studio.roots import Roots

    app = build(Roots(roots, readable=[SUITE / "adapters"], hub=hub))
    app.queue(default_concurrency_limit=1, api_open=False)
    _, local, _ = app.launch(
        server_name=host,
        server_port=port,
        inbrowser=browser,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        footer_links=[],
        ssr_mode=False,
        enable_monitoring=False,
        **appearance(),
    )
    if block:
        print(
            f"The studio is at {local} and works below {', '.join(map(str, roots))}; press Ctrl+C to end it."
        )
        app.block_thread()
    return local
