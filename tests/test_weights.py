"""Weights of either sign that differ by layer and module, and modules that are left at the base."""

import math
import shlex

import pytest
import torch
from helpers.command import coram_hf
from helpers.folders import assert_same_files, on_disk
from helpers.models import fine_tuned, tiny_llama

from coram_hf import CoramConfig, CoramError, CoramMerger, load_report
from coram_hf.baselines import merge
from coram_hf.geometry import merge_matrix
from coram_hf.hub.again import command_line
from coram_hf.report.diagnostics import diagnose

LINES = ["full", "SS(ca+ave,variance).ties", "DEC(full).ta", "lr.tsvm"]


@pytest.fixture(scope="module")
def suite():
    base = tiny_llama(num_hidden_layers=3, dtype=torch.float64)
    return base, {f"e{i}": fine_tuned(base, 0.02 * (i + 1), seed=i) for i in range(3)}


def mirrored(base, expert):
    image = fine_tuned(base, 0, 0)
    image.load_state_dict({k: 2 * w - expert.state_dict()[k] for k, w in base.state_dict().items()})
    return image


def state(suite, config, **options):
    return CoramMerger(*suite, config, progress=False, **options).merge(keep_update=False).model.state_dict()


def close(found, expected, tolerance=1e-9):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.parametrize("line", LINES)
def test_a_negative_weight_merges_the_mirror_image(suite, line):
    base, experts = suite
    away = {**experts, "e1": mirrored(base, experts["e1"])}
    found = CoramMerger(*suite, CoramConfig.from_line(line, weights=(2, -1, 1)), progress=False).merge()
    other = CoramMerger(base, away, CoramConfig.from_line(line, weights=(2, 1, 1)), progress=False).merge()
    close(found.model.state_dict(), other.model.state_dict())
    assert found.report.lam == pytest.approx(other.report.lam, rel=1e-9)
    if not line.startswith("DEC"):
        assert found.report.lam == pytest.approx(found.report.kappa / math.sqrt(0.25 + 2 / 16))


def test_one_matrix_with_a_negative_weight():
    torch.manual_seed(0)
    W0 = torch.randn(16, 24, dtype=torch.float64)
    W1, W2 = (W0 + 0.1 * torch.randn_like(W0) for _ in range(2))
    for line in ("nca+ave", "DEC(full)"):
        found = merge_matrix(W0, [W1, W2], CoramConfig.from_line(line, weights=(1, -3)))
        expected = merge_matrix(W0, [W1, 2 * W0 - W2], CoramConfig.from_line(line, weights=(1, 3)))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_forgetting_moves_away_from_an_expert(suite):
    base, experts = suite
    origin, found = base.state_dict(), state(suite, CoramConfig(weights=(1, 1, -1)))
    for name, sign in (("e0", 1), ("e2", -1)):
        expert = experts[name].state_dict()
        inner = sum(((found[k] - w) * (expert[k] - w)).sum() for k, w in origin.items())
        assert sign * inner > 0


@pytest.mark.parametrize("line", LINES)
def test_weights_that_differ_by_layer_and_module(suite, line):
    gradient, filters = [1, 3], [{"filter": "mlp", "value": -0.5}, {"value": 2}]
    config = CoramConfig.from_line(line, weights=(gradient, filters, 1), lam=1.5)
    found = state(suite, config)
    for layer, value in enumerate((1, 2, 3)):
        for mark, second in (("mlp", -0.5), ("self_attn", 2)):
            alone = state(suite, CoramConfig.from_line(line, weights=(value, second, 1), lam=1.5))
            names = [n for n in found if f"layers.{layer}." in n and f".{mark}." in n]
            assert names
            close({n: found[n] for n in names}, {n: alone[n] for n in names})
    outside = state(suite, CoramConfig.from_line(line, weights=(1, 2, 1), lam=1.5))
    close(
        {n: found[n] for n in found if "layers" not in n}, {n: outside[n] for n in found if "layers" not in n}
    )


def test_lambda_of_weights_that_differ(suite):
    """lambda = kappa / sqrt(mean over the target matrices of sum_i w_i^2)."""
    weights = (1, [{"filter": "mlp", "value": 3}, {"value": 0}], 0)
    report = CoramMerger(*suite, CoramConfig(weights=weights), progress=False).merge().report
    of_mlp, of_attention = (1 + 9) / 16, 1.0
    mean = (3 * of_mlp + 4 * of_attention) / 7
    assert report.lam == pytest.approx(report.kappa / math.sqrt(mean))


def test_where_all_weights_are_zero_the_base_stays(suite):
    base, _ = suite
    found = state(
        suite, CoramConfig.from_line("full.ties", weights=[[{"filter": "mlp", "value": 1}, {"value": 0}]] * 3)
    )
    for name, tensor in base.state_dict().items():
        assert torch.equal(found[name], tensor) == (".mlp." not in name), name
    with pytest.raises(CoramError, match="all are zero for every target matrix"):
        state(suite, CoramConfig(weights=[[{"filter": "lm_head", "value": 1}, {"value": 0}]] * 3))


def test_diagnostics_know_the_signs(suite):
    base, experts = suite
    away = {**experts, "e1": mirrored(base, experts["e1"])}
    found = diagnose(*suite, CoramConfig(weights=(1, -1, 2)), progress=False)
    expected = diagnose(base, away, CoramConfig(weights=(1, 1, 2)), progress=False)
    for key in ("by_expert", "by_layer"):
        assert found["conflict"][key] == pytest.approx(expected["conflict"][key], rel=1e-6)


@pytest.mark.parametrize(
    ("keep", "stays"),
    [
        (["mlp"], lambda n: ".mlp." in n),
        (["layers.0", "lm_head"], lambda n: ".layers.0." in n or n.startswith("lm_head")),
        (r".*\.2\.self_attn\.[qk]_proj", lambda n: any(f".2.self_attn.{p}_" in n for p in "qk")),
        (["self_attn.q_proj.weight"], lambda n: ".q_proj." in n),
        ("layers.1", lambda n: ".layers.1." in n),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["coram", "ties"])
def test_modules_left_at_the_base(suite, method, keep, stays):
    base, _ = suite
    if method == "coram":
        config = CoramConfig.from_line("full.ta", keep=keep)
        found, merger = state(suite, config), CoramMerger(*suite, config, progress=False)
        plan = merger.inspect()
        assert set(plan.kept) == {name for name in base.state_dict() if stays(name)}
        everything = CoramMerger(*suite, CoramConfig.from_line("full.ta"), progress=False).inspect()
        assert plan.relative_updates != everything.relative_updates or not any(map(stays, everything.targets))
    else:
        found = merge(*suite, "ties", keep=keep, progress=False).model.state_dict()
    for name, tensor in base.state_dict().items():
        assert torch.equal(found[name], tensor) == stays(name), name


def test_a_tied_head_is_kept_by_either_name():
    base = tiny_llama(tie_word_embeddings=True)
    experts = {"a": fine_tuned(base, 0.05, 1)}
    found = merge(base, experts, "linear", keep=["lm_head"], progress=False).model.state_dict()
    assert torch.equal(found["model.embed_tokens.weight"], base.state_dict()["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (["mpl"], "keep: found no match for .*mpl"),
        (["layers"], "leaves all target matrices at the base"),
        (3, "keep must be a regex"),
        ("(", "keep: .* is not a regular expression"),
    ],
)
def test_bad_modules_to_keep(suite, keep, message):
    with pytest.raises(CoramError, match=message):
        CoramMerger(*suite, CoramConfig(keep=keep), progress=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--line", "full.ta", "--weights", "1, [0, 0.5, 2], [{filter: mlp, value: -1}, {value: 0.1}]"),
        ("--line", "full.ta", "--weights", "1,-0.5,2", "--keep", "layers.0", "--keep", "lm_head"),
        ("--line", "full", "--keep", r".*\.0\.mlp"),
        ("--method", "ties", "--parameter", "weights=[1, 2, -0.5]",
         "--parameter", "density=[0.2, [0.1, 0.9], [{filter: mlp, value: 0.3}, {value: 0.5}]]"),
    ],
)  # fmt: skip
def test_the_command_line_and_its_repetition(tmp_path, arguments):
    sources = on_disk(tmp_path, tiny_llama(), (0.03, 0.05, 0.04))
    names = [sources.base, *sources.experts.values()]
    run = coram_hf("merge", *names, "-o", tmp_path / "out", *arguments)
    assert run.returncode == 0, run.stderr
    words = shlex.split(command_line(load_report(tmp_path / "out")))
    words = [str(tmp_path / word.rpartition("/")[2]) if "path/to" in word else word for word in words]
    words = [str(tmp_path / "again") if word == "merged" else word for word in words]
    again = coram_hf(*words[1:])
    assert again.returncode == 0, again.stderr
    assert_same_files(tmp_path / "again", tmp_path / "out")
    assert load_report(tmp_path / "again").config == load_report(tmp_path / "out").config
