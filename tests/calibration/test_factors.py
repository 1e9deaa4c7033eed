"""Factors in a configuration: what they do to a merge, in memory and in files, by expert, group and layer."""

import math

import pytest
import torch
from helpers.calibration_reference import summed
from helpers.folders import assert_same_tensors, on_disk
from helpers.models import fine_tuned, tiny_llama

from coram_hf import CoramConfig, CoramError, CoramMerger, MergeReport
from coram_hf.config import GROUPS, Position, factors_in, group_names, read_factors, write_factors

GROUPED = ((0.5, 0.6, 0.7, 0.8, 0.9, 1.0), (2.0, 1.5, 1.0, 0.5, 0.25, 0.125))
LAYERED = tuple((*row, 0.3, 0.4) for row in GROUPED)
"""For four layers: attention of each, then MLP of each."""


def models(layers=4):
    base = tiny_llama(num_hidden_layers=layers)
    return base, {
        name: fine_tuned(base, size, i) for i, (name, size) in enumerate([("a", 0.04), ("b", 0.02)])
    }


def factor_of(of_expert, name):
    """The factor of a parameter of a Llama of four layers, of which two make the first third.

    Norms count with the MLP beside them; what is in no layer takes the geometric mean.
    """
    parts = name.split(".")
    if isinstance(of_expert, float):
        return of_expert
    if parts[1] != "layers":
        return math.prod(of_expert) ** (1 / len(of_expert))
    third = len(of_expert) // 2
    depth = int(parts[2]) if third == 4 else [0, 0, 1, 2][int(parts[2])]
    return of_expert[depth if parts[3] == "self_attn" else third + depth]


def merge(base, experts, config, **options):
    return CoramMerger(base, experts, config, progress=False, **options)


def test_groups_are_attention_and_mlp_by_thirds_of_the_depth():
    from coram_hf.inputs.groups import find_layers, find_positions
    from coram_hf.inputs.kinds import find_kinds

    model = tiny_llama(num_hidden_layers=7)
    kinds = find_kinds(model)
    found = find_positions(find_layers(model, kinds), kinds)
    thirds = ["early", "early", "early", "middle", "middle", "late", "late"]
    for layer, third in enumerate(thirds):
        attention = found[f"model.layers.{layer}.self_attn.q_proj.weight"]
        mlp = found[f"model.layers.{layer}.mlp.up_proj.weight"]
        assert GROUPS[attention.group(6)] == f"{third} attention"
        assert GROUPS[mlp.group(6)] == f"{third} MLP"
        assert group_names(14)[attention.group(14)] == f"attention {layer + 1}"
        assert group_names(14)[mlp.group(14)] == f"MLP {layer + 1}"
    assert "model.embed_tokens.weight" not in found


@pytest.mark.parametrize("line", ["full", "SS(ca+ave,variance).ta", "DEC(full)"])
@pytest.mark.parametrize("factors", [(0.5, 2.0), GROUPED, LAYERED])
def test_factors_scale_the_experts_before_they_are_merged(line, factors):
    base, experts = models()
    given = merge(base, experts, CoramConfig.from_line(line, factors=factors, lam=1.5)).merge()
    rescaled = []
    for i, expert in enumerate(experts.values()):
        scaled = summed(base, [expert], expert.state_dict(), lambda _, name, i=i: factor_of(factors[i], name))
        rescaled.append(scaled)
    expected = merge(base, rescaled, CoramConfig.from_line(line, lam=1.5)).merge()
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(given.model.state_dict()[name], tensor, rtol=0, atol=2e-6)
    assert given.report.dispersion == pytest.approx(expected.report.dispersion, rel=1e-4)
    assert given.report.c_rms == pytest.approx(expected.report.c_rms, rel=1e-4)
    assert given.report.unbalanced_dispersion == pytest.approx(2.0, rel=0.1)


def test_the_rule_sees_the_updates_that_are_merged():
    base, experts = models()
    plain = merge(base, experts, CoramConfig(factors=(20.0, 1.0))).inspect()
    assert plain.dispersion == pytest.approx(40, rel=0.1)
    assert plain.kappa == 0.5
    assert plain.balance_factors == pytest.approx({"a": 20.0, "b": 1.0})


@pytest.mark.parametrize(("line", "factors"), [("full", GROUPED), ("DEC(full,ridge)", LAYERED)])
def test_files_and_memory_agree_on_factors(tmp_path, line, factors):
    base, experts = models()
    sources = on_disk(tmp_path, base, experts)
    config = CoramConfig.from_line(line, factors=factors)
    report = merge(*sources, config).merge_to(tmp_path / "merged")
    in_memory = merge(*sources, config).merge()
    in_memory.save_pretrained(tmp_path / "memory")
    assert_same_tensors(tmp_path / "merged", tmp_path / "memory")
    assert report.lam == pytest.approx(in_memory.report.lam, rel=1e-9)
    again = CoramConfig.from_report(MergeReport.load(tmp_path / "merged"))
    assert again.factors == factors


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ((1.0, 0.0), "above 0"),
        ((1.0, math.inf), "finite"),
        ((1.0, "2"), "for one expert"),
        (((1.0,) * 6, (1.0,) * 5), "6 per expert"),
        (((1.0,) * 6, (1.0,) * 8), "as many for every expert"),
        ((), "found none"),
        ({"a": 1.0}, "one number per expert"),
        ("1,x", "separate experts by commas"),
    ],
)
def test_unusable_factors_are_refused(factors, message):
    with pytest.raises(CoramError, match=message):
        CoramConfig(factors=factors)


def test_factors_must_fit_the_experts_and_exclude_balance():
    base, experts = models(1)
    with pytest.raises(CoramError, match="found 3 for 2 experts"):
        merge(base, experts, CoramConfig(factors=(1.0, 1.0, 1.0)))
    with pytest.raises(CoramError, match="mutually exclusive"):
        CoramConfig(factors=(1.0, 1.0), balance="root")


@pytest.mark.parametrize("factors", [(0.5, 2.0), GROUPED, LAYERED])
def test_factors_as_text_read_back(factors):
    assert CoramConfig(factors=write_factors(factors)).factors == factors
    assert CoramConfig(factors=read_factors(write_factors(factors))).factors == factors


@pytest.mark.parametrize("factors", [GROUPED, LAYERED])
def test_what_is_in_no_layer_takes_the_geometric_mean(factors):
    mean = [math.prod(row) ** (1 / len(row)) for row in factors]
    assert factors_in(factors, None) == pytest.approx(mean)
    assert factors_in(factors, Position(1, 0, 4)) == tuple(row[len(row) // 2] for row in factors)
    assert factors_in((0.5, 2.0), None) == (0.5, 2.0)
