"""merge_matrix against the naive reference, over every configuration and every awkward input."""

import numpy as np
import pytest
import torch
from helpers import reference
from helpers.matrices import additive_experts, multiplicative_experts, relative_error, tensors, with_spectrum

from coram_hf import CoramConfig
from coram_hf.geometry import merge_matrix, merge_update

BRANCHES = ("full", "lr", "q", "s", "v", "qs", "sv")
CONFLICTS = (None, "nca", "nca+ave", "ca", "ca+ave")
SPREADS = (None, "mean", "energy", "variance", "owner", "margin")


def problem(kind, h):
    """Base and three experts with two whole slices and a short one."""
    rng = np.random.default_rng(h)
    d_out, d_in = 2 * h + 3, 2 * h + 9
    if kind == "random":
        w0 = rng.standard_normal((d_out, d_in))
        return w0, additive_experts(rng, w0, 3)
    if kind == "nearly degenerate":
        w0 = with_spectrum(rng, d_out, d_in, h, 1 + 1e-3 * np.arange(h)[::-1])
        return w0, additive_experts(rng, w0, 3)
    w0 = with_spectrum(rng, d_out, d_in, h, np.logspace(0, -6, h))
    return w0, multiplicative_experts(rng, w0, h, 3)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("conflict", CONFLICTS)
@pytest.mark.parametrize("h", [4, 8, 16, 64])
@pytest.mark.parametrize("kind", ["random", "nearly degenerate"])
def test_every_configuration_equals_the_reference(kind, h, conflict, spread):
    w0, experts = problem(kind, h)
    base, *others = tensors([w0, *experts])
    for branch in BRANCHES:
        config = CoramConfig(slice_height=h, branch=branch, conflict=conflict, spread=spread)
        expected = reference.merge(w0, experts, h=h, branch=branch, conflict=conflict, spread=spread)
        assert relative_error(merge_matrix(base, others, config), expected, w0) <= 1e-9, branch


@pytest.mark.parametrize("h", [4, 8, 16])
@pytest.mark.parametrize("branch", BRANCHES)
def test_ill_conditioned_slices_take_the_svd_path(h, branch):
    w0, experts = problem("ill-conditioned", h)
    base, *others = tensors([w0, *experts])
    config = CoramConfig(slice_height=h, branch=branch)
    update, stats = merge_update(base, others, config)
    expected = reference.merge(w0, experts, h=h, branch=branch)
    assert relative_error(update + base, expected, w0) <= 1e-7
    assert stats.svd_fallbacks >= 2
    assert stats.frameless == 0


@pytest.mark.parametrize("weights", [None, (3.0, 1.0, 0.5)])
@pytest.mark.parametrize("damage", ["repeated row", "zero row", "zero slice"])
@pytest.mark.parametrize("victim", ["base", "expert"])
def test_rank_deficient_slices_take_the_weighted_mean(damage, victim, weights):
    rng = np.random.default_rng(1)
    w0 = rng.standard_normal((16, 30))
    experts = additive_experts(rng, w0, 3)
    broken = w0 if victim == "base" else experts[1]
    broken[8:] = {"zero slice": 0.0}.get(damage, broken[8:])
    broken[9] = {"repeated row": broken[8], "zero row": 0.0}.get(damage, broken[9])
    base, *others = tensors([w0, *experts])
    update, stats = merge_update(base, others, CoramConfig(weights=weights))
    w = np.full(3, 1 / 3) if weights is None else np.array(weights) / sum(weights)
    mean = sum(wi * (e - w0) for wi, e in zip(w, experts, strict=True))
    np.testing.assert_allclose(update[8:].numpy(), mean[8:], rtol=0, atol=1e-15)
    assert stats.frameless == 1
    expected = reference.merge(w0, experts, weights=weights)
    assert relative_error(update + base, expected, w0) <= 1e-9


@pytest.mark.parametrize("shape", [(5, 40), (40, 5), (3, 3), (1, 1), (1, 20), (20, 1), (17, 8), (16, 9)])
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("line", ["full", "lr", "nca+ave", "SS(ca+ave,variance)", "SS(full,owner)"])
def test_awkward_shapes_equal_the_reference(shape, n, line):
    rng = np.random.default_rng(shape[0] + 100 * n)
    w0 = rng.standard_normal(shape)
    experts = additive_experts(rng, w0, n, size=0.01)
    config = CoramConfig.from_line(line)
    expected = reference.merge(
        w0, experts, branch=config.branch, conflict=config.conflict, spread=config.spread
    )
    base, *others = tensors([w0, *experts])
    assert relative_error(merge_matrix(base, others, config), expected, w0) <= 1e-9


@pytest.mark.parametrize(
    "line", ["full", "lr", "nca", "ca", "ca+ave", "SS(nca,variance)", "SS(full,owner)", "q", "sv"]
)
@pytest.mark.parametrize(
    "case", ["all zero", "zero base", "expert equals base", "all equal base", "zero expert"]
)
def test_nothing_becomes_nan(line, case):
    rng = np.random.default_rng(2)
    w0 = rng.standard_normal((19, 24))
    experts = additive_experts(rng, w0, 3)
    if case in ("all zero", "zero base"):
        w0 = np.zeros_like(w0)
    if case == "all zero":
        experts = [np.zeros_like(w0)] * 3
    if case == "expert equals base":
        experts[0] = w0
    if case == "all equal base":
        experts = [w0] * 3
    if case == "zero expert":
        experts[2] = np.zeros_like(w0)
    base, *others = tensors([w0, *experts])
    merged = merge_matrix(base, others, CoramConfig.from_line(line))
    assert merged.isfinite().all()
    if case in ("all zero", "all equal base"):
        torch.testing.assert_close(merged, base, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_float_dtype_is_read_exactly(dtype):
    rng = np.random.default_rng(3)
    w0 = rng.standard_normal((24, 40))
    base, *others = tensors([w0, *additive_experts(rng, w0, 3, size=0.1)], dtype)
    merged = merge_matrix(base, others)
    assert merged.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = reference.merge(base.double().numpy(), [e.double().numpy() for e in others])
    tolerance = 1e-12 if dtype == torch.float64 else 3e-7
    np.testing.assert_allclose(merged.double().numpy(), exact, rtol=0, atol=tolerance * np.abs(exact).max())


def test_transposed_and_strided_matrices_are_merged_like_their_copies():
    rng = np.random.default_rng(5)
    w0 = rng.standard_normal((24, 40))
    matrices = tensors([w0, *additive_experts(rng, w0, 3)])
    views = [m.T.contiguous().T for m in matrices]
    out = torch.empty(40, 24, dtype=torch.float64).T
    for config in (CoramConfig(), CoramConfig(spread="owner")):
        expected = merge_update(matrices[0], matrices[1:], config)[0]
        merge_update(views[0], views[1:], config, out=out)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_chunks_do_not_change_the_result(monkeypatch):
    rng = np.random.default_rng(6)
    w0 = rng.standard_normal((67, 30))
    base, *others = tensors([w0, *additive_experts(rng, w0, 3)])
    config = CoramConfig(conflict="nca+ave", spread="mean")
    whole = merge_matrix(base, others, config)
    monkeypatch.setattr("coram_hf.geometry.slices.CHUNK_BYTES", 1)
    torch.testing.assert_close(merge_matrix(base, others, config), whole, rtol=0, atol=1e-13)


def test_the_same_inputs_give_the_same_bits():
    rng = np.random.default_rng(7)
    w0 = rng.standard_normal((64, 96))
    base, *others = tensors([w0, *additive_experts(rng, w0, 5)], torch.bfloat16)
    config = CoramConfig.from_line("SS(ca+ave,owner)")
    assert torch.equal(merge_matrix(base, others, config), merge_matrix(base, others, config))


@pytest.mark.parametrize(
    ("base", "experts", "message"),
    [
        (torch.ones(4), [torch.ones(4)], "2-D"),
        (torch.ones(4, 4), [torch.full((4, 4), torch.nan)], "expert 0 contains NaN"),
        (torch.ones(4, 4, dtype=torch.int64), [torch.ones(4, 4)], "int64"),
        (torch.ones(4, 4), [], "no experts"),
        (torch.ones(4, 4), [torch.ones(4, 4), torch.ones(4, 5)], r"expert 1 .*\(4, 4\).*\(4, 5\)"),
    ],
)
def test_bad_matrices_are_named(base, experts, message):
    with pytest.raises(ValueError, match=message):
        merge_matrix(base, experts)


def test_balance_is_refused_for_a_single_matrix():
    with pytest.raises(ValueError, match="CoramMerger"):
        merge_matrix(torch.ones(4, 4), [torch.ones(4, 4)], CoramConfig(balance="damp"))


def test_parameters_are_read_without_their_graph():
    base, expert = (torch.nn.Parameter(torch.randn(16, 20)) for _ in range(2))
    for line in ("full", "nca+ave", "SS(ca,mean)"):
        assert not merge_matrix(base, [expert], CoramConfig.from_line(line)).requires_grad


def test_counts_of_reflections_and_half_turns():
    """Counted by numpy over all experts and slices of unrelated matrices, whichever path they took."""
    rng = np.random.default_rng(8)
    w0 = rng.standard_normal((80, 30))
    experts = [rng.standard_normal((80, 30)) for _ in range(3)]
    flips = near_pi = 0
    for start in range(0, 80, 8):
        u0, _, v0t = np.linalg.svd(w0[start : start + 8], full_matrices=False)
        for expert in experts:
            u, _, vt = np.linalg.svd(expert[start : start + 8], full_matrices=False)
            q = u0.T @ (u * np.where((u * u0).sum(0) + (vt * v0t).sum(1) < 0, -1, 1))
            if np.linalg.det(q) < 0:
                flips += 1
                q[:, -1] *= -1
            near_pi += np.abs(np.angle(np.linalg.eigvals(q))).max() > 3
    base, *others = tensors([w0, *experts])
    for branch in ("full", "q"):
        stats = merge_update(base, others, CoramConfig(branch=branch))[1]
        assert (stats.det_flips, stats.near_pi) == (flips, near_pi)
    assert flips > 5
    assert near_pi > 1


def test_slices_whose_right_factors_cancel_are_not_left_to_the_gram_matrix():
    """Two experts with opposite last right vectors: the mean of the V_i is nearly rank-deficient."""
    rng = np.random.default_rng(9)
    v = np.linalg.qr(rng.standard_normal((20, 5)))[0]
    s = np.array([4.0, 3.0, 2.0, 1.0])
    w0 = np.diag(s) @ v[:, :4].T
    turned = [
        v[:, :4] @ np.diag([1, 1, 1, 1e-5]) + sign * np.outer(v[:, 4], [0, 0, 0, 1]) for sign in (1, -1)
    ]
    experts = [np.diag(s) @ (t / np.linalg.norm(t, axis=0)).T for t in turned]
    base, *others = tensors([w0, *experts])
    update, stats = merge_update(base, others, CoramConfig(slice_height=4))
    assert stats.svd_fallbacks == 1
    np.testing.assert_allclose((update + base).numpy(), reference.merge(w0, experts, h=4), rtol=0, atol=1e-9)


def test_numbers_too_large_to_square_take_the_svd_path():
    rng = np.random.default_rng(10)
    w0 = rng.standard_normal((8, 20))
    models = tensors([w0, *(w0 * (1 + 0.05 * rng.standard_normal((8, 20))) for _ in range(2))])
    expected, plain = merge_update(models[0], models[1:], CoramConfig())
    assert plain.svd_fallbacks == 0
    base, *others = (1e200 * model for model in models)
    update, stats = merge_update(base, others, CoramConfig())
    assert stats.svd_fallbacks == 1
    torch.testing.assert_close(update / 1e200, expected, rtol=0, atol=1e-10)
