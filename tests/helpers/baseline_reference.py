"""The baseline methods in numpy, written from their definitions; returns W, not the update."""

import numpy as np


def svd(a):
    u, s, vt = np.linalg.svd(a, full_matrices=False)
    return u, s, vt.T


def polar(a):
    u, _, v = svd(a)
    return u @ v.T


def linear(w0, experts, weights=None, normalize=True):
    w = np.ones(len(experts)) / len(experts) if weights is None else np.array(weights, dtype=float)
    if normalize:
        w = w / w.sum()
    return sum(wi * e for wi, e in zip(w, experts, strict=True))


def task_arithmetic(w0, experts, scale=0.4):
    return w0 + scale * sum(e - w0 for e in experts)


def keep_top(tau, density):
    k = max(1, int(density * tau.size))
    cut = np.sort(np.abs(tau), axis=None)[-k]
    return np.where(np.abs(tau) >= cut, tau, 0.0)


def elect(taus, combine, sign, weights):
    out = np.zeros_like(taus[0])
    for index in np.ndindex(out.shape):
        values = [t[index] for t in taus]
        votes = values if sign == "sum" else [np.sign(v) for v in values]
        winner = 1 if sum(w * v for w, v in zip(weights, votes, strict=True)) >= 0 else -1
        pairs = [(w, v) for w, v in zip(weights, values, strict=True) if v * winner > 0]
        if pairs:
            total = sum(w * v for w, v in pairs)
            out[index] = total / sum(w for w, _ in pairs) if combine == "mean" else total * len(taus)
    return out


def uniform(experts):
    return np.ones(len(experts)) / len(experts)


def ties(w0, experts, density=0.2, scale=1.0, combine="mean", sign="sum", weights=None):
    w = uniform(experts) if weights is None else np.array(weights) / np.sum(weights)
    taus = [keep_top(e - w0, density) for e in experts]
    return w0 + scale * elect(taus, combine, sign, w)


def dare_ties(w0, experts, masks, drop=0.9, scale=1.0, rescale=True, combine="mean"):
    taus = [(e - w0) * m / ((1 - drop) if rescale else 1) for e, m in zip(experts, masks, strict=True)]
    return w0 + scale * elect(taus, combine, "sum", uniform(experts))


def tsvm(w0, experts, scale=1.0, rank=None):
    if w0.ndim != 2:
        return w0 + scale * sum(e - w0 for e in experts) / len(experts)
    k = rank or max(1, int(min(w0.shape) / len(experts)))
    parts = [svd(e - w0) for e in experts]
    u = np.concatenate([u[:, :k] for u, _, _ in parts], axis=1)
    s = np.concatenate([s[:k] for _, s, _ in parts])
    v = np.concatenate([v[:, :k] for _, _, v in parts], axis=1)
    return w0 + scale * polar(u) @ np.diag(s) @ polar(v).T


def iso_c(w0, experts, scale=1.0):
    if w0.ndim != 2:
        return w0 + scale * sum(e - w0 for e in experts) / len(experts)
    u, s, v = svd(sum(e - w0 for e in experts))
    return w0 + scale * s.mean() * u @ v.T


def wudi(w0, experts, scale=1.0):
    if w0.ndim != 2:
        return w0 + scale * sum(e - w0 for e in experts) / len(experts)
    taus = [e - w0 for e in experts]
    c = sum(t.T @ t / np.sum(t * t) for t in taus)
    d = sum(t @ t.T @ t / np.sum(t * t) for t in taus)
    u, s, _ = svd(c)
    k = int(np.ceil(np.sum(np.sqrt(s)) ** 2 / np.sum(s)))
    e = u[:, :k]
    projector = e @ e.T
    return w0 + scale * (sum(taus) @ (np.eye(len(c)) - projector) + d @ e @ np.diag(1 / s[:k]) @ e.T)


def ace(w0, experts, scale=1.0, eps=1e-2, fraction=0.3, weights=None):
    """Written from the paper's code, entry by entry where it broadcasts."""
    if w0.ndim != 2:
        return w0 + scale * (linear(w0, experts, weights) - w0)
    n, w = w0.shape[1], np.ones(len(experts)) if weights is None else np.array(weights, dtype=float)
    w = w * len(experts) / w.sum()
    taus = [e - w0 for e in experts]
    logs = np.log([np.trace(t.T @ t) + 1e-12 for t in taus])
    uneven = len(logs) > 1 and np.var(logs, ddof=1) / (np.mean(logs) ** 2 + 1e-12) > 0.3
    numerator, denominator, covariances = np.zeros_like(w0), np.zeros((n, n)), []
    for wi, t in zip(w, taus, strict=True):
        centred = t - np.ones((len(t), 1)) @ t.mean(axis=0, keepdims=True)
        s = centred.T @ centred
        size = np.trace(s) + 1e-12 if uneven else 1.0
        covariances.append(s / size)
        regular = s / size + eps / size * np.eye(n)
        numerator += wi * centred @ regular
        denominator += wi * regular
    prior = sum(wi * s for wi, s in zip(w, covariances, strict=True)).mean(axis=0)
    if uneven:
        prior = prior / (np.mean([np.sum(t * t) for t in taus]) + 1e-12)
    delta = numerator @ np.linalg.inv(denominator + np.ones((n, 1)) * prior[None, :])
    if uneven:
        mean = denominator / len(taus)
        fused = delta + sum(wi * t @ (s - mean) for wi, t, s in zip(w, taus, covariances, strict=True))
        u, s, v = svd(fused)
        k = int(len(s) * fraction)
        if k:
            delta = delta + s[:k].mean() * u[:, :k] @ v[:, :k].T
    return w0 + scale * delta


def residual_merge(w0, experts, residual, scale):
    scale = 1.0 if scale is None else scale
    if residual == "ta":
        return w0 + scale * (linear(w0, experts) - w0)
    return {"ties": ties, "tsvm": tsvm}[residual](w0, experts, scale=scale)


def procrustes(w0, target):
    """Polar factor of W0^T T, completed on the null spaces by the rotation closest to the identity.

    A reflection has no Cayley transform, so the direction of the least singular value is turned (Kabsch).
    """
    u, s, vt = np.linalg.svd(w0.T @ target)
    rank = int((s > 1e-12 * s[0]).sum())
    x, y, x_null, y_null = u[:, :rank], vt[:rank].T, u[:, rank:], vt[rank:].T
    r = x @ y.T
    if rank < len(s):
        r = r + x_null @ polar(x_null.T @ y_null) @ y_null.T
    return r if np.linalg.det(r) > 0 else r - 2 * np.outer(x[:, -1], y[:, -1])


def orthomerge(w0, experts, residual="ta", conflict=False, scale=None):
    if w0.ndim != 2:
        return residual_merge(w0, experts, residual, scale)
    rotated, left_over = turned(w0, experts, conflict)
    return rotated + residual_merge(np.zeros_like(w0), left_over, residual, scale)


def turned(w0, experts, conflict):
    """OrthoMerge's W_0 R, and what the rotation of every expert leaves over."""
    eye = np.eye(w0.shape[1])
    mean = sum(e - w0 for e in experts) / len(experts)
    generators, left_over = [], []
    for e in experts:
        target = e
        if conflict:
            opposed = np.array([(e - w0)[r] @ mean[r] < 0 for r in range(len(w0))])
            target = w0 + np.where(opposed[:, None], e - w0, 0.0)
        r = procrustes(w0, target)
        generators.append((r - eye) @ np.linalg.inv(r + eye))
        left_over.append(e - w0 @ r)
    total = sum(generators)
    size = np.linalg.norm(total)
    magnitude = np.mean([np.linalg.norm(a) for a in generators])
    a = total * magnitude / size if size else total
    return w0 @ (eye + a) @ np.linalg.inv(eye - a), left_over
