"""What must hold for any input, whatever the numbers."""

import numpy as np
import pytest
import torch
from helpers.matrices import additive_experts, relative_error, tensors, with_spectrum
from hypothesis import assume, given
from hypothesis import strategies as st

from coram_hf import CoramConfig
from coram_hf.geometry import merge_matrix, merge_update
from coram_hf.geometry.spread import row_priority, spread_order

LINES = ("full", "lr", "nca", "nca+ave", "ca+ave", "SS(full,mean)", "SS(nca,owner)", "SS(ca+ave,variance)")
seeds = st.integers(0, 2**32 - 1)
shapes = st.tuples(st.integers(1, 40), st.integers(1, 48))


def separated(seed, n=3, height=8):
    """A base with well separated singular values in every slice, and experts near it."""
    rng = np.random.default_rng(seed)
    w0 = with_spectrum(rng, 3 * height + 2, 30, height, np.linspace(2, 1, height))
    return w0, additive_experts(rng, w0, n, size=0.005)


@given(seeds, shapes, st.sampled_from(["mean", "energy", "variance", "owner", "margin"]), st.integers(1, 12))
def test_the_spread_order_is_a_bijection_that_deals_the_top_rows_apart(seed, shape, mode, height):
    rng = np.random.default_rng(seed)
    w0 = rng.standard_normal(shape)
    base, *experts = tensors([w0, *additive_experts(rng, w0, 3)])
    order = spread_order(base, experts, mode, height, [1.0] * 3)
    assert sorted(order.tolist()) == list(range(shape[0]))
    n_slices = shape[0] // height
    slice_of = {row: position // height for position, row in enumerate(order.tolist())}
    scores = np.array(
        [np.linalg.norm(e - w0, axis=1) / np.linalg.norm(w0, axis=1) for e in map(np.asarray, experts)]
    )
    top = np.argsort(-row_priority(torch.from_numpy(scores), mode).numpy(), kind="stable")[:n_slices]
    assert len({slice_of[row] for row in top}) == n_slices


@given(seeds, st.sampled_from(["mean", "energy", "variance", "owner", "margin"]))
def test_the_permutation_is_undone(seed, mode):
    """A slice as tall as the matrix has the same rows in any order, so spreading must change nothing."""
    w0, experts = separated(seed, height=26)
    base, *others = tensors([w0[:26], *(e[:26] for e in experts)])
    plain = merge_matrix(base, others, CoramConfig(slice_height=26))
    spread = merge_matrix(base, others, CoramConfig(slice_height=26, spread=mode))
    assert relative_error(spread, plain.numpy(), base.numpy()) <= 1e-10


@given(seeds, st.integers(1, 5), st.sampled_from(["full", "nca", "nca+ave", "ca+ave", "SS(full,energy)"]))
def test_identical_experts_give_that_expert(seed, n, line):
    w0, experts = separated(seed)
    base, expert = tensors([w0, experts[0]])
    update, stats = merge_update(base, [expert] * n, CoramConfig.from_line(line))
    assume(stats.det_flips == 0)
    assert relative_error(update + base, experts[0], w0) <= 1e-10


@given(seeds, st.floats(1e-3, 1e3), st.sampled_from(LINES))
def test_scaling_all_models_scales_the_merge(seed, factor, line):
    w0, experts = separated(seed)
    config = CoramConfig.from_line(line)
    base, *others = tensors([w0, *experts])
    merged = merge_matrix(base, others, config).numpy()
    scaled = merge_matrix(base * factor, [o * factor for o in others], config).numpy()
    assert relative_error(scaled / factor, merged, w0) <= 1e-10


@given(seeds, st.permutations(range(4)), st.sampled_from(LINES))
def test_the_order_of_experts_does_not_matter(seed, permutation, line):
    w0, experts = separated(seed, n=4)
    config = CoramConfig.from_line(line)
    base, *others = tensors([w0, *experts])
    merged = merge_matrix(base, others, config).numpy()
    shuffled = merge_matrix(base, [others[i] for i in permutation], config)
    assert relative_error(shuffled, merged, w0) <= 1e-10


@pytest.mark.parametrize("path", ["gram", "svd"])
@pytest.mark.parametrize("line", ["full", "lr", "qs", "sv"])
def test_joint_sign_flips_do_not_matter(monkeypatch, line, path):
    """Whatever signs LAPACK gives the singular pairs, the merge is the same."""
    from coram_hf.geometry import frame

    eigh, svd = torch.linalg.eigh, torch.linalg.svd
    generator = torch.Generator().manual_seed(0)

    def signs(like):
        return 1.0 - 2.0 * torch.randint(0, 2, like.shape[:-2] + like.shape[-1:], generator=generator).to(
            like
        )

    def flipped_eigh(matrix):
        values, vectors = eigh(matrix)
        return values, vectors * signs(vectors).unsqueeze(-2)

    def flipped_svd(matrix, full_matrices=True):
        u, s, vh = svd(matrix, full_matrices=full_matrices)
        flips = signs(u)
        return u * flips.unsqueeze(-2), s, vh * flips.unsqueeze(-1)

    w0, experts = separated(11)
    base, *others = tensors([w0, *experts])
    if path == "svd":
        monkeypatch.setattr(frame, "GRAM_CONDITION", 1.0)
    expected = merge_matrix(base, others, CoramConfig.from_line(line)).numpy()
    monkeypatch.setattr(torch.linalg, "eigh", flipped_eigh)
    monkeypatch.setattr(torch.linalg, "svd", flipped_svd)
    for _ in range(5):
        assert relative_error(merge_matrix(base, others, CoramConfig.from_line(line)), expected, w0) <= 1e-10


@given(seeds)
def test_the_gram_and_the_svd_path_agree(seed):
    from coram_hf.geometry import frame

    w0, experts = separated(seed)
    base, *others = tensors([w0, *experts])
    by_gram, gram_stats = merge_update(base, others, CoramConfig())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "GRAM_CONDITION", 1.0)
        by_svd, svd_stats = merge_update(base, others, CoramConfig())
    assert gram_stats.svd_fallbacks == 0
    assert svd_stats.svd_fallbacks == 4
    assert float((by_gram - by_svd).norm() / by_svd.norm()) <= 1e-10
