"""Every number of a report against a naive computation on the same weights."""

import copy
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import decorrelate_reference, reference
from helpers.adapters import METHODS, adapted
from helpers.architectures import ARCHITECTURES
from helpers.folders import on_disk
from helpers.matrices import additive_experts, multiplicative_experts, tensors, with_spectrum
from helpers.models import fine_tuned, tiny_llama
from helpers.paths import ROOT

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.geometry.anatomy import dissect
from coram_hf.geometry.branches import BRANCHES
from coram_hf.inputs.targets import find_targets
from coram_hf.report import diagnostics
from coram_hf.report.diagnostics import SECTIONS, contraction, diagnose, diagnose_inputs
from coram_hf.report.places import Place, places
from coram_hf.report.verdict import verdict

WORDS = {"self_attn": "attention", "mlp": "mlp", "embed": "embedding", "lm_head": "head", "norm": "norm"}
"""The kind of a parameter of Llama, by a word in its name."""
SIZES = {"math": 0.02, "code": 0.03, "chat": 0.06}
CONFIGS = {
    "full": CoramConfig(),
    "weights": CoramConfig(branch="lr", weights=(3, 2, 1), kappa=0.8),
    "spread": CoramConfig.from_line("SS(nca+ave,mean)"),
    "conflict": CoramConfig.from_line("lr-ca (h=16)", scale="c_rms"),
    "balance": CoramConfig(balance="damp"),
    "decorrelated": CoramConfig.from_line("DEC(SS(nca,mean),ridge)", weights=(3, 2, 1)),
}


class Naive:
    """A suite as numpy matrices, by the naive implementation."""

    def __init__(self, config):
        self.config = config
        self.base = tiny_llama()
        self.experts = {name: fine_tuned(self.base, size, i) for i, (name, size) in enumerate(SIZES.items())}
        with torch.no_grad():
            for name, expert in self.experts.items():
                weight = expert.model.layers[0].self_attn.q_proj.weight
                origin = self.base.model.layers[0].self_attn.q_proj.weight
                weight[3] = origin[3]
                if name != "chat":
                    weight[8:16, :20] = origin[8:16, :20]
        self.merged = {"mean": copy.deepcopy(self.base), "one": fine_tuned(self.base, 0.01, 9, only="mlp")}
        with torch.no_grad():
            for name, parameter in self.merged["mean"].named_parameters():
                parameter.copy_(sum(e.get_parameter(name) for e in self.experts.values()) / len(SIZES))
        self.w0 = {n: self.array(p) for n, p in self.base.named_parameters() if "_proj" in n}
        self.raw = {
            n: [self.array(e.get_parameter(n)) - self.w0[n] for e in self.experts.values()] for n in self.w0
        }
        r = [self.norm(i) / self.norm() for i in range(len(SIZES))]
        self.factors = [min(1.0, np.median(r) / x) for x in r] if config.balance else [1.0] * len(r)
        self.tau = {n: [f * t for f, t in zip(self.factors, ts, strict=True)] for n, ts in self.raw.items()}
        self.used = self.tau
        if config.decorrelate:
            self.used = {n: decorrelate_reference.WAYS[config.decorrelate](ts) for n, ts in self.tau.items()}
        self.models = {n: [self.w0[n] + t for t in ts] for n, ts in self.used.items()}
        weights = config.weights or [1] * len(r)
        self.weights = np.array(weights) / sum(weights)

    @staticmethod
    def array(parameter):
        return parameter.detach().double().numpy()

    def norm(self, i=None, only=""):
        found = [self.w0[n] if i is None else self.raw[n][i] for n in self.w0 if only in n]
        return math.sqrt(sum((m**2).sum() for m in found))

    def update(self, name, branch=None):
        config = self.config
        merged = reference.merge(
            self.w0[name], self.models[name], h=config.slice_height, branch=branch or config.branch,
            conflict=config.conflict, spread=config.spread, weights=self.weights,
        )  # fmt: skip
        return merged - self.w0[name]

    def slices(self, name, mode):
        return reference.slice_rows(self.w0[name], self.models[name], mode, self.config.slice_height)


@pytest.fixture(scope="module", params=CONFIGS)
def suite(request):
    naive = Naive(CONFIGS[request.param])
    return naive, diagnose(naive.base, naive.experts, naive.config, merged=naive.merged, progress=False)


def close(value, tolerance=1e-9):
    return pytest.approx(value, rel=tolerance, abs=1e-12)


def test_dispersion_and_threshold(suite):
    naive, numbers = suite
    found = numbers["dispersion"]
    r = [naive.norm(i) / naive.norm() for i in range(3)]
    balanced = [f * x for f, x in zip(naive.factors, r, strict=True)]
    D = max(balanced) / min(balanced)
    assert list(found["relative_updates"].values()) == close(r)
    assert found["D"] == close(D)
    assert found["unbalanced_D"] == close(max(r) / min(r))
    for i, name in enumerate(SIZES):
        others = [x for j, x in enumerate(balanced) if j != i]
        assert found["without"][name] == close(max(others) / min(others))
    largest = [int(np.argmax([np.linalg.norm(tau) for tau in taus])) for taus in naive.raw.values()]
    assert found["dominant"] == {name: largest.count(i) for i, name in enumerate(SIZES)}
    for i, name in enumerate(SIZES):
        for layer in range(2):
            only = f"layers.{layer}."
            expected = naive.norm(i, only) / naive.norm(None, only)
            assert found["by_layer"][name][str(layer)] == close(expected)
    assert found["paper"][found["below"]] <= D < found["paper"][found["above"]]

    scale = 1 / math.sqrt((naive.weights**2).sum())
    if naive.config.scale == "c_rms" or naive.config.decorrelate:
        scale = numbers["contraction"]["c_rms"]
    kappa = naive.config.kappa or 1.15
    assert found["lam"] == close(kappa * scale)
    assert list(numbers["threshold"]) == [str(d) for d in range(4, 13)]
    for at in numbers["threshold"].values():
        assert (at["kappa"], at["lam"]) == (1.15, close(1.15 * scale))


def test_the_threshold_decides_between_two_dispersions():
    base = tiny_llama()
    experts = [fine_tuned(base, 0.01, 0), fine_tuned(base, 0.08, 1)]
    found = diagnostics.threshold(base, experts, progress=False)
    D = diagnostics.dispersion(base, experts, progress=False)["D"]
    assert 6 < D < 11
    assert [at["kappa"] for at in found.values()] == [0.5 if D >= d else 1.15 for d in range(4, 13)]
    assert [at["lam"] for at in found.values()] == [
        close(at["kappa"] * math.sqrt(2)) for at in found.values()
    ]


def test_contraction(suite):
    naive, numbers = suite
    found = numbers["contraction"]
    energy = {n: sum((t**2).sum() for t in naive.tau[n]) / 3 for n in naive.w0}
    merged = {n: (naive.update(n) ** 2).sum() for n in naive.w0}
    c_rms = math.sqrt(sum(energy.values()) / sum(merged.values()))
    assert found["c_rms"] == close(c_rms)
    ideal = 1 / math.sqrt((naive.weights**2).sum())
    assert found["sqrt_n"] == close(ideal)
    assert found["relative_difference"] == close(abs(c_rms - ideal) / ideal)
    by_matrix = {n: math.sqrt(energy[n] / merged[n]) for n in naive.w0}
    assert found["by_matrix"] == {n: close(c) for n, c in by_matrix.items()}
    task = sum((sum(ts) ** 2).sum() for ts in naive.used.values())
    used = sum((t**2).sum() for ts in naive.used.values() for t in ts)
    assert found["coefficients"] == {
        "norm_matching": close(math.sqrt(task) / 3 / math.sqrt(sum(merged.values()))),
        "energy_ratio": close(np.mean(list(by_matrix.values()))),
        "gram_cross_term": close(math.sqrt(3 * used / task)),
        "linear_in_n": 2.0,
        "sqrt_n": close(ideal),
        "c_rms": close(c_rms),
    }


def test_branches(suite):
    naive, numbers = suite
    task = np.concatenate([sum(ts).ravel() for ts in naive.used.values()])
    origin = math.sqrt(sum((w0**2).sum() for w0 in naive.w0.values()))
    deltas = {b: np.concatenate([naive.update(n, b).ravel() for n in naive.w0]) for b in BRANCHES}
    assert set(numbers["branches"]) == {"full", "lr", "q", "s", "v", "qs", "sv"}
    for branch, delta in deltas.items():
        size = np.linalg.norm(delta)
        assert numbers["branches"][branch]["norm_ratio"] == close(size / np.linalg.norm(task))
        assert numbers["branches"][branch]["relative"] == close(size / origin)
        assert numbers["branches"][branch]["cosine"] == close(delta @ task / size / np.linalg.norm(task))
    apart = math.hypot(np.linalg.norm(deltas["q"]), np.linalg.norm(deltas["v"]))
    assert numbers["cancellation"]["ratio"] == close(np.linalg.norm(deltas["lr"]) / apart)


def test_decorrelation(suite):
    naive, numbers = suite
    found = numbers["decorrelation"]
    assert found["how"] == naive.config.decorrelate
    if found["how"] is None:
        assert found["overlap_before"] is found["overlap_after"] is found["c_rms_ratio"] is None
        return
    for name in naive.w0:
        before, after = (decorrelate_reference.overlap(some[name]) for some in (naive.tau, naive.used))
        assert found["by_matrix"][name]["overlap_before"] == close(before)
        assert found["by_matrix"][name]["overlap_after"] == close(after)
    gram = {n: [t.T @ t for t in ts] for n, ts in naive.used.items()}
    shared = np.array([[sum((g[i] * g[j]).sum() for g in gram.values()) for i in range(3)] for j in range(3)])
    size = np.sqrt(np.diag(shared))
    assert found["overlap_after"] == close((shared / np.outer(size, size))[np.triu_indices(3, 1)].mean())
    energy = sum((t**2).sum() for ts in naive.used.values() for t in ts) / 3
    merged = sum((naive.update(n) ** 2).sum() for n in naive.w0)
    assert found["c_rms_ratio"] == close(math.sqrt(energy / merged * (naive.weights**2).sum()))


def masked(naive, tau):
    """The updates of a slice that are merged geometrically."""
    if naive.config.conflict is None:
        return tau
    mean = sum(w * t for w, t in zip(naive.weights, tau, strict=True))
    flags = [(t * mean).sum(0) < 0 for t in tau]
    kept = flags if naive.config.conflict.startswith("ca") else [~flag for flag in flags]
    return [t * keep for t, keep in zip(tau, kept, strict=True)]


def angles_of(w0, updates):
    """The largest angle of the rotation of every expert's frame."""
    u0, _, v0 = np.linalg.svd(w0, full_matrices=False)
    for update in updates:
        u, _, v = np.linalg.svd(w0 + update, full_matrices=False)
        u = u * np.where(np.einsum("ik,ik->k", u, u0) + np.einsum("ki,ki->k", v, v0) < 0, -1, 1)
        q = reference.polar(u0.T @ u)
        q[:, -1] *= np.sign(np.linalg.det(q))
        yield np.abs(np.angle(np.linalg.eigvals(q))).max()


def test_audit(suite):
    naive, numbers = suite
    found = numbers["audit"]
    angles = [
        angle
        for n, w0 in naive.w0.items()
        for rows in naive.slices(n, naive.config.spread)
        for angle in angles_of(w0[rows], masked(naive, [t[rows] for t in naive.used[n]]))
    ]
    log = found["rotation_log"]
    assert log["rotations"] == len(angles)
    assert 0 < log["mean_error"] <= log["max_error"] < 1e-13
    assert log["near_pi"] == sum(angle > 3 for angle in angles)
    edges = np.array(log["angles"]["edges"])
    assert (edges[0], edges[-1]) == (close(min(angles), 1e-7), close(max(angles), 1e-7))
    edges[[0, -1]] += [-1e-6, 1e-6]
    assert np.abs(np.histogram(angles, edges)[0] - log["angles"]["counts"]).sum() <= 2
    modes = {naive.config.spread, "variance" if naive.config.spread is None else None}
    assert set(found["condition"]) == {mode or "contiguous" for mode in modes}
    for mode in modes:
        slices = [w0[rows] for n, w0 in naive.w0.items() for rows in naive.slices(n, mode)]
        conditions = [np.linalg.cond(rows) for rows in slices]
        at = found["condition"][mode or "contiguous"]
        assert (at["slices"], at["rank_deficient"]) == (len(conditions), 0)
        assert at["median"] == close(np.median(conditions))
        assert at["p95"] == close(np.percentile(conditions, 95))
        assert at["max"] == close(max(conditions))
        assert sum(at["histogram"]["counts"]) == len(conditions)


def test_ownership(suite):
    naive, numbers = suite
    found = numbers["ownership"]
    owned, rows = [0, 0, 0, 0], 0
    for ts in naive.raw.values():
        for row in range(len(ts[0])):
            sizes = [np.linalg.norm(t[row]) for t in ts]
            owned[int(np.argmax(sizes)) if max(sizes) > 0 else 3] += 1
            rows += 1
    assert owned[3] == 1
    assert list(found["rows"].values()) == close([count / rows for count in owned[:3]])
    assert found["unowned"] == close(1 / rows)
    flat = [np.concatenate([ts[i].ravel() for ts in naive.raw.values()]) for i in range(3)]
    for i, one in enumerate(SIZES):
        for j, other in enumerate(SIZES):
            a, b = flat[i], flat[j]
            assert found["cosine"][one][other] == close(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
            both = (a != 0) & (b != 0)
            assert found["sign_agreement"][one][other] == close((np.sign(a) == np.sign(b))[both].mean())


def test_conflict(suite):
    naive, numbers = suite
    flagged, columns = {}, {}
    by_expert = np.zeros(3)
    for n, ts in naive.used.items():
        layer = n.split(".")[2]
        for rows in naive.slices(n, naive.config.spread):
            mean = sum(w * t[rows] for w, t in zip(naive.weights, ts, strict=True))
            counts = np.array([((t[rows] * mean).sum(0) < 0).sum() for t in ts])
            by_expert += counts
            flagged[layer] = flagged.get(layer, 0) + counts.sum()
            columns[layer] = columns.get(layer, 0) + mean.shape[1]
    found = numbers["conflict"]
    assert found["rate"] == close(by_expert.sum() / 3 / sum(columns.values()))
    assert list(found["by_expert"].values()) == close(list(by_expert / sum(columns.values())))
    assert found["by_layer"] == {k: close(flagged[k] / 3 / columns[k]) for k in flagged}


def test_retention(suite):
    naive, numbers = suite
    for model, merged in naive.merged.items():
        moved, typical = dict.fromkeys(WORDS.values(), 0.0), dict.fromkeys(WORDS.values(), 0.0)
        for n, p in naive.base.named_parameters():
            kind = next(kind for word, kind in WORDS.items() if word in n)
            moved[kind] += ((naive.array(merged.get_parameter(n)) - naive.array(p)) ** 2).sum()
            for expert in naive.experts.values():
                update = naive.array(expert.get_parameter(n)) - naive.array(p)
                typical[kind] += (update**2).sum() / 3
        expected = {kind: math.sqrt(moved[kind] / typical[kind]) for kind in typical}
        assert numbers["retention"][model] == {kind: close(v, 1e-6) for kind, v in expected.items()}
    kinds = {name: at["kind"] for name, at in numbers["matrices"].items()}
    assert kinds == {n: "attention" if "self_attn" in n else "mlp" for n in naive.w0}


def test_retention_is_that_of_the_merge_itself(tmp_path):
    """A folder that was merged keeps what its own report says, and what the diagnosis expects."""
    base = tiny_llama()
    experts = [fine_tuned(base, 0.03, i) for i in range(2)]
    report = CoramMerger(base, experts, CoramConfig(residual="ta"), progress=False).merge_to(tmp_path / "out")
    numbers = diagnose(base, experts, merged=[tmp_path / "out"], progress=False)
    assert numbers["retention"]["out"] == {g: close(v, 1e-5) for g, v in report.retention.items()}
    for at in numbers["matrices"].values():
        assert at["retention"]["out"] == close(numbers["contraction"]["lam"] / at["c_rms"], 1e-5)


@pytest.mark.parametrize("line", ["lr", "DEC(full)"])
def test_a_merged_folder_says_what_the_report_is_about(tmp_path, line):
    base = tiny_llama()
    experts = [fine_tuned(base, 0.03, i) for i in range(2)]
    config = CoramConfig.from_line(line, lam=0.7)
    CoramMerger(base, experts, config, progress=False).merge_to(tmp_path / "out")
    numbers = diagnose(base, experts, merged=[tmp_path / "out"], progress=False)
    assert (numbers["models"]["line"], numbers["dispersion"]["lam"]) == (line, 0.7)
    assert verdict(numbers["dispersion"]).startswith("Merged with lambda 0.7: 2 experts")
    numbers = diagnose(base, experts, CoramConfig(), merged=[tmp_path / "out"], progress=False)
    assert numbers["models"]["line"] == "full"
    assert verdict(numbers["dispersion"]).startswith("Ready to merge with lambda 1.6")


@pytest.mark.parametrize("line", ["full", "DEC(full)"])
def test_the_report_knows_the_merge_by_its_line_and_the_rule_s_lambda(tmp_path, line):
    base = tiny_llama()
    experts = [fine_tuned(base, 0.03, i) for i in range(2)]
    CoramMerger(base, experts, CoramConfig.from_line(line), progress=False).merge_to(tmp_path / "out")
    for config, begins in ((None, "Merged with"), (CoramConfig.from_line("lr"), "Ready to merge with")):
        numbers = diagnose(base, experts, config, merged=[tmp_path / "out"], progress=False)
        assert verdict(numbers["dispersion"]).startswith(begins)


def test_low_rank_experts_are_dissected_as_dense_ones():
    base = tiny_llama()
    adapters = {name: adapted(base, METHODS["rsLoRA"](), seed) for seed, name in enumerate("ab")}
    dense = {name: copy.deepcopy(model).merge_and_unload() for name, model in adapters.items()}
    config = CoramConfig.from_line("DEC(full,ridge)")
    low, full = (diagnose(base, experts, config, progress=False) for experts in (adapters, dense))
    assert low["contraction"]["c_rms"] == close(full["contraction"]["c_rms"], 1e-4)
    assert low["conflict"]["rate"] == close(full["conflict"]["rate"], 1e-2)


def test_random_updates_show_the_pattern_of_the_paper():
    base = tiny_llama(hidden_size=128, intermediate_size=192)
    experts = [fine_tuned(base, 0.004, i, only="_proj") for i in range(5)]
    found = diagnostics.branches(base, experts, progress=False)
    for alone in ("q", "v"):
        assert found[alone]["norm_ratio"] > 0.6
        assert found[alone]["cosine"] < 0.4
    for both in ("lr", "full"):
        assert found[both]["norm_ratio"] < 0.25
        assert found[both]["cosine"] > 0.95
    assert found["s"]["norm_ratio"] < 0.1


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-6])
def test_small_updates_lose_no_digits(size):
    rng = np.random.default_rng(0)
    w0 = with_spectrum(rng, 24, 40, 8, np.linspace(2, 1, 8))
    experts = additive_experts(rng, w0, 3, size)
    found = dissect(*(lambda t: (t[0], t[1:]))(tensors([w0, *experts])), CoramConfig(), factors=[1.0] * 3)
    for branch, square in zip(BRANCHES, found.squares.tolist(), strict=True):
        delta = reference.merge(w0, experts, branch=branch) - w0
        assert square == pytest.approx((delta**2).sum(), rel=1e-12 / size)
    assert found.inner.diagonal().tolist() == close([((e - w0) ** 2).sum() for e in experts], 1e-13)


def test_slices_that_must_be_factored_and_slices_without_a_frame():
    rng = np.random.default_rng(1)
    good = with_spectrum(rng, 8, 40, 8, np.linspace(2, 1, 8))
    bad = with_spectrum(rng, 8, 40, 8, np.geomspace(1, 1e-5, 8))
    experts = multiplicative_experts(rng, np.concatenate([good, bad]), 8, 2, 0.01)
    w0 = np.concatenate([good, bad, np.zeros((8, 40))])
    experts = [np.concatenate([e, rng.standard_normal((8, 40)) * 0.01]) for e in experts]
    base, *others = tensors([w0, *experts])
    found = dissect(base, others, CoramConfig(), factors=[1.0, 1.0])
    task = sum(e - w0 for e in experts)
    for branch, square, dot in zip(BRANCHES, found.squares.tolist(), found.dots.tolist(), strict=True):
        delta = reference.merge(w0, experts, branch=branch) - w0
        assert square == pytest.approx((delta**2).sum(), rel=1e-8)
        assert dot == pytest.approx(
            (delta * task).sum(), abs=1e-8 * np.linalg.norm(delta) * np.linalg.norm(task)
        )
    assert (found.frameless, found.tiny) == (1, 1)
    conditions = torch.cat(found.conditions).tolist()
    assert conditions[:2] == close([2.0, 1e5], 1e-6)
    assert math.isinf(conditions[2])
    assert len(torch.cat(found.errors)) == 4


def test_slices_with_a_tiny_singular_value_are_counted():
    rng = np.random.default_rng(5)
    sizes = [np.linspace(2, 1, 8), np.geomspace(1, 5e-9, 8), np.linspace(2, 1, 8) * 5e-9]
    w0 = np.concatenate([with_spectrum(rng, 8, 40, 8, s) for s in sizes])
    base, expert = tensors([w0, w0 * 1.01])
    found = dissect(base, [expert], CoramConfig(), factors=[1.0])
    assert found.tiny == sum(np.linalg.svd(w0[i : i + 8])[1][-1] < 1e-8 for i in (0, 8, 16)) == 2


def test_a_rotation_near_pi_is_counted_and_survives():
    rng = np.random.default_rng(2)
    w0 = with_spectrum(rng, 8, 40, 8, np.linspace(2, 1, 8))
    u, s, v = np.linalg.svd(w0, full_matrices=False)
    turn = np.eye(8)
    turn[:2, :2] = [[np.cos(3.1), -np.sin(3.1)], [np.sin(3.1), np.cos(3.1)]]
    base, expert = tensors([w0, (u @ turn * s) @ v])
    found = dissect(base, [expert], CoramConfig(), factors=[1.0])
    assert torch.cat(found.angles).tolist() == close([3.1], 1e-10)
    assert float(torch.cat(found.errors)[0]) < 1e-12


def test_a_matrix_narrower_than_a_slice_has_no_frame():
    rng = np.random.default_rng(3)
    w0, *experts = (rng.standard_normal((8, 5)) for _ in range(3))
    base, *others = tensors([w0, *experts])
    found = dissect(base, others, CoramConfig(), factors=[1.0, 1.0])
    mean = sum(experts) / 2 - w0
    assert found.squares.tolist() == close([(mean**2).sum()] * 7)
    assert found.frameless == 1


@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_alone_has_the_same_numbers(section):
    naive = Naive(CoramConfig())
    merged = {"merged": naive.merged} if section == "retention" else {}
    alone = getattr(diagnostics, section)(naive.base, naive.experts, progress=False, **merged)
    whole = diagnose(naive.base, naive.experts, merged=naive.merged, progress=False)
    assert alone == whole[section]


def test_experts_that_did_not_move():
    base = tiny_llama()
    numbers = diagnose(
        base, {"same": copy.deepcopy(base), "moved": fine_tuned(base, 0.02, 0)}, progress=False
    )
    json.dumps(numbers, allow_nan=False)
    assert numbers["dispersion"]["D"] == "inf"
    assert numbers["dispersion"]["kappa"] is None
    assert numbers["ownership"]["cosine"]["same"]["moved"] is None
    assert numbers["ownership"]["rows"] == {"same": 0.0, "moved": 1.0}
    nobody = diagnose(base, {"same": copy.deepcopy(base)}, progress=False)
    still = {"norm_ratio": None, "relative": pytest.approx(0.0, abs=1e-14), "cosine": None}
    assert nobody["branches"]["full"] == still


def test_bad_input_is_named():
    base = tiny_llama()
    broken = fine_tuned(base, 0.02, 0)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    with pytest.raises(CoramError, match=r"'bad', tensor 'model.layers.1.mlp.up_proj.weight'"):
        diagnose(base, {"bad": broken}, progress=False)
    with pytest.raises(CoramError, match="merged model 'bad'"):
        diagnose(base, [fine_tuned(base, 0.02, 1)], merged={"bad": broken}, progress=False)
    with pytest.raises(CoramError, match="among the merged models"):
        diagnose(base, [broken], merged=[tiny_llama(hidden_size=64)], progress=False)
    with pytest.raises(ValueError, match="did you mean 'audit'"):
        diagnose(base, [broken], only=["audits"], progress=False)


def test_places():
    assert list(
        places(
            [
                "encoder.block.0.layer.0.SelfAttention.q.weight",
                "decoder.block.0.layer.0.SelfAttention.q.weight",
                "decoder.block.0.layer.1.EncDecAttention.q.weight",
                "encoder.block.10.layer.1.DenseReluDense.wo.weight",
                "decoder.block.10.layer.2.DenseReluDense.wo.weight",
            ]
        ).values()
    ) == [
        Place("encoder.block.0", "SelfAttention.q"),
        Place("decoder.block.0", "SelfAttention.q"),
        Place("decoder.block.0", "EncDecAttention.q"),
        Place("encoder.block.10", "wo"),
        Place("decoder.block.10", "wo"),
    ]
    assert list(
        places(
            [
                "bert.encoder.layer.0.attention.output.dense.weight",
                "bert.encoder.layer.0.output.dense.weight",
                "h.0.mlp.experts",
                "head.weight",
            ]
        ).values()
    ) == [
        Place("bert.encoder.layer.0", "attention.output.dense"),
        Place("bert.encoder.layer.0", "output.dense"),
        Place("h.0", "experts"),
        Place("", "head"),
    ]
    assert list(places(["model.layers.3.mlp.up_proj.weight"]).values()) == [Place("3", "up_proj")]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_matrix_has_a_place_of_its_own(name):
    with torch.device("meta"):
        model = ARCHITECTURES[name].model(ARCHITECTURES[name].config)
    names = [target.name for target in find_targets(model)]
    assert len(set(places(names).values())) == len(names)


@pytest.mark.slow
def test_all_diagnostics_take_no_more_than_chunks_and_a_few_tensors():
    script = ROOT / "examples" / "benchmarks" / "report.py"
    run = subprocess.run(
        [sys.executable, script, "--rounds", "1"], capture_output=True, text=True, check=True
    )
    *_, peak, bound = map(float, re.findall(r"[\d.]+", run.stdout.strip().splitlines()[-1]))
    assert peak <= bound


def test_weights_change_the_scale_that_c_rms_is_compared_with():
    base = tiny_llama()
    experts = [fine_tuned(base, 0.02, seed) for seed in range(3)]
    found = contraction(base, experts, CoramConfig(weights=(0.7, 0.2, 0.1)), progress=False)
    assert found["sqrt_n"] == pytest.approx(1 / (0.7**2 + 0.2**2 + 0.1**2) ** 0.5)


def test_a_merger_and_its_diagnosis_open_the_inputs_once(tmp_path):
    """The weights stay mapped when their files are replaced; who opens them again finds rubbish."""
    base, experts = on_disk(tmp_path)
    merger = CoramMerger(base, experts, progress=False)
    merger.merge_to(tmp_path / "merged")
    expected = diagnose(base, experts, merged={"CORAM": tmp_path / "merged"}, progress=False)
    for file in (folder / "model.safetensors" for folder in (base, *experts.values())):
        file.unlink()
        file.write_bytes(b"rubbish")
    found = diagnose_inputs(merger.inputs, merged={"CORAM": tmp_path / "merged"}, progress=False)
    assert found["retention"]
    assert {**found, "models": None} == {**expected, "models": None}
