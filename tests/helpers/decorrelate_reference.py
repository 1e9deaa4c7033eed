"""Decorrelation written naively in numpy from its definition; shares no code with the package."""

import numpy as np


def polar(a):
    """The polar factor on the range of `a`."""
    u, s, vt = np.linalg.svd(a, full_matrices=False)
    kept = s > 1e-9 * s.max(initial=0)
    return u[:, kept] @ vt[kept]


def tsv(taus, tolerance=1e-12):
    if len(taus) == 1:
        return taus
    k = max(1, int(min(taus[0].shape) / len(taus)))
    parts = []
    for tau in taus:
        u, s, vt = np.linalg.svd(tau, full_matrices=False)
        kept = [j for j in range(min(k, len(s))) if s[j] > tolerance * s[0]]
        parts.append((u[:, kept], s[kept], vt[kept].T))
    if not sum(len(s) for _, s, _ in parts):
        return [np.zeros_like(tau) for tau in taus]
    u, v = (polar(np.concatenate([part[side] for part in parts], axis=1)) for side in (0, 2))
    ends = np.cumsum([len(s) for _, s, _ in parts])
    return [
        u[:, end - len(s) : end] @ np.diag(s) @ v[:, end - len(s) : end].T
        for end, (_, s, _) in zip(ends, parts, strict=True)
    ]


def ridge(taus, eta=0.1):
    if len(taus) == 1:
        return taus
    grams = [tau.T @ tau / max(np.linalg.norm(tau) ** 2, 1e-300) for tau in taus]
    total = sum(grams)
    top = np.linalg.eigvalsh(total).max()
    if top <= 0:
        return taus
    inverse = np.linalg.inv(total + eta * top * np.eye(len(total)))
    return [len(taus) * tau @ gram @ inverse for tau, gram in zip(taus, grams, strict=True)]


def wudi(taus):
    """Eigenvectors one by one: on each leading one, an expert keeps the share of its own G_i."""
    if len(taus) == 1 or not any(tau.any() for tau in taus):
        return taus
    grams = [tau.T @ tau / max(np.linalg.norm(tau) ** 2, 1e-300) for tau in taus]
    values, vectors = np.linalg.eigh(sum(grams))
    values = np.where(values > 1e-13 * values.max(), values, 0.0)
    rank = int(np.ceil(np.sqrt(values).sum() ** 2 / values.sum() - 1e-6))
    found = [tau.copy() for tau in taus]
    for value, e in list(zip(values, vectors.T, strict=True))[::-1][:rank]:
        for tau, gram, out in zip(taus, grams, found, strict=True):
            out += np.outer(tau @ (gram @ e) / value - tau @ e, e)
    return found


def auto(taus):
    k = max(1, int(min(taus[0].shape) / len(taus)))
    for tau in taus:
        squares = np.linalg.svd(tau, compute_uv=False) ** 2
        if squares[:k].sum() < 0.99 * squares.sum():
            return wudi(taus)
    return tsv(taus)


WAYS = {"tsv": tsv, "ridge": ridge, "wudi": wudi, "auto": auto}


def overlap(taus):
    """The mean over pairs of <G_i, G_j> / (|G_i| |G_j|), with G = tau^T tau."""
    grams = [tau.T @ tau for tau in taus]
    pairs = [
        np.sum(a * b) / (np.linalg.norm(a) * np.linalg.norm(b))
        for i, a in enumerate(grams)
        for b in grams[:i]
    ]
    return np.mean(pairs)
