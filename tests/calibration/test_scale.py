"""The neutral scale: lambda where a merge changes neutral text as much as a typical expert."""

import copy
import math

import pytest
import torch
from helpers.models import fine_tuned, tiny_llama, tiny_tokenizer
from transformers import BertConfig, BertForMaskedLM

from coram_hf import CoramConfig, CoramError, CoramMerger, load_report
from coram_hf.calibration.neutral import SENTENCES
from coram_hf.calibration.scale import LIMIT, matching_scale
from coram_hf.hub import render_card


def sources(sizes=(0.3, 0.5, 0.6), **options):
    base = tiny_llama(**options)
    experts = {f"e{i}": fine_tuned(base, size, i) for i, size in enumerate(sizes)}
    return base, experts, {"tokenizer": tiny_tokenizer(), "progress": False}


def shift(base, model):
    """KL(base || model) per token after the first of the neutral sentences, one sentence at a time."""
    tokenizer, total, count = tiny_tokenizer(), 0.0, 0
    for sentence in SENTENCES:
        ids = torch.tensor([tokenizer(sentence).input_ids])
        with torch.no_grad():
            p, q = (m.double()(ids).logits[0, :-1].softmax(-1) for m in (base, model))
        total += float((p * (p / q).log()).sum())
        count += len(p)
    base.float(), model.float()
    return total / count


def on_targets(base, expert):
    """The base with the expert's projections."""
    model, own = copy.deepcopy(base), expert.state_dict()
    model.load_state_dict({n: own[n] if "_proj" in n else t for n, t in base.state_dict().items()})
    return model


@pytest.mark.parametrize("line", ["full", "DEC(full)", "DEC(full,ridge)"])
def test_the_merge_changes_neutral_text_as_much_as_a_typical_expert(line):
    base, experts, options = sources()
    config = CoramConfig.from_line(line, scale="neutral", kappa=1.0)
    result = CoramMerger(base, experts, config, **options).merge()
    target = sum(shift(base, on_targets(base, expert)) for expert in experts.values()) / 3
    assert shift(base, result.model) == pytest.approx(target, rel=0.012)
    report = result.report
    assert report.neutral["target"] == pytest.approx(target, rel=1e-3)
    assert report.neutral["merged"] == pytest.approx(target, rel=0.012)
    assert (report.lam_source, report.effective_kappa) == ("neutral", pytest.approx(1.0))


def test_experts_far_from_the_base_do_not_take_the_merge_beyond_the_limit():
    base, experts, options = sources(initializer_range=0.2)
    typical = sum(shift(base, on_targets(base, expert)) for expert in experts.values()) / 3
    assert typical > 2 * LIMIT
    config = CoramConfig(scale="neutral", kappa=1.0)
    result = CoramMerger(base, experts, config, **options).merge()
    assert shift(base, result.model) == pytest.approx(LIMIT, rel=0.012)
    assert result.report.neutral["target"] == LIMIT
    assert result.report.neutral["typical"] == pytest.approx(typical, rel=1e-3)


def test_a_residual_pathway_counts_on_both_sides():
    base, experts, options = sources((0.1, 0.12, 0.15))
    config = CoramConfig.from_line("full.ta", scale="neutral", kappa=1.0)
    result = CoramMerger(base, experts, config, **options).merge()
    target = sum(shift(base, expert) for expert in experts.values()) / 3
    assert result.report.neutral["target"] == pytest.approx(target, rel=1e-3)
    assert shift(base, result.model) == pytest.approx(target, rel=0.012)


def test_balance_and_weights_enter_the_target():
    base, experts, options = sources((0.2, 0.3, 2.5))
    config = CoramConfig(decorrelate="tsv", balance="root", weights=(1, 1, 2), scale="neutral", kappa=1.3)
    report = CoramMerger(base, experts, config, **options).merge().report
    r = list(report.relative_updates.values())
    factors = [min(1.0, math.sqrt(sorted(r)[1] / one)) for one in r]
    shifts = [shift(base, on_targets(base, expert)) for expert in experts.values()]
    expected = sum(w * f**2 * kl for w, f, kl in zip((0.25, 0.25, 0.5), factors, shifts, strict=True))
    assert report.neutral["target"] == pytest.approx(expected, rel=1e-3)
    assert report.lam == pytest.approx(1.3 * report.neutral["scale"], rel=1e-3)


def test_files_and_adapters_get_the_same_lambda_and_the_report_repeats_it(tmp_path):
    base, experts, options = sources()
    merger = CoramMerger(base, experts, CoramConfig.recommended(), **options)
    expected = merger.merge()
    report = merger.merge_to(tmp_path / "merged")
    assert (report.lam, report.lam_source) == (expected.report.lam, "neutral")
    assert report.neutral == expected.report.neutral
    assert merger.merge_adapter_to(tmp_path / "lora", rank=2).lam == report.lam
    for made in (expected.report, report):
        assert made.cost["seconds"]["finding lambda"] > 0
    plain = CoramMerger(base, experts, CoramConfig(decorrelate="auto"), **options)
    assert merger.requirements()[1] > plain.requirements()[1]
    again = CoramMerger(base, experts, CoramConfig.from_report(load_report(tmp_path / "merged")), **options)
    for (name, found), wanted in zip(
        again.merge().model.state_dict().items(), expected.model.state_dict().values(), strict=True
    ):
        assert torch.equal(found, wanted), name
    card = str(render_card(report))
    assert "| neutral scale |" in card
    assert "as much as a typical expert" in card
    other = expected.with_lambda(1.5).report
    assert (other.lam_source, other.neutral) == ("given", {})
    assert other.effective_kappa == pytest.approx(1.5 / other.c_rms)


def test_recommended_is_a_line_whose_fields_can_be_replaced():
    config = CoramConfig.recommended()
    assert CoramConfig.from_line("recommended") == config
    assert (config.line, config.balance, config.scale) == ("DEC(full,auto)", "auto", "neutral")
    assert CoramConfig.from_line("recommended", scale="c_rms").scale == "c_rms"
    with pytest.raises(CoramError, match="kapa"):
        CoramConfig.recommended(kapa=1.0)


def test_what_cannot_continue_text_is_refused_before_merging():
    base, experts, options = sources()
    with pytest.raises(CoramError, match="the base has no tokenizer"):
        CoramMerger(base, experts, CoramConfig.recommended(), progress=False)
    encoder = BertForMaskedLM(
        BertConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
        )
    )
    with pytest.raises(CoramError, match='BertForMaskedLM is not one; pass scale="c_rms"'):
        CoramMerger(encoder, [fine_tuned(encoder, 0.1, 0)], CoramConfig.recommended(), **options)


def test_an_expert_that_changes_nothing_on_neutral_text_is_named():
    base, _, options = sources()
    config = CoramConfig(scale="neutral", kappa=1.0)
    with pytest.raises(CoramError, match="c_RMS"):
        CoramMerger(base, {"a": base, "b": base}, config, **options).merge()


@pytest.mark.parametrize("power", [1.0, 1.9, 2.0, 2.6])
@pytest.mark.parametrize("start", [0.01, 1.0, 300.0])
def test_the_scale_is_found_for_divergences_that_are_not_quite_squares(power, start):
    calls = []

    def divergence(c):
        calls.append(c)
        return 0.3 * c**power

    found = matching_scale(divergence, start, 0.7)
    assert divergence(found) == pytest.approx(0.7, rel=0.011)
    assert len(calls) <= 13


def test_no_scale_is_an_error():
    with pytest.raises(CoramError, match='pass scale="c_rms"'):
        matching_scale(lambda c: 0.5, 1.0, 0.7)
