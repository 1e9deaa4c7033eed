"""`amplitude`: any baseline at a given size, in memory and from files, and on the command line."""

import json
import math

import pytest
import torch
import yaml
from helpers.command import coram_hf
from helpers.folders import assert_same_files, on_disk
from helpers.models import fine_tuned, tiny_llama

from coram_hf import CoramError, load_report
from coram_hf.baselines import METHODS, merge, merge_tensor, open_merger


def size(model, base, names):
    states = model.state_dict(), base.state_dict()
    return math.sqrt(sum((states[0][n].double() - states[1][n].double()).square().sum() for n in names))


@pytest.mark.parametrize("method", METHODS)
def test_every_baseline_has_the_size_that_is_asked_for(method):
    base = tiny_llama(dtype=torch.float64)
    sizes = (0.02, 0.03, 0.2)[: METHODS[method].most or 3]
    experts = {f"e{i}": fine_tuned(base, r, i) for i, r in enumerate(sizes)}
    options = {"balance": "root", "progress": False}
    plain = merge(base, experts, method, keep_update=True, **options)
    result = merge(base, experts, method, keep_update=True, amplitude=1.15, **options)
    targets = list(open_merger(base, experts, method, **options).inputs.targets)
    factors = result.report.balance_factors.values()
    norms = [f * size(e, base, targets) for f, e in zip(factors, experts.values(), strict=True)]
    rms = math.sqrt(sum(norm**2 for norm in norms) / len(norms))
    assert size(result.model, base, targets) == pytest.approx(1.15 * rms, rel=1e-9)
    assert result.report.amplitude == pytest.approx(1.15, rel=1e-12)
    assert plain.report.amplitude == pytest.approx(size(plain.model, base, targets) / rms, rel=1e-9)
    assert (result.report.lam_source, result.report.kappa) == ("amplitude", None)
    scaled, lam = result.model.state_dict(), result.report.lam
    for name, tensor in plain.model.state_dict().items():
        origin = base.state_dict()[name]
        expected = origin + (lam if name in targets else 1.0) * (tensor - origin)
        torch.testing.assert_close(scaled[name], expected, rtol=0, atol=1e-12)
    smaller = result.with_lambda(lam / 2).report
    assert smaller.amplitude == smaller.config["amplitude"] == pytest.approx(1.15 / 2)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_ties", "tsvm"])
def test_from_files_to_files(method, tmp_path):
    sources = on_disk(tmp_path, tiny_llama(dtype=torch.bfloat16))
    merger = open_merger(*sources, method, amplitude=0.8, progress=False)
    assert merger.inspect().lam is None
    report = merger.merge_to(tmp_path / "streamed")
    merger.merge().save_pretrained(tmp_path / "saved")
    assert report.amplitude == pytest.approx(0.8)
    assert_same_files(tmp_path / "streamed", tmp_path / "saved")
    card = (tmp_path / "streamed" / "README.md").read_text()
    assert "with a given amplitude" in card
    assert "--parameter amplitude=0.8" in card


def test_on_the_command_line_and_in_recipes(tmp_path):
    base, experts = on_disk(tmp_path)
    recipe = {
        "base": str(base),
        "experts": {name: str(path) for name, path in experts.items()},
        "method": "wudi",
        "amplitude": 1.3,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run = coram_hf("merge", "--config", tmp_path / "recipe.yaml", "-o", tmp_path / "one")
    assert run.returncode == 0, run.stderr
    words = ["--method", "wudi", "--amplitude", 1.3]
    run = coram_hf("merge", base, *(f"{n}={p}" for n, p in experts.items()), *words, "-o", tmp_path / "other")
    assert run.returncode == 0, run.stderr
    assert "lambda" in run.stdout
    assert_same_files(tmp_path / "one", tmp_path / "other")
    assert load_report(tmp_path / "one").amplitude == pytest.approx(1.3)
    assert json.loads((tmp_path / "one" / "coram_report.json").read_text())["config"]["amplitude"] == 1.3
    refused = coram_hf("merge", base, *experts.values(), "--amplitude", 1.3, "-o", tmp_path / "no")
    assert refused.returncode == 2
    assert "amplitude is an option of baselines" in refused.stderr


def test_of_one_tensor():
    base = torch.randn(20, 12, dtype=torch.float64)
    experts = [base + 0.1 * torch.randn(20, 12, dtype=torch.float64) for _ in range(3)]
    merged = merge_tensor(base, experts, "tsvm", amplitude=2.0)
    rms = math.sqrt(sum(float((e - base).square().sum()) for e in experts) / 3)
    assert float((merged - base).norm()) == pytest.approx(2 * rms)
    with pytest.raises(CoramError, match="has no amplitude"):
        merge_tensor(base, [base], "linear", amplitude=1.0)
    with pytest.raises(CoramError, match="amplitude must be a finite number above 0"):
        merge_tensor(base, experts, "linear", amplitude=-1.0)


def test_nothing_cannot_be_rescaled():
    base = tiny_llama()
    with pytest.raises(CoramError, match="remove amplitude= from a baseline"):
        merge(base, [base, base], "linear", amplitude=1.0, progress=False)
