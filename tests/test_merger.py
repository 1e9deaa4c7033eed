"""CoramMerger on tiny models, checked against numpy."""

import json
import math

import numpy as np
import pytest
import torch
from helpers import reference
from helpers.models import fine_tuned, snapshot, tiny_llama
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from coram_hf import CoramConfig, CoramError, CoramMerger

EVEN = (0.02, 0.03, 0.025, 0.04, 0.05)
UNEVEN = (0.002, 0.03, 0.025, 0.04, 0.05)
TARGETS = [
    f"model.layers.{layer}.{module}.weight"
    for layer in range(2)
    for module in (
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    )
]


def suite(sizes, dtype=torch.float32):
    base = tiny_llama(dtype=dtype)
    return base, {f"e{i}": fine_tuned(base, size, seed=i) for i, size in enumerate(sizes)}


def merger(base, experts, config=None):
    return CoramMerger(base, experts, config, progress=False)


def weights(model):
    return {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}


def expected_numbers(base, experts, merged):
    """D, r_i, c_RMS by numpy; `merged` holds W_merge of every target."""
    w0 = weights(base)
    norm = math.sqrt(sum((w0[t] ** 2).sum() for t in TARGETS))
    updates = []
    for expert in experts.values():
        w = weights(expert)
        updates.append(math.sqrt(sum(((w[t] - w0[t]) ** 2).sum() for t in TARGETS)))
    r = [u / norm for u in updates]
    merged_norm = math.sqrt(sum(((merged[t] - w0[t]) ** 2).sum() for t in TARGETS))
    return max(r) / min(r), r, math.sqrt(np.mean(np.square(updates))) / merged_norm


def reference_merge(base, experts, **options):
    w0, others = weights(base), [weights(e) for e in experts.values()]
    return {t: reference.merge(w0[t], [o[t] for o in others], **options) for t in TARGETS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("sizes", "kappa"), [(EVEN, 1.15), (UNEVEN, 0.5)])
def test_targets_equal_the_reference_and_the_rest_equals_the_base(sizes, kappa, dtype):
    base, experts = suite(sizes, dtype)
    result = merger(base, experts).merge()
    merged = reference_merge(base, experts)
    D, r, c_rms = expected_numbers(base, experts, merged)
    lam = kappa * math.sqrt(5)

    report = result.report
    assert (D < 7.5) == (kappa == 1.15)
    assert report.kappa == kappa
    np.testing.assert_allclose(report.dispersion, D, rtol=1e-12)
    np.testing.assert_allclose(report.lam, lam, rtol=1e-12)
    merged_in_float32 = dtype == torch.bfloat16
    np.testing.assert_allclose(report.c_rms, c_rms, rtol=1e-7 if merged_in_float32 else 1e-12)
    np.testing.assert_allclose(list(report.relative_updates.values()), r, rtol=1e-12)
    float32, slices = report.counts["float32"], report.counts["slices"]
    assert float32 > 0.9 * slices if merged_in_float32 else float32 == 0

    rounding = {torch.float64: 1e-13, torch.float32: 1e-7, torch.bfloat16: 4e-3}[dtype]
    w0, found = weights(base), weights(result.model)
    for name, weight in found.items():
        if name in TARGETS:
            expected = w0[name] + lam * (merged[name] - w0[name])
            np.testing.assert_allclose(
                weight, expected, rtol=rounding, atol=rounding * np.abs(expected).max()
            )
        else:
            assert torch.equal(result.model.state_dict()[name], base.state_dict()[name]), name
    assert result.model.dtype == dtype
    assert type(result.model) is type(base)


def test_the_plan_says_before_merging_what_the_report_says_after():
    base, experts = suite(EVEN)
    coram = merger(base, experts)
    plan, report = coram.inspect(), coram.merge().report
    assert plan.targets == tuple(TARGETS)
    assert set(plan.targets) | set(plan.residual) | set(plan.kept) == {n for n, _ in base.named_parameters()}
    assert (plan.dispersion, plan.kappa, plan.lam) == (report.dispersion, report.kappa, report.lam)
    assert plan.relative_updates == report.relative_updates
    assert list(plan.relative_updates) == list(experts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_inputs_are_never_changed(dtype):
    base, experts = suite(EVEN, dtype)
    before = [snapshot(m) for m in (base, *experts.values())]
    result = merger(base, experts, CoramConfig.from_line("SS(ca+ave,owner)", balance="equal")).merge()
    with torch.no_grad():
        for parameter in result.model.parameters():
            parameter.zero_()
    for model, old in zip((base, *experts.values()), before, strict=True):
        assert all(torch.equal(tensor, old[name]) for name, tensor in model.state_dict().items())


def test_with_lambda_is_the_merge_at_that_lambda():
    base, experts = suite(EVEN, torch.bfloat16)
    result = merger(base, experts).merge()
    moved = result.with_lambda(1.7)
    direct = merger(base, experts, CoramConfig(lam=1.7)).merge()
    assert all(
        torch.equal(a, b) for a, b in zip(moved.model.parameters(), direct.model.parameters(), strict=True)
    )
    assert moved.report.lam == direct.report.lam == 1.7
    assert moved.report.lam_source == "given"
    assert result.report.lam == pytest.approx(1.15 * math.sqrt(5))
    zero = result.with_lambda(0.0).model
    assert all(torch.equal(a, b) for a, b in zip(zero.parameters(), base.parameters(), strict=True))


def test_without_the_update_there_is_no_other_lambda():
    base, experts = suite(EVEN)
    result = merger(base, experts).merge(keep_update=False)
    with pytest.raises(CoramError, match="keep_update=True"):
        result.with_lambda(2.0)


@pytest.mark.parametrize("keep_update", [True, False])
def test_the_measured_scale(keep_update):
    base, experts = suite(EVEN)
    config = CoramConfig(scale="c_rms")
    assert merger(base, experts, config).inspect().lam is None
    result = merger(base, experts, config).merge(keep_update=keep_update)
    assert result.report.lam == pytest.approx(1.15 * result.report.c_rms, rel=1e-14)
    direct = merger(base, experts, CoramConfig(lam=result.report.lam)).merge()
    assert all(
        torch.equal(a, b) for a, b in zip(result.model.parameters(), direct.model.parameters(), strict=True)
    )


def test_expert_weights():
    base, experts = suite((0.02, 0.03, 0.025))
    result = merger(base, experts, CoramConfig(weights=(2, 1, 1))).merge()
    assert result.report.sqrt_n == pytest.approx(1 / math.sqrt(0.25 + 2 / 16))
    assert result.report.lam == pytest.approx(1.15 / math.sqrt(0.375))
    merged = reference_merge(base, experts, weights=(2, 1, 1))
    w0, found = weights(base), weights(result.model)
    for t in TARGETS:
        np.testing.assert_allclose(found[t], w0[t] + result.report.lam * (merged[t] - w0[t]), atol=1e-7)
    with pytest.raises(ValueError, match="found 2 for 3 experts"):
        merger(base, experts, CoramConfig(weights=(2, 1)))


@pytest.mark.parametrize("balance", ["damp", "root", "equal"])
def test_balance_rescales_the_experts_first(balance):
    base, experts = suite(UNEVEN)
    report = merger(base, experts, CoramConfig(balance=balance)).merge().report
    r = np.array(list(report.relative_updates.values()))
    factors = np.median(r) / r
    if balance != "equal":
        factors = np.minimum(1, factors ** (0.5 if balance == "root" else 1.0))
    np.testing.assert_allclose(list(report.balance_factors.values()), factors, rtol=1e-12)
    balanced = factors * r
    assert report.dispersion == pytest.approx(balanced.max() / balanced.min(), rel=1e-12)
    assert report.unbalanced_dispersion == pytest.approx(r.max() / r.min(), rel=1e-12)

    w0 = weights(base)
    scaled = {
        n: {t: w0[t] + f * (w[t] - w0[t]) for t in TARGETS}
        for (n, e), f in zip(experts.items(), factors, strict=True)
        for w in [weights(e)]
    }
    result = merger(base, experts, CoramConfig(balance=balance, spread="variance")).merge()
    for t in TARGETS:
        merged = reference.merge(w0[t], [s[t] for s in scaled.values()], spread="variance")
        np.testing.assert_allclose(weights(result.model)[t], w0[t] + report.lam * (merged - w0[t]), atol=1e-7)


def test_balance_leaves_experts_equal_to_the_base_out_of_the_median():
    base = tiny_llama()
    experts = {"a": base, "b": base, "c": fine_tuned(base, 0.04, 0)}
    result = merger(base, experts, CoramConfig(balance="damp", lam=1.5)).merge()
    assert set(result.report.balance_factors.values()) == {1.0}
    assert any("experts 'a', 'b' do not differ" in w for w in result.report.warnings)
    assert not torch.equal(result.model.state_dict()[TARGETS[0]], base.state_dict()[TARGETS[0]])


def test_the_contraction_is_that_of_the_balanced_experts():
    base, experts = suite(UNEVEN, torch.float64)
    report = merger(base, experts, CoramConfig(balance="equal")).merge().report
    w0 = weights(base)
    scaled = []
    for expert, factor in zip(experts.values(), report.balance_factors.values(), strict=True):
        w = weights(expert)
        scaled.append({t: w0[t] + factor * (w[t] - w0[t]) for t in TARGETS})
    norms = [math.sqrt(sum(((s[t] - w0[t]) ** 2).sum() for t in TARGETS)) for s in scaled]
    merged = {t: reference.merge(w0[t], [s[t] for s in scaled]) for t in TARGETS}
    size = math.sqrt(sum(((merged[t] - w0[t]) ** 2).sum() for t in TARGETS))
    assert report.c_rms == pytest.approx(math.sqrt(np.mean(np.square(norms))) / size, rel=1e-10)


def test_a_merge_of_nothing_has_no_contraction():
    base = tiny_llama()
    with pytest.raises(CoramError, match="c_RMS"):
        merger(base, [base, base], CoramConfig(kappa=1.0, scale="c_rms")).merge()


@pytest.mark.parametrize(
    ("sizes", "warned"), [((0.02, 0.06), False), ((0.01, 0.12), True), ((0.01, 0.2), False)]
)
def test_the_gap_has_two_ends(sizes, warned):
    plan = merger(*suite(sizes)).inspect()
    assert any("extrapolation" in w for w in plan.warnings) == warned


@pytest.mark.parametrize("lam", [float("nan"), float("inf"), "2", None])
def test_with_lambda_wants_a_number(lam):
    result = merger(*suite((0.02, 0.03))).merge()
    with pytest.raises(ValueError, match="lam must be a finite number"):
        result.with_lambda(lam)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("line", ["full", "SS(nca+ave,owner)"])
def test_keeping_the_update_changes_nothing_but_memory(line, dtype):
    base, experts = suite(EVEN, dtype)
    config = CoramConfig.from_line(line)
    kept, forgotten = (merger(base, experts, config).merge(keep_update=keep) for keep in (True, False))
    for a, b in zip(kept.model.parameters(), forgotten.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7 if dtype == torch.float32 else 1e-3)
    assert kept.report.counts == forgotten.report.counts
    assert kept.report.c_rms == pytest.approx(forgotten.report.c_rms, rel=1e-14)


def test_uneven_experts_get_the_recommendation(caplog):
    base, experts = suite(UNEVEN)
    report = merger(base, experts).merge().report
    assert any('balance="root"' in w for w in report.warnings)
    assert 'balance="root"' in caplog.text
    assert not any("balance" in w for w in merger(*suite(EVEN)).inspect().warnings)


def test_the_unexplored_gap_is_pointed_out():
    base, experts = suite((0.01, 0.05, 0.02))
    plan = merger(base, experts).inspect()
    assert 3.5 < plan.dispersion < 7.5
    assert any("no base" in w and "extrapolation" in w for w in plan.warnings)
    given = merger(base, experts, CoramConfig(lam=2.0)).inspect()
    assert not any("extrapolation" in w for w in given.warnings)


def test_an_expert_equal_to_the_base_is_named_and_not_guessed_around():
    base, experts = suite((0.02, 0.03))
    experts["lazy"] = fine_tuned(base, 0.0, seed=0)
    plan = merger(base, experts).inspect()
    assert math.isinf(plan.dispersion)
    assert plan.kappa is None
    assert plan.lam is None
    assert any("'lazy'" in w for w in plan.warnings)
    with pytest.raises(CoramError, match=r"'lazy'.*drop it, or pass kappa= \(--kappa\) or lam="):
        merger(base, experts).merge()
    for config in (CoramConfig(lam=2.0), CoramConfig(kappa=1.0)):
        report = merger(base, experts, config).merge().report
        assert json.loads(json.dumps(report.to_dict()))["dispersion"] == "inf"


def test_the_report_counts_and_serialises():
    base, experts = suite(EVEN)
    result = merger(base, experts, CoramConfig.from_line("SS(nca,mean) (h=16)")).merge()
    record = json.loads(json.dumps(result.report.to_dict(), allow_nan=False))
    assert record["line"] == "SS(nca,mean) (h=16)"
    assert record["slice_height"] == 16
    assert record["n_experts"] == 5
    kinds = {"targets", "residual", "slices", "det_flips", "near_pi", "svd_fallbacks", "frameless"}
    kinds |= {"float32", "float64_fallbacks"}
    assert set(record["counts"]) == kinds
    assert record["counts"]["targets"] == 14
    heights = [base.state_dict()[t].shape[0] for t in TARGETS]
    assert record["counts"]["slices"] == sum(-(-h // 16) for h in heights)
    assert CoramConfig.from_dict(record["config"]) == CoramConfig.from_line("SS(nca,mean) (h=16)")
    assert {"coram-hf", "torch", "transformers"} <= set(record["versions"])


def test_what_stays_at_the_base_is_measured():
    base, experts = suite(EVEN)
    report = merger(base, experts).merge().report
    w0 = weights(base)
    inside, outside = {}, {}
    for name, expert in experts.items():
        w = weights(expert)
        squares = {t: ((w[t] - w0[t]) ** 2).sum() for t in w0}
        inside[name] = sum(squares[t] for t in TARGETS)
        outside[name] = sum(squares[t] for t in w0 if t not in TARGETS)
    total = sum(outside.values()) / (sum(inside.values()) + sum(outside.values()))
    assert report.left_at_base == pytest.approx(math.sqrt(total), rel=1e-12)
    for name in experts:
        share = math.sqrt(outside[name] / (inside[name] + outside[name]))
        assert report.outside_share[name] == pytest.approx(share, rel=1e-12)


def test_a_left_behind_update_is_reported_with_the_lines_that_carry_it(caplog):
    base, experts = suite(EVEN)
    report = merger(base, experts, CoramConfig.from_line("SS(nca,mean)")).merge().report
    share = f"{report.left_at_base:.1%}"
    (warning,) = (w for w in report.warnings if "outside" in w)
    for text in (caplog.text, warning):
        assert share in text
        assert "SS(nca,mean).ta, SS(nca,mean).ties, SS(nca,mean).tsvm" in text
    only_targets = {name: fine_tuned(base, 0.02, i, only="_proj") for i, name in enumerate(experts)}
    report = merger(base, only_targets).merge().report
    assert report.left_at_base == 0
    assert not report.warnings


def test_save_and_reload(tmp_path):
    base, experts = suite(EVEN, torch.bfloat16)
    result = merger(base, experts).merge()
    result.save_pretrained(tmp_path / "merged")
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(
        torch.equal(a, b) for a, b in zip(reloaded.parameters(), result.model.parameters(), strict=True)
    )
    record = json.loads((tmp_path / "merged" / "coram_report.json").read_text())
    files = {"files": record["files"]}
    assert record == {**json.loads(json.dumps(result.report.to_dict())), **files}
    assert list(record["files"]) == ["model.safetensors"]


def test_tied_weights_stay_tied():
    base = tiny_llama(tie_word_embeddings=True)
    experts = [fine_tuned(base, 0.02, seed=i) for i in range(2)]
    model = merger(base, experts).merge().model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, base.lm_head.weight)


def test_transposed_projections_are_merged_by_output_neuron():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    base = GPT2LMHeadModel(config).eval()
    experts = {f"e{i}": fine_tuned(base, 0.03, seed=i) for i in range(3)}
    result = merger(base, experts).merge()
    name = "transformer.h.0.attn.c_attn.weight"
    w0 = weights(base)[name]
    merged = reference.merge(w0.T.copy(), [weights(e)[name].T.copy() for e in experts.values()]).T
    np.testing.assert_allclose(weights(result.model)[name], w0 + result.report.lam * (merged - w0), atol=1e-7)


def test_one_expert_at_lambda_one_is_that_expert():
    base, experts = suite((0.01,), torch.float64)
    result = merger(base, experts, CoramConfig(lam=1.0)).merge()
    assert result.report.counts["det_flips"] == 0
    for t in TARGETS:
        torch.testing.assert_close(
            result.model.state_dict()[t], experts["e0"].state_dict()[t], rtol=0, atol=1e-13
        )


def test_inference_mode_is_no_obstacle():
    base = tiny_llama()
    experts = [fine_tuned(base, 0.02, seed) for seed in range(2)]
    expected = CoramMerger(base, experts, progress=False).merge().model.state_dict()
    with torch.inference_mode():
        inside = CoramMerger(base, experts, progress=False).merge().model.state_dict()
    after = CoramMerger(base, experts, progress=False).merge().model.state_dict()
    assert all(torch.equal(inside[name], expected[name]) for name in expected)
    assert all(torch.equal(after[name], expected[name]) for name in expected)
