"""Decorrelation against numpy: every shape, low ranks as small cores, and the degenerate cases."""

import numpy as np
import pytest
import torch
from helpers import decorrelate_reference, reference
from helpers.decorrelate_reference import WAYS
from helpers.matrices import relative_error, tensors

from coram_hf import CoramConfig
from coram_hf.baselines import merge_tensor
from coram_hf.geometry import linalg, merge_matrix
from coram_hf.geometry.decorrelated import (
    Decorrelation,
    decorrelate_experts,
    decorrelate_factors,
    mean_overlap,
)
from coram_hf.geometry.linalg import inverse, largest_eigenvalue

SHAPES = {
    "square": (24, 24),
    "tall": (60, 18),
    "wide": (18, 30),
    "very wide": (6, 60),
    "one row": (1, 20),
    "one column": (20, 1),
    "few for many": (2, 3),
}


@pytest.fixture(params=list(WAYS))
def how(request):
    return request.param


def problem(shape, n=3, seed=0):
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(shape)
    taus = [0.02 * (i + 1) * (rng.standard_normal(shape) + common) for i in range(n)]
    return rng.standard_normal(shape), taus


def changed(w0, taus, how, factors=None, dtype=torch.float64):
    base, *experts = tensors([w0, *(w0 + tau for tau in taus)], dtype)
    found = decorrelate_experts(base, experts, CoramConfig(decorrelate=how), factors)
    return [expert.numpy() - np.asarray(base.double()) for expert in found.experts], found.measured


def close(found, expected, taus, tolerance=1e-8):
    size = max(np.linalg.norm(tau) for tau in taus)
    for a, b in zip(found, expected, strict=True):
        assert np.isfinite(a).all()
        assert np.linalg.norm(a - b) <= tolerance * size


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_every_shape(shape, n, how):
    w0, taus = problem(SHAPES[shape], n)
    found, measured = changed(w0, taus, how)
    expected = WAYS[how](taus)
    close(found, expected, taus)
    np.testing.assert_allclose(measured.energies, [np.sum(t * t) for t in expected], rtol=1e-9)
    assert mean_overlap(measured.before) == pytest.approx(decorrelate_reference.overlap(taus), rel=1e-9)
    assert mean_overlap(measured.after) == pytest.approx(decorrelate_reference.overlap(expected), abs=1e-9)
    if how in ("tsv", "ridge"):
        assert mean_overlap(measured.after) <= mean_overlap(measured.before) + 1e-12


def test_tsv_makes_updates_orthogonal():
    w0, taus = problem((40, 30))
    found, measured = changed(w0, taus, "tsv")
    inner = np.array([[np.sum(a * b) for a in found] for b in found])
    assert np.abs(inner - np.diag(np.diag(inner))).max() < 1e-12 * inner.max()
    assert mean_overlap(measured.after) == pytest.approx(0, abs=1e-12)


def test_balance_comes_first_and_scales_what_comes_out(how):
    w0, taus = problem((24, 20))
    factors = (0.25, 1.0, 0.6)
    balanced = [f * tau for f, tau in zip(factors, taus, strict=True)]
    found, measured = changed(w0, taus, how, factors)
    close(found, WAYS[how](balanced), taus)
    assert measured.flat() == pytest.approx(changed(w0, balanced, how)[1].flat(), rel=1e-7, abs=1e-15)
    again = Decorrelation.of(measured.flat(), 3)
    assert all(torch.equal(a, b) for a, b in zip(again, measured, strict=True))


@pytest.mark.parametrize("shape", [(24, 24), (40, 12), (12, 40), (1, 9)])
def test_one_expert_is_given_back(shape, how):
    w0, taus = problem(shape, 1)
    found, measured = changed(w0, taus, how)
    np.testing.assert_array_equal(found[0], (w0 + taus[0]) - w0)
    assert mean_overlap(measured.before) is None


def test_identical_experts_share_what_they_change(how):
    w0, (tau, *_) = problem((24, 20))
    found, measured = changed(w0, [tau] * 3, how)
    close(found, WAYS[how]([tau] * 3), [tau])
    if how in ("ridge", "wudi"):
        assert all(np.array_equal(found[0], other) for other in found)
    assert mean_overlap(measured.before) == pytest.approx(1)


def test_experts_equal_to_the_base_stay_there(how):
    w0, (tau, other, _) = problem((24, 20))
    nothing = np.zeros_like(tau)
    found, measured = changed(w0, [tau, nothing, other], how)
    close(found, WAYS[how]([tau, nothing, other]), [tau])
    assert not found[1].any()
    assert np.isfinite(mean_overlap(measured.before))
    none, measured = changed(w0, [nothing, nothing], how)
    assert not any(update.any() for update in none)
    assert mean_overlap(measured.before) is None


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_directions_that_are_zero_are_left_out(shape, dtype, how):
    """Of rank 2, up to the rounding of the weights: arbitrary directions would change the others."""
    rng = np.random.default_rng(1)
    w0 = rng.standard_normal(shape)
    taus = [0.05 * rng.standard_normal((shape[0], 2)) @ rng.standard_normal((2, shape[1])) for _ in range(3)]
    found, _ = changed(w0, taus, how, dtype=dtype)
    close(found, WAYS[how](taus), taus, 1e-8 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("ranks", [(2, 2, 2), (1, 4, 0), (8, 8, 8), (0, 0, 0)])
@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (6, 30)])
def test_low_ranks_as_cores(shape, ranks, how):
    rng = np.random.default_rng(2)
    base = torch.randn(shape, dtype=torch.float64)
    pairs = [(rng.standard_normal((shape[0], r)), 0.02 * rng.standard_normal((r, shape[1]))) for r in ranks]
    taus = [b @ a for b, a in pairs]
    config, factors = CoramConfig(decorrelate=how), (0.5, 1.0, 1.0)
    low = decorrelate_factors(base, [tuple(tensors(pair)) for pair in pairs], config, factors)
    dense = decorrelate_experts(base, [base + t for t in tensors(taus)], config, factors)
    balanced = [f * tau for f, tau in zip(factors, taus, strict=True)]
    close([e.numpy() - base.numpy() for e in low.experts], WAYS[how](balanced), taus)
    close([e.numpy() for e in low.experts], [e.numpy() for e in dense.experts], taus)
    np.testing.assert_allclose(low.measured.flat(), dense.measured.flat(), rtol=1e-7, atol=1e-10)


def test_ill_conditioned_updates_take_a_true_svd():
    rng = np.random.default_rng(3)
    left, right = (np.linalg.qr(rng.standard_normal((30, 30)))[0] for _ in range(2))
    taus = [left * np.logspace(-1, -9, 30) @ right.T, 0.1 * rng.standard_normal((30, 30))]
    found, _ = changed(rng.standard_normal((30, 30)), taus, "tsv")
    close(found, WAYS["tsv"](taus), taus)


def test_nearly_identical_experts():
    w0, (tau, other, _) = problem((24, 20))
    taus = [tau, tau + 1e-5 * other]
    close(changed(w0, taus, "tsv")[0], WAYS["tsv"](taus), taus, 1e-7)
    close(changed(w0, taus, "ridge")[0], WAYS["ridge"](taus), taus)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_auto_cuts_nothing_off(shape):
    """Of low rank, also as a matrix, by tsv; of full rank by wudi, even if only one expert is."""
    rng = np.random.default_rng(6)
    w0 = rng.standard_normal(shape)
    low = [rng.standard_normal((shape[0], 3)) @ rng.standard_normal((3, shape[1])) for _ in range(3)]
    close(changed(w0, low, "auto")[0], WAYS["tsv"](low), low)
    high = [*low[:2], rng.standard_normal(shape)]
    close(changed(w0, high, "auto")[0], WAYS["wudi"](high), high)


def test_the_sum_of_wudi_is_the_method_of_that_name():
    w0, taus = problem((24, 20))
    base, *experts = tensors([w0, *(w0 + tau for tau in taus)])
    found, _ = changed(w0, taus, "wudi")
    assert relative_error(merge_tensor(base, experts, "wudi"), w0 + sum(found), w0) < 1e-8


def test_the_overlap_of_wide_matrices_is_estimated(how):
    rng = np.random.default_rng(4)
    common = rng.standard_normal((40, 400))
    taus = [rng.standard_normal((40, 400)) + common for _ in range(2)]
    _, measured = changed(rng.standard_normal((40, 400)), taus, how)
    assert mean_overlap(measured.before) == pytest.approx(decorrelate_reference.overlap(taus), rel=0.15)


@pytest.mark.parametrize("n", [1, 200, 513, 1111])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_inverse_of_a_well_conditioned_matrix(n, threads, monkeypatch):
    rng = np.random.default_rng(n)
    X = rng.normal(size=(n, n))
    A = X.T @ X / n + 0.4 * np.eye(n)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = inverse(torch.from_numpy(A)).numpy()
    np.testing.assert_allclose(found, np.linalg.inv(A), atol=1e-13, rtol=0)


def test_the_largest_eigenvalue_by_lanczos():
    rng = np.random.default_rng(5)
    flat = rng.standard_normal((700, 600))
    steep = flat * np.logspace(0, -6, 600)
    once = np.outer(flat[0], flat[0])
    for gram in (flat.T @ flat, steep.T @ steep, once, np.eye(600)):
        found = largest_eigenvalue(torch.from_numpy(gram))
        assert len(gram) >= linalg.LANCZOS_SIZE
        assert found == pytest.approx(np.linalg.eigvalsh(gram)[-1], rel=1e-10)


@pytest.mark.parametrize(
    "line",
    ["DEC(full)", "DEC(lr,ridge)", "DEC(nca+ave)", "DEC(SS(ca,variance),ridge)", "DEC(qs)", "DEC(nca,wudi)"],
)
@pytest.mark.parametrize("weights", [None, (1, 2, 3)])
def test_matrices_are_merged_from_decorrelated_experts(line, weights):
    w0, taus = problem((26, 20))
    config = CoramConfig.from_line(line, weights=weights)
    base, *experts = tensors([w0, *(w0 + tau for tau in taus)])
    merged = merge_matrix(base, experts, config)
    moved = [w0 + tau for tau in WAYS[config.decorrelate](taus)]
    expected = reference.merge(
        w0, moved, branch=config.branch, conflict=config.conflict, spread=config.spread, weights=weights
    )
    assert relative_error(merged, expected, w0) < 1e-8


def test_float32_is_close_to_float64():
    w0, taus = problem((40, 30))
    base, *experts = tensors([w0, *(w0 + tau for tau in taus)], torch.float32)
    exact, quick = (
        merge_matrix(base, experts, CoramConfig(decorrelate="ridge", compute_dtype=dtype))
        for dtype in ("float64", "float32")
    )
    assert float((exact - quick).norm() / (exact - base).norm()) < 1e-4


def test_ridge_of_16_bit_weights_computes_in_float32_and_all_else_in_float64():
    w0, taus = problem((40, 30))
    for dtype, how, precision in (
        (torch.bfloat16, "ridge", "float32"),
        (torch.float32, "ridge", "float64"),
        (torch.bfloat16, "tsv", "float64"),
    ):
        base, *experts = tensors([w0, *(w0 + tau for tau in taus)], dtype)
        moved = {
            name: decorrelate_experts(base, experts, CoramConfig(decorrelate=how, compute_dtype=name)).experts
            for name in ("auto", "float64", "float32")
        }
        assert all(map(torch.equal, moved["auto"], moved[precision]))
        exact, quick = (moved[name][0].double() - base.double() for name in ("float64", "float32"))
        assert float((exact - quick).norm() / exact.norm()) < 1e-5
