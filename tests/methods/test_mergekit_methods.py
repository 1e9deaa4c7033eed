"""Methods that mergekit has too, against numpy, and parameters that differ by layer, module and expert."""

import hashlib

import numpy as np
import pytest
import torch
from helpers import mergekit_reference as reference
from helpers.models import fine_tuned, tiny_llama

from coram_hf import CoramError
from coram_hf.baselines import merge, merge_tensor

SHAPES = {"square": (24, 24), "tall": (60, 18), "wide": (18, 60), "vector": (50,), "stack": (3, 8, 10)}


@pytest.fixture(params=list(SHAPES))
def shape(request):
    return SHAPES[request.param]


def problem(shape, n, seed=0):
    rng = np.random.default_rng(seed)
    w0 = rng.standard_normal(shape)
    common = 0.05 * rng.standard_normal(shape)
    return w0, [w0 + common + 0.05 * (i + 1) * rng.standard_normal(shape) for i in range(n)]


def agree(shape, expected_of, method, n=3, tolerance=1e-9, **parameters):
    w0, experts = problem(shape, n)
    base, *others = (torch.as_tensor(a) for a in (w0, *experts))
    merged = merge_tensor(base, others, method, name="x", **parameters).numpy()
    expected = expected_of(w0, experts)
    assert merged.shape == w0.shape
    assert np.linalg.norm(merged - expected) <= tolerance * np.linalg.norm(expected - w0)


def draws(shape, n, seed=0):
    found = []
    for i in range(n):
        digest = hashlib.sha256(f"{seed}/x/{i}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        found.append(torch.rand(shape, generator=generator).numpy())
    return found


@pytest.mark.parametrize("by", ["share", "norm"])
@pytest.mark.parametrize("normalize", [True, False])
def test_dare_linear(shape, by, normalize):
    agree(
        shape,
        lambda w, e: reference.dare_linear(w, e, draws(shape, 3), 0.4, (1, 2, 3), by == "norm", normalize),
        "dare_linear",
        drop=0.4,
        weights=(1, 2, 3),
        rescale_by=by,
        normalize=normalize,
    )


@pytest.mark.parametrize("method", ["della", "della_linear"])
def test_della(shape, method):
    consensus = method == "della"
    agree(
        shape,
        lambda w, e: reference.della(w, e, draws(shape, 3), 0.6, 0.2, (1, 2, 3), consensus, consensus),
        method,
        density=0.6,
        epsilon=0.2,
        weights=(1, 2, 3),
    )


@pytest.mark.parametrize("consensus", [True, False])
@pytest.mark.parametrize(("density", "gamma"), [(0.7, 0.1), (0.95, 0.2)])
def test_breadcrumbs(shape, density, gamma, consensus):
    agree(
        shape,
        lambda w, e: reference.breadcrumbs(w, e, density, gamma, (1, 1, 1), consensus),
        "breadcrumbs",
        density=density,
        gamma=gamma,
        consensus=consensus,
    )


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_sce(shape, share):
    agree(shape, lambda w, e: reference.sce(w, e, share), "sce", select_topk=share)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_slerp(shape, t):
    w0, experts = problem(shape, 1)
    merged = merge_tensor(torch.as_tensor(w0), [torch.as_tensor(experts[0])], "slerp", t=t).numpy()
    np.testing.assert_allclose(merged, reference.slerp(w0, experts, t), atol=1e-12)


@pytest.mark.parametrize("along", ["tensor", "rows", "columns"])
@pytest.mark.parametrize("of", ["updates", "weights"])
def test_nuslerp(shape, along, of):
    expected = lambda w, e: reference.nuslerp(w, e, 0.75, along, of)  # noqa: E731
    agree(shape, expected, "nuslerp", n=2, weights=(1, 3), along=along, of=of)


def test_karcher(shape):
    weights = (0.2, 0.3, 0.5)
    expected = lambda w, e: reference.karcher(w, e, weights)  # noqa: E731
    agree(shape, expected, "karcher", tolerance=1e-6, weights=weights, max_iter=50, tol=1e-12)


@pytest.mark.parametrize("filter_wise", [True, False])
def test_model_stock(shape, filter_wise):
    expected = lambda w, e: reference.model_stock(w, e, filter_wise)  # noqa: E731
    agree(shape, expected, "model_stock", filter_wise=filter_wise)


def test_arcee_fusion(shape):
    agree(shape, reference.arcee_fusion, "arcee_fusion", n=1)


def test_almost_parallel_and_opposed_updates_stay_finite():
    base = torch.zeros(4, 4)
    update = torch.eye(4)
    for pair in ([update, update], [update, -update], [base, base]):
        for method in ("nuslerp", "karcher", "model_stock", "sce", "della", "breadcrumbs", "dare_linear"):
            assert merge_tensor(base, pair, method).isfinite().all(), method
    for method in ("slerp", "arcee_fusion"):
        assert merge_tensor(base, [base], method).isfinite().all()


def test_one_density_per_expert():
    w0, experts = problem((20, 20), 2)
    base, *others = (torch.as_tensor(a) for a in (w0, *experts))
    for i, densities in enumerate([(0.3, 0), (0, 0.3)]):
        both = merge_tensor(base, others, "ties", density=densities)
        torch.testing.assert_close(both, merge_tensor(base, [others[i]], "ties", density=0.3))


@pytest.fixture(scope="module")
def suite():
    base = tiny_llama(num_hidden_layers=3, dtype=torch.float64)
    return base, {f"e{i}": fine_tuned(base, 0.02 * (i + 1), seed=i) for i in range(2)}


def taus(base, experts):
    states = [e.state_dict() for e in experts.values()]
    return {n: [s[n] - w for s in states] for n, w in base.state_dict().items()}


def test_weights_and_scale_by_layer_and_module(suite):
    base, experts = suite
    weights = [
        [0, 1, 4],
        [{"filter": "down_proj", "value": -1}, {"filter": "mlp", "value": [2, 3]}, {"value": 0.5}],
    ]
    scale = [{"filter": "self_attn", "value": [1, 2]}, {"value": 0.5}]
    result = merge(*suite, "task_arithmetic", weights=weights, scale=scale, normalize=False, progress=False)
    merged = result.model.state_dict()
    for name, (first, second) in taus(base, experts).items():
        layer = int(name.split(".")[2]) if ".layers." in name else None
        depth = 0 if layer is None else layer / 2
        one = 0 if layer is None else (0, 1, 4)[layer]
        other = -1 if "down_proj" in name else 2 + depth if "mlp" in name else 0.5
        factor = 1 + depth if "self_attn" in name else 0.5
        expected = base.state_dict()[name] + factor * (one * first + other * second)
        torch.testing.assert_close(merged[name], expected, rtol=0, atol=1e-12)


def test_filters_must_cover_every_tensor(suite):
    with pytest.raises(CoramError, match="add an entry without filter"):
        merge(*suite, "task_arithmetic", weights=[1, [{"filter": "mlp", "value": 1}]], progress=False)
    with pytest.raises(CoramError, match="scale: no filter applies to"):
        merge(*suite, "task_arithmetic", scale={"filter": "mlp", "value": 1}, progress=False)


def test_where_all_weights_are_zero_the_base_stays(suite):
    base, _ = suite
    only_mlp = [[{"filter": "mlp", "value": 1}, {"value": 0}]] * 2
    merged = merge(*suite, "ties", weights=only_mlp, progress=False).model.state_dict()
    for name, tensor in base.state_dict().items():
        assert torch.equal(merged[name], tensor) == ("mlp" not in name), name


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "tsvm", "della_linear"])
def test_a_negative_weight_is_the_mirror_image(suite, method):
    base, experts = suite
    mirrored = {name: fine_tuned(base, 0, 0) for name in experts}
    for i, (name, expert) in enumerate(experts.items()):
        state = {k: (2 * w - expert.state_dict()[k] if i else expert.state_dict()[k])
                 for k, w in base.state_dict().items()}  # fmt: skip
        mirrored[name].load_state_dict(state)
    found = merge(base, experts, method, weights=(1, -0.5), progress=False).model.state_dict()
    expected = merge(base, mirrored, method, weights=(1, 0.5), progress=False).model.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


def test_linear_divides_by_the_sum_of_signed_weights(suite):
    _, experts = suite
    merged = merge(*suite, "linear", weights=(1.5, -0.5), progress=False).model.state_dict()
    first, second = (e.state_dict() for e in experts.values())
    for name in merged:
        torch.testing.assert_close(merged[name], 1.5 * first[name] - 0.5 * second[name], rtol=0, atol=1e-12)
    with pytest.raises(CoramError, match="sum to 0"):
        merge(*suite, "linear", weights=(1, -1), progress=False)
