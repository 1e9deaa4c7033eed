"""Run the notebooks and keep their outputs.

    python examples/notebooks/run.py [NAME ...]

They run one after the other in one folder, so that the base of the demo is built only once.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
NAMES = ("merge_your_loras", "bigger_than_memory", "why_is_my_merge_bad")


def execute(name: str, folder: Path, seconds: int = 600) -> nbformat.NotebookNode:
    """The notebook after a run in `folder`; raises if a cell does, or takes longer than `seconds`."""
    notebook = nbformat.read(HERE / f"{name}.ipynb", as_version=4)
    place = {"metadata": {"path": str(folder)}}
    options = {"timeout": seconds, "kernel_name": "python3", "coalesce_streams": True}
    return NotebookClient(notebook, resources=place, **options).execute()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or NAMES:
            notebook = execute(name, Path(folder))
            for cell in notebook.cells:
                cell.metadata.pop("execution", None)
            nbformat.write(notebook, HERE / f"{name}.ipynb")
            print(f"ran {name}.ipynb")


if __name__ == "__main__":
    main()
