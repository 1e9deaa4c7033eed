"""Methods of other packages, registered through the entry point group `coram_hf.methods`."""

import json
import os
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


def run(package, *arguments, code=0):
    """`coram-hf` in a process that has the package installed."""
    command = [sys.executable, "-m", "coram_hf", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), *sys.path])}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == code, found.stderr
    return found.stdout if code == 0 else found.stderr


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


def test_it_is_listed_with_its_help(package):
    assert "median_of" in run(package, "merge", "--help")
    assert "median_of" not in run("/nowhere", "merge", "--help")
    listed = run(package, "methods", "median_of")
    assert "W = W_0 + scale * median of tau_i" in listed
    assert "scale=1.5: Coefficient. Must be above 0 and at most 4." in listed


def test_the_command_line_merges_with_it(package, sources, tmp_path):
    run(package, "merge", *everything(sources), "--method", "median_of", "-o", tmp_path / "merged")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in expected(sources, 1.5).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "merged with the baseline median&#95;of by coram_hf" in card
    assert "--method median_of --parameter scale=1.5" in card
    assert "merge('path/to/base', experts, 'median_of', scale=1.5)" in card


def test_a_recipe_and_its_parameters(package, sources, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    names = {name: str(sources / name) for name in ("e0", "e1", "e2")}
    content = {"base": str(sources / "base"), "experts": names, "method": "median_of"}
    recipe.write_text(json.dumps({**content, "parameters": {"scale": 0.5}}))
    run(package, "merge", "--config", recipe, "-o", tmp_path / "merged")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in expected(sources, 0.5).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    recipe.write_text(json.dumps({**content, "parameters": {"scale": 5}}))
    error = run(package, "merge", "--config", recipe, "-o", tmp_path / "other", code=2)
    assert "median_of: scale must be a finite number above 0 and at most 4, found 5" in error


def test_comparisons_score_it_beside_ours(package, sources, tmp_path):
    arguments = ["--in-domain", sources / "task.jsonl", "--baseline", "median_of", "--baseline", "linear"]
    run(package, "compare", *everything(sources), *arguments, "--no-experts", "-o", tmp_path)
    found = json.loads((tmp_path / "compare.json").read_text())
    assert list(found["baselines"]) == ["median_of", "linear"]


def test_in_python_in_memory(package, sources):
    code = (
        "import sys; from coram_hf.baselines import METHODS, merge, merge_tensor\n"
        "import torch; base, *experts = sys.argv[1:]\n"
        "result = merge(base, experts, 'median_of', scale=0.5, progress=False)\n"
        "print(float(result.model.lm_head.weight.double().sum()), 'median_of' in METHODS)\n"
        "print(merge_tensor(torch.zeros(1), [torch.ones(1) * i for i in (1, 5, 3)], 'median_of').item())\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), *sys.path])}
    command = [sys.executable, "-c", code, *map(str, everything(sources))]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    total, listed, single = printed.split()
    assert float(total) == pytest.approx(
        float(expected(sources, 0.5)["lm_head.weight"].double().sum()), rel=1e-5
    )
    assert (listed, single) == ("True", "4.5")


def test_a_method_that_does_not_load_is_named(package, tmp_path):
    broken = tmp_path / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text("[coram_hf.methods]\nbroken = nowhere_at_all:METHOD\n")
    error = run(tmp_path, "methods", "broken", code=2)
    assert "method 'broken' (nowhere_at_all:METHOD) cannot be loaded: ModuleNotFoundError" in error
