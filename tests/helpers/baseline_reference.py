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
    rotated = w0 @ (eye + a) @ np.linalg.inv(eye - a)
    return rotated + residual_merge(np.zeros_like(w0), left_over, residual, scale)
