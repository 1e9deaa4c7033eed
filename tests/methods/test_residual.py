"""Parameters of the residual pathway, against the definitions in numpy, in every place that takes them."""

import numpy as np
import pytest
import yaml
from helpers import baseline_reference as reference
from helpers.command import coram_hf
from helpers.folders import assert_same_tensors, on_disk, tensors_of
from helpers.models import fine_tuned, tiny_llama

from coram_hf import CoramConfig, CoramError, CoramMerger, MergeReport

NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def models():
    base = tiny_llama()
    return base, {"a": fine_tuned(base, 0.05, 1), "b": fine_tuned(base, 0.1, 2)}


def arrays(model):
    return {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}


def merged(models, line, **parameters):
    config = CoramConfig.from_line(line, lam=1.0, residual_parameters=parameters)
    return arrays(CoramMerger(*models, config, progress=False).merge().model)


def test_the_mean_is_scaled(models):
    base, experts = arrays(models[0]), [arrays(expert) for expert in models[1].values()]
    found = merged(models, "full.ta", scale=0.4)
    for name in (NORM, EMBEDDING):
        expected = base[name] + 0.4 * sum(e[name] - base[name] for e in experts) / 2
        np.testing.assert_allclose(found[name], expected, atol=1e-6)


def test_ties_takes_density_and_scale(models):
    base, experts = arrays(models[0]), [arrays(expert) for expert in models[1].values()]
    found = merged(models, "full.ties", density=0.5, scale=0.7)
    for name in (NORM, EMBEDDING):
        expected = reference.ties(base[name], [e[name] for e in experts], density=0.5, scale=0.7)
        np.testing.assert_allclose(found[name], expected, atol=1e-6)


def test_ties_trims_over_all_tensors_outside_the_targets(models):
    base, experts = arrays(models[0]), [arrays(expert) for expert in models[1].values()]
    plan = CoramMerger(*models, CoramConfig.from_line("full.ties"), progress=False).inspect()
    found = merged(models, "full.ties", trim="global", density=0.3)
    names, trimmed = plan.residual, []
    for expert in experts:
        taus = {name: expert[name] - base[name] for name in names}
        sizes = np.sort(np.concatenate([np.abs(tau).ravel() for tau in taus.values()]))
        cut = sizes[-int(0.3 * sizes.size)]
        trimmed.append({name: np.where(np.abs(tau) >= cut, tau, 0) for name, tau in taus.items()})
    for name in names:
        elected = reference.elect([t[name] for t in trimmed], "mean", "sum", np.ones(2) / 2)
        np.testing.assert_allclose(found[name], base[name] + elected, atol=1e-6)
    local = merged(models, "full.ties", density=0.3)
    assert any(np.abs(local[name] - found[name]).max() > 1e-4 for name in names)


def test_tsvm_takes_a_rank(models):
    base, experts = arrays(models[0]), [arrays(expert) for expert in models[1].values()]
    found = merged(models, "full.tsvm", rank=3)
    parts = [reference.svd(e[EMBEDDING] - base[EMBEDDING]) for e in experts]
    U, V = (reference.polar(np.hstack([p[side][:, :3] for p in parts])) for side in (0, 2))
    expected = base[EMBEDDING] + U @ np.diag(np.concatenate([p[1][:3] for p in parts])) @ V.T
    np.testing.assert_allclose(found[EMBEDDING], expected, atol=1e-5)


def test_python_the_command_line_recipes_and_reports_agree(tmp_path):
    folders = on_disk(tmp_path, tiny_llama(), {"a": 0.05, "b": 0.1})
    config = CoramConfig.from_line("lr.ties", residual_parameters={"density": 0.4, "trim": "global"})
    report = CoramMerger(folders.base, folders.experts, config, progress=False).merge_to(tmp_path / "python")
    assert CoramConfig.from_report(MergeReport.load(tmp_path / "python")) == config
    experts = [f"{name}={path}" for name, path in folders.experts.items()]
    words = ("--line", "lr.ties", "--residual-parameters", "density=0.4,trim=global")
    run = coram_hf("merge", folders.base, *experts, *words, "-o", tmp_path / "command")
    assert run.returncode == 0, run.stderr
    assert_same_tensors(tmp_path / "python", tmp_path / "command")
    run = coram_hf("merge", "--config", tmp_path / "command" / "coram_recipe.yaml", "-o", tmp_path / "recipe")
    assert run.returncode == 0, run.stderr
    assert_same_tensors(tmp_path / "python", tmp_path / "recipe")
    recipe = yaml.safe_load((tmp_path / "recipe" / "coram_recipe.yaml").read_text())
    assert recipe["residual_parameters"] == {"density": 0.4, "trim": "global"}
    card = (tmp_path / "python" / "README.md").read_text()
    assert "--residual-parameters density=0.4,trim=global" in card
    CoramMerger(folders.base, folders.experts, CoramConfig.from_line("lr.ties"), progress=False).merge_to(
        tmp_path / "default"
    )
    other = tensors_of(tmp_path / "default")
    assert any((tensor != other[name]).any() for name, tensor in tensors_of(tmp_path / "python").items())
    assert report.line == "lr.ties"


@pytest.mark.parametrize(
    ("line", "parameters", "message"),
    [
        ("full", {"scale": 1}, "need a residual pathway"),
        ("full.ta", {"density": 0.2}, "'ta' has no density; valid: scale"),
        ("full.tsvm", {"trim": "global"}, "'tsvm' has no trim"),
        ("full.ties", {"densty": 0.2}, "did you mean 'density'"),
        ("full.ties", {"density": 1.5}, "density must be"),
        ("full.ties", {"trim": "layer"}, "trim: unknown value 'layer'"),
        ("full.tsvm", "rank=two", "rank must be a number"),
        ("full.tsvm", "rank", "expected name=value"),
    ],
)
def test_bad_parameters_are_refused(line, parameters, message):
    with pytest.raises(CoramError, match=message):
        CoramConfig.from_line(line, residual_parameters=parameters)
