"""The studio as a Hugging Face Space, on its storage in /data if it has one, else in models/."""

import os
from pathlib import Path

from coram_hf.studio import run_studio

stored = Path("/data")
root = Path(os.environ.get("STUDIO_ROOT", stored if stored.is_dir() else "models"))
root.mkdir(exist_ok=True)
run_studio([root], host="0.0.0.0", port=int(os.environ.get("PORT", "7860")))
