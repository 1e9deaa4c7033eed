"""The search for lambda, on curves whose minimum is known."""

import math

import pytest

from coram_hf.calibration.search import best, is_at_bound, search_lambda


@pytest.mark.parametrize("minimum", [0.8, 1.3, 2.57, 4.0, 8.0])
def test_the_minimum_of_a_curve_is_found_in_ten_evaluations(minimum):
    tried = []

    def loss(lam):
        tried.append(lam)
        return (math.log(lam) - math.log(minimum)) ** 2 + 0.3

    curve = search_lambda(loss, 2.57, 4)
    assert tried[0] == 2.57
    assert len(tried) == len(curve) == 10 or minimum == 2.57
    assert list(curve) == sorted(curve)
    assert best(curve) == pytest.approx(minimum, rel=0.05)
    assert not is_at_bound(curve, 2.57, 4)
    assert all(2.57 / 4 < lam < 2.57 * 4 for lam in curve)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_minimum_beyond_the_bounds_is_noticed(sign):
    curve = search_lambda(lambda lam: sign * lam, 2.0, 4)
    assert is_at_bound(curve, 2.0, 4)


def test_losses_that_are_not_numbers_are_avoided():
    curve = search_lambda(lambda lam: math.nan if lam > 2 else -lam, 2.0, 4)
    assert best(curve) == 2.0
    assert curve[2.0] == -2


def test_nothing_is_better_than_the_start_by_chance():
    assert best(search_lambda(lambda lam: 0.0 if lam == 2.0 else 1.0, 2.0, 4)) == 2.0


def test_lambdas_are_short_to_write():
    assert all(len(repr(lam)) <= 7 for lam in search_lambda(lambda lam: lam, 2.0, 4))
