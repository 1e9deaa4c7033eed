"""Lambda on a grid, by the rule, and the kappa that a lambda stands for, whoever chose it."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from helpers.merging import merged

from coram_hf import CoramConfig
from coram_hf.amplitude import Strength, UpdateNorms, choose, on_grid
from coram_hf.hub import render_card

EVEN = UpdateNorms(100.0, {f"e{i}": 1.0 + i for i in range(5)})
UNEVEN = UpdateNorms(100.0, {"a": 1.0, "b": 256.0, "c": 4.0, "d": 4.0, "e": 4.0})


@pytest.mark.parametrize(
    ("norms", "count", "lam"),
    [(EVEN, 5, 2.6), (UpdateNorms(9.0, {"a": 1.0, "b": 2.0, "c": 1.0}), 3, 2.0), (UNEVEN, 5, 1.1)],
)
def test_the_paper_s_grid(norms, count, lam):
    """1.15 sqrt 5 = 2.571 -> 2.60, 1.15 sqrt 3 = 1.992 -> 2.00, 0.5 sqrt 5 = 1.118 -> 1.10, to the bit."""
    strength = Strength.of(CoramConfig(lambda_step=0.1), count)
    found = choose(norms, strength)
    assert (found.lam, strength.source) == (lam, "rule")
    plain = choose(norms, replace(strength, step=None))
    assert plain.lam == pytest.approx((0.5 if lam == 1.1 else 1.15) * math.sqrt(count))
    assert (plain.kappa, plain.dispersion) == (found.kappa, found.dispersion)


@pytest.mark.parametrize("step", [0.1, 0.05, 0.25, 0.3, 0.01, 1.0])
def test_the_nearest_multiple_without_noise(step):
    for lam in (0.013, 0.49, 1.0, 1.118, 1.992, 2.571, 3.3333, 14.7):
        exact = Fraction(str(step))
        count = max(1, math.floor(Fraction(lam) / exact + Fraction(1, 2)))
        assert on_grid(lam, step) == float(count * exact)
    assert repr(on_grid(2.571, 0.1)) == "2.6"


def test_the_grid_is_for_lambdas_that_follow_from_kappa():
    measured = Strength.of(CoramConfig(lambda_step=0.1, scale="c_rms"), 5)
    assert choose(EVEN, measured).lam is None
    assert choose(EVEN, measured, c_rms=2.03).lam == 2.3
    by_kappa = Strength.of(CoramConfig(lambda_step=0.1, kappa=0.9), 5)
    assert (choose(EVEN, by_kappa).lam, by_kappa.source) == (2.0, "kappa")
    given = Strength.of(CoramConfig(lambda_step=0.1, lam=2.25), 5)
    assert (choose(EVEN, given).lam, given.source) == (2.25, "given")


@pytest.mark.parametrize("scale", ["sqrt_n", "c_rms"])
def test_reports_and_cards_state_the_effective_kappa(scale, tmp_path):
    config = CoramConfig.from_line("lr", lambda_step=0.1, scale=scale)
    result = merged(config=config, progress=False).merge()
    report = result.report
    divisor, word = (math.sqrt(2), "sqrt(N)") if scale == "sqrt_n" else (report.c_rms, "c_RMS")
    assert report.lam == float(f"{1.15 * divisor:.1f}")
    assert (report.kappa, report.lam_source) == (1.15, "rule")
    for found in (result, result.with_lambda(2.25)):
        expected = found.report.lam / divisor
        assert found.report.effective_kappa == pytest.approx(expected)
        assert found.report.to_dict()["effective_kappa"] == pytest.approx(expected)
        assert found.report.facts().single["effective kappa"] == pytest.approx(expected)
        assert f"| effective kappa, lambda / {word} | {expected:.4g} |" in render_card(found.report).content
    by_rule, by_hand = (render_card(r).content for r in (report, result.with_lambda(2.25).report))
    assert "| kappa | 1.15 |" in by_rule
    assert (
        "| chosen | lambda = kappa * scale, rounded to a multiple of 0.1, with kappa by the rule" in by_rule
    )
    assert "| kappa, not used | 1.15 |" in by_hand
    assert "| chosen | lambda was given, by hand or after a sweep |" in by_hand
    assert CoramConfig.from_report(report) == config
    result.save_pretrained(tmp_path)
    assert type(report).load(tmp_path).effective_kappa == report.effective_kappa


@pytest.mark.parametrize(("largest", "factor"), [(7.4, 1.0), (7.5, (2.0 / 7.5) ** 0.5), (50.0, 0.2)])
def test_auto_balances_by_the_root_where_d_is_at_or_above_the_threshold(largest, factor):
    """The median of 1, 2, largest is 2, so the largest shrinks by sqrt(2 / largest)."""
    norms = UpdateNorms(100.0, {"a": 1.0, "b": 4.0, "c": largest**2})
    found = choose(norms, Strength.of(CoramConfig(balance="auto"), 3))
    assert found.factors == pytest.approx((1.0, 1.0, factor), rel=1e-12)
    assert found.unbalanced_dispersion == pytest.approx(largest, rel=1e-12)
    untouched = choose(norms, Strength.of(CoramConfig(balance="auto", dispersion_threshold=60.0), 3))
    assert untouched.factors == (1.0, 1.0, 1.0)


def test_auto_leaves_experts_equal_to_the_base_out_of_d():
    norms = UpdateNorms(100.0, {"a": 0.0, "b": 4.0, "c": 5.0})
    assert choose(norms, Strength.of(CoramConfig(balance="auto", lam=1.0), 3)).factors == (1.0, 1.0, 1.0)
