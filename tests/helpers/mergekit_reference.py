"""The methods of mergekit in numpy, written from their definitions; returns W, not the update."""

import numpy as np


def norm_kept(tau, kept):
    return kept * np.abs(tau).sum() / np.abs(kept).sum()


def combine(w0, taus, weights, consensus, normalize, scale=1.0):
    weighted = [w * t for w, t in zip(weights, taus, strict=True)]
    if not consensus:
        return w0 + scale * sum(weighted) / (sum(weights) if normalize else 1.0)
    winner = np.where(sum(weighted) >= 0, 1, -1)
    agree = [np.sign(t) == winner for t in weighted]
    total = sum(t * a for t, a in zip(weighted, agree, strict=True))
    below = sum(w * a for w, a in zip(weights, agree, strict=True))
    return w0 + scale * total / (np.where(below == 0, 1, below) if normalize else 1.0)


def dare_linear(w0, experts, draws, drop, weights, by_norm=False, normalize=False):
    kept = [np.where(d >= drop, e - w0, 0) for e, d in zip(experts, draws, strict=True)]
    taus = [norm_kept(e - w0, k) if by_norm else k / (1 - drop) for e, k in zip(experts, kept, strict=True)]
    return combine(w0, taus, weights, False, normalize)


def della(w0, experts, draws, density, epsilon, weights, consensus, normalize):
    taus = []
    for e, d in zip(experts, draws, strict=True):
        tau = e - w0
        rows, drawn = tau.reshape(-1, tau.shape[-1]), d.reshape(-1, tau.shape[-1])
        kept = np.zeros_like(rows)
        for r, row in enumerate(rows):
            for rank, c in enumerate(sorted(range(len(row)), key=lambda c: abs(row[c]))):
                chance = density - epsilon + 2 * epsilon * rank / (len(row) - 1)
                kept[r, c] = row[c] if drawn[r, c] >= 1 - chance else 0
        taus.append(norm_kept(tau, kept.reshape(tau.shape)))
    return combine(w0, taus, weights, consensus, normalize)


def breadcrumbs(w0, experts, density, gamma, weights, consensus=False):
    taus = []
    for e in experts:
        tau = (e - w0).flatten()
        order = sorted(range(len(tau)), key=lambda k: abs(tau[k]))
        keep, top = int(density * len(tau)), int(gamma * len(tau))
        start = max(0, len(tau) - keep - top)
        mask = np.zeros(len(tau))
        mask[order[start : start + keep]] = 1
        taus.append((tau * mask).reshape(w0.shape))
    return combine(w0, taus, weights, consensus, False)


def sce(w0, experts, share):
    taus = np.stack([e - w0 for e in experts])
    if share < 1:
        variance = taus.var(axis=0).flatten()
        count = int(np.count_nonzero(variance) * share)
        mask = np.zeros(variance.size)
        mask[np.argsort(-variance)[:count]] = 1
        taus = taus * mask.reshape(w0.shape)
    energy = [np.mean(t**2) for t in taus]
    winner = np.where(taus.sum(axis=0) >= 0, 1, -1)
    top = sum(g * t * (np.sign(t) == winner) for g, t in zip(energy, taus, strict=True))
    below = sum(g * (np.sign(t) == winner) for g, t in zip(energy, taus, strict=True))
    return w0 + np.where(below > 0, top / np.where(below > 0, below, 1), 0)


def angle(a, b):
    return np.arccos(np.clip(np.sum(a * b) / np.linalg.norm(a) / np.linalg.norm(b), -1, 1))


def arc(a, b, t):
    x = angle(a, b)
    return (np.sin((1 - t) * x) * a + np.sin(t * x) * b) / np.sin(x)


def slerp(w0, experts, t):
    parallel = np.cos(angle(w0, experts[0])) > 0.9995
    return (1 - t) * w0 + t * experts[0] if parallel else arc(w0, experts[0], t)


def nuslerp(w0, experts, t, along="tensor", of="updates"):
    a, b = (e - w0 for e in experts) if of == "updates" else experts
    if along == "tensor" or w0.ndim < 2:
        merged = arc(a, b, t)
    else:
        axis = a.ndim - 1 if along == "rows" else 0
        pairs = zip(np.moveaxis(a, axis, -1).reshape(-1, a.shape[axis]),
                    np.moveaxis(b, axis, -1).reshape(-1, a.shape[axis]), strict=True)  # fmt: skip
        moved = np.stack([arc(x, y, t) for x, y in pairs]).reshape(np.moveaxis(a, axis, -1).shape)
        merged = np.moveaxis(moved, -1, axis)
    return w0 + merged if of == "updates" else merged


def karcher(w0, experts, weights):
    """By gradient descent with many small steps, where the method takes few large ones."""
    units = [e / np.linalg.norm(e) for e in experts]
    mean = units[0]
    for _ in range(400):
        step = sum(
            w * (x / np.sin(x) if (x := angle(mean, u)) > 1e-12 else 1) * (u - np.sum(mean * u) * mean)
            for w, u in zip(weights, units, strict=True)
        )
        mean = mean + 0.5 * step
        mean = mean / np.linalg.norm(mean)
    return mean * sum(w * np.linalg.norm(e) for w, e in zip(weights, experts, strict=True))


def model_stock(w0, experts, filter_wise):
    n = len(experts)
    shape = (-1, w0.shape[-1]) if filter_wise else (1, -1)
    rows = [(e - w0).reshape(shape) for e in experts]
    out = np.zeros_like(rows[0])
    for r in range(len(out)):
        pairs = [(i, j) for i in range(n) for j in range(i)]
        c = np.mean([np.cos(angle(rows[i][r], rows[j][r])) for i, j in pairs])
        out[r] = n * c / (1 + (n - 1) * c) * np.mean([row[r] for row in rows], axis=0)
    return w0 + out.reshape(w0.shape)


def arcee_fusion(w0, experts):
    def softmax(w):
        z = np.exp(w - w.max(axis=-1, keepdims=True))
        return z / z.sum(axis=-1, keepdims=True) + 1e-8

    tau, p, q = experts[0] - w0, softmax(experts[0]), softmax(w0)
    score = np.abs(tau) * np.sum(p * np.log(p / q), axis=-1, keepdims=True)
    ordered = np.sort(score, axis=None)
    low, middle, high = (ordered[int(s * (ordered.size - 1))] for s in (0.25, 0.5, 0.75))
    return w0 + np.where(score >= middle + 1.5 * (high - low), tau, 0)
