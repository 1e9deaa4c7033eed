"""CORAM written naively in numpy and scipy, one slice at a time; shares no code with the package."""

import numpy as np
import scipy.linalg


def polar(a):
    u, _, vt = np.linalg.svd(a, full_matrices=False)
    return u @ vt


def rank_deficient(w):
    s = np.linalg.svd(w, compute_uv=False)
    return w.shape[1] < w.shape[0] or s[-1] <= 1e-10 * s[0]


_FACTORS = {}


def merged_factors(w0, experts, weights):
    """(U0, S0, V0^T) and (Qbar, dSbar, Vbar^T) of one slice; remembered, since every branch needs them."""
    key = tuple(a.tobytes() for a in (w0, *experts, np.asarray(weights))) + w0.shape
    if key in _FACTORS:
        return _FACTORS[key]
    h = w0.shape[0]
    u0, s0, v0t = np.linalg.svd(w0, full_matrices=False)
    log_sum, ds_sum, v_sum = np.zeros((h, h)), np.zeros(h), np.zeros_like(v0t)
    for weight, expert in zip(weights, experts, strict=True):
        u, s, vt = np.linalg.svd(expert, full_matrices=False)
        for k in range(h):
            if u[:, k] @ u0[:, k] + vt[k] @ v0t[k] < 0:
                u[:, k] *= -1
                vt[k] *= -1
        q = polar(u0.T @ u)
        if np.linalg.det(q) < 0:
            q[:, -1] *= -1
        log_q = np.real(scipy.linalg.logm(q))
        log_sum += weight * (log_q - log_q.T) / 2
        ds_sum += weight * (s / np.maximum(s0, 1e-12) - 1)
        v_sum += weight * vt
    _FACTORS[key] = (u0, s0, v0t), (polar(scipy.linalg.expm(log_sum)), ds_sum, polar(v_sum))
    return _FACTORS[key]


def merge_slice(w0, experts, weights, branch):
    """W_merge of one slice."""
    if rank_deficient(w0) or any(rank_deficient(w) for w in experts):
        return w0 + sum(w * (e - w0) for w, e in zip(weights, experts, strict=True))
    (u0, s0, v0t), (q_bar, ds_bar, v_bar_t) = merged_factors(w0, experts, weights)
    factors = {"full": "qsv", "lr": "qv"}.get(branch, branch)
    q_bar = q_bar if "q" in factors else np.eye(len(s0))
    ds_bar = ds_bar if "s" in factors else 0.0
    v_bar_t = v_bar_t if "v" in factors else v0t
    return u0 @ q_bar @ np.diag(s0 * (1 + ds_bar)) @ v_bar_t


def merge_with_conflicts(w0, experts, weights, branch, conflict):
    if conflict is None:
        return merge_slice(w0, experts, weights, branch)
    taus = [e - w0 for e in experts]
    mean = sum(w * t for w, t in zip(weights, taus, strict=True))
    kept, dropped = [], []
    for tau in taus:
        flagged = np.array([tau[:, j] @ mean[:, j] < 0 for j in range(tau.shape[1])])
        keep = flagged if conflict.split("+")[0] == "ca" else ~flagged
        kept.append(np.where(keep, tau, 0.0))
        dropped.append(np.where(keep, 0.0, tau))
    merged = merge_slice(w0, [w0 + k for k in kept], weights, branch)
    if conflict.endswith("+ave"):
        merged = merged + sum(w * d for w, d in zip(weights, dropped, strict=True))
    return merged


def slice_rows(w0, experts, mode, h):
    """Lists of row numbers, one list a slice, the short slice last."""
    d_out = w0.shape[0]
    n_slices = d_out // h
    if mode is None:
        return [list(range(start, min(start + h, d_out))) for start in range(0, d_out, h)]
    s = np.array(
        [[np.linalg.norm(e[r] - w0[r]) / np.linalg.norm(w0[r]) for r in range(d_out)] for e in experts]
    )
    ordered = np.sort(s, axis=0)[::-1]
    first, second = ordered[0], ordered[1] if len(experts) > 1 else np.zeros(d_out)
    priority = {
        "mean": s.mean(axis=0),
        "energy": first,
        "variance": s.var(axis=0) * first,
        "owner": (first - second) * first,
        "margin": (first - second) * first,
    }[mode]
    ranking = sorted(range(d_out), key=lambda r: -priority[r])
    slices = [[] for _ in range(n_slices)]
    dealt = ranking[: n_slices * h]
    if mode == "owner":
        loads = [0.0] * n_slices
        for row in dealt:
            owner = s[:, row].argmax()

            def key(g, owner=owner):
                same_owner = sum(s[:, other].argmax() == owner for other in slices[g])
                return (loads[g], same_owner, g)

            best = min((g for g in range(n_slices) if len(slices[g]) < h), key=key)
            slices[best].append(row)
            loads[best] += priority[row]
    else:
        for rank, row in enumerate(dealt):
            slices[rank % n_slices].append(row)
    left_over = ranking[n_slices * h :]
    return slices + ([left_over] if left_over else [])


def merge(w0, experts, *, h=8, branch="full", conflict=None, spread=None, weights=None):
    """W_merge of one matrix."""
    weights = (
        np.full(len(experts), 1 / len(experts)) if weights is None else np.asarray(weights) / np.sum(weights)
    )
    merged = np.empty_like(w0)
    for rows in slice_rows(w0, experts, spread, h):
        merged[rows] = merge_with_conflicts(w0[rows], [e[rows] for e in experts], weights, branch, conflict)
    return merged
