"""Methods of other packages, registered through the entry point group `coram_hf.methods`."""

import json
import os
import re
import subprocess
import sys
import zipfile

import pytest
import torch
from helpers.folders import on_disk
from helpers.models import choice_task, tiny_llama, tiny_tokenizer
from safetensors.torch import load_file

PLUGIN = '''
from typing import Annotated

from coram_hf.baselines import Baseline, Updates
from coram_hf.config import Range


def median_of(updates: Updates, *, scale: Annotated[float, Range("(0, 4]"), "Coefficient."] = 1.5):
    """W = W_0 + scale * median of tau_i"""
    import torch

    taus = torch.stack([updates.tau(i) for i in range(len(updates))])
    return updates.shaped(taus.median(0).values.mul_(scale))


MEDIAN_OF = Baseline(median_of)
'''
DIST_INFO = "median_plugin-1.0.dist-info"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder of site-packages into which pip has installed a wheel that registers a method."""
    folder = tmp_path_factory.mktemp("plugin")
    wheel = folder / "median_plugin-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("median_plugin.py", PLUGIN)
        archive.writestr(
            f"{DIST_INFO}/METADATA", "Metadata-Version: 2.1\nName: median-plugin\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{DIST_INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(
            f"{DIST_INFO}/entry_points.txt", "[coram_hf.methods]\nmedian_of = median_plugin:MEDIAN_OF\n"
        )
        archive.writestr(f"{DIST_INFO}/RECORD", "")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    on_disk(folder, tiny_llama(3), (0.1, 0.1, 0.1), tiny_tokenizer())
    choice_task(folder / "task.jsonl", 0)
    return folder


SESSION = """
import contextlib, io, json, sys
from coram_hf.cli import app

found = []
for arguments in json.load(sys.stdin):
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            app(arguments, standalone_mode=False)
        error = ""
    except ValueError as raised:
        error = str(raised)
    found.append([printed.getvalue(), error])
from coram_hf.baselines import METHODS, merge, merge_tensor
import torch

base, *experts = sys.argv[1:]
result = merge(base, experts, "median_of", scale=0.5, progress=False)
single = merge_tensor(torch.zeros(1), [torch.ones(1) * i for i in (1, 5, 3)], "median_of").item()
found.append([float(result.model.lm_head.weight.double().sum()), list(METHODS), single])
print(json.dumps(found))
"""


def python(package, code, *arguments, given=""):
    """What a process prints that has a folder of packages installed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), *sys.path])}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, input=given)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def session(package, sources):
    """One process with the method installed: commands, then Python."""
    content = {"base": str(sources / "base"), "method": "median_of"}
    content["experts"] = {name: str(sources / name) for name in ("e0", "e1", "e2")}
    for name, scale in (("recipe", 0.5), ("wrong", 5)):
        (sources / f"{name}.yaml").write_text(json.dumps({**content, "parameters": {"scale": scale}}))
    models = [str(path) for path in everything(sources)]
    tasks = ["--in-domain", str(sources / "task.jsonl"), "--baseline", "median_of", "--baseline", "linear"]
    commands = {
        "methods": ["methods", "median_of"],
        "merge": ["merge", *models, "--method", "median_of", "-o", str(sources / "merged")],
        "recipe": ["merge", "--config", str(sources / "recipe.yaml"), "-o", str(sources / "by recipe")],
        "wrong": ["merge", "--config", str(sources / "wrong.yaml"), "-o", str(sources / "not there")],
        "compare": ["compare", *models, *tasks, "--no-experts", "-o", str(sources / "compared")],
    }
    printed = python(package, SESSION, *models, given=json.dumps(list(commands.values())))
    found = json.loads(printed.splitlines()[-1])
    return dict(zip([*commands, "python"], found, strict=True))


def expected(sources, scale):
    """The median of the updates, by numpy's definition for three experts."""
    base, *experts = (load_file(sources / name / "model.safetensors") for name in ("base", "e0", "e1", "e2"))
    merged = {}
    for name, tensor in base.items():
        taus = torch.stack([expert[name] - tensor for expert in experts]).numpy()
        merged[name] = tensor + scale * torch.from_numpy(sorted_middle(taus))
    return merged


def sorted_middle(taus):
    taus.sort(axis=0)
    return taus[1]


def everything(sources):
    return [sources / name for name in ("base", "e0", "e1", "e2")]


def test_it_is_listed_with_its_help(package, session):
    listing = "from coram_hf.cli import app; app(['merge', '--help'])"
    assert "median_of" in python(package, listing)
    assert "median_of" not in python("/nowhere", listing)
    listed, error = session["methods"]
    assert not error
    assert "W = W_0 + scale * median of tau_i" in listed
    assert re.search(r"scale +1\.5 +Coefficient\. Must be above 0 and at most 4\.", listed)


@pytest.mark.parametrize(("command", "scale"), [("merge", 1.5), ("recipe", 0.5)])
def test_the_command_line_and_recipes_merge_with_it(session, sources, command, scale):
    assert session[command][1] == ""
    folder = sources / ("merged" if command == "merge" else "by recipe")
    found = load_file(folder / "model.safetensors")
    for name, tensor in expected(sources, scale).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    card = (folder / "README.md").read_text()
    assert "by the baseline median&#95;of with coram_hf" in card
    assert f"--method median_of --parameter scale={scale}" in card
    assert f"merge('path/to/base', experts, 'median_of', scale={scale})" in card


def test_its_parameters_are_checked(session, sources):
    error = session["wrong"][1]
    assert "median_of: scale must be a finite number above 0 and at most 4, found 5" in error
    assert not (sources / "not there").exists()


def test_comparisons_score_it_beside_ours(session, sources):
    assert session["compare"][1] == ""
    found = json.loads((sources / "compared" / "compare.json").read_text())
    assert list(found["baselines"]) == ["median_of", "linear"]


def test_in_python_in_memory(session, sources):
    total, listed, single = session["python"]
    whole = float(expected(sources, 0.5)["lm_head.weight"].double().sum())
    assert total == pytest.approx(whole, rel=1e-5)
    assert listed[-1] == "median_of"
    assert single == 4.5


def test_a_method_that_does_not_load_is_named(tmp_path):
    broken = tmp_path / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text("[coram_hf.methods]\nbroken = nowhere_at_all:METHOD\n")
    code = "from coram_hf.methods.registry import find_method\ntry: find_method('broken')\n"
    printed = python(tmp_path, code + "except ValueError as error: print(error)")
    assert "method 'broken' (nowhere_at_all:METHOD) cannot be loaded: ModuleNotFoundError" in printed
