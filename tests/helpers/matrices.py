"""Matrices with a prescribed spectrum in every contiguous slice, and experts around them."""

import numpy as np
import torch


def with_spectrum(rng, d_out, d_in, h, spectrum):
    """A matrix whose slices of h rows have (the first entries of) the given singular values."""
    rows = []
    for start in range(0, d_out, h):
        n = min(h, d_out - start)
        u = np.linalg.qr(rng.standard_normal((n, n)))[0]
        v = np.linalg.qr(rng.standard_normal((d_in, n)))[0]
        rows.append(u * np.asarray(spectrum)[:n] @ v.T)
    return np.concatenate(rows)


def additive_experts(rng, w0, n, size=0.02):
    """W_0 plus noise, with sizes that differ from expert to expert and from row to row."""
    row_size = size * np.exp(rng.standard_normal((n, w0.shape[0], 1)) / 2)
    scale = np.linalg.norm(w0) / np.sqrt(w0.size)
    return [w0 + scale * s * rng.standard_normal(w0.shape) for s in row_size]


def multiplicative_experts(rng, w0, h, n, size=0.02):
    """(I + A) W_0 (I + B) slice by slice, which keeps the condition number of every slice."""
    d_in = w0.shape[1]
    experts = []
    for _ in range(n):
        right = np.eye(d_in) + size * rng.standard_normal((d_in, d_in)) / np.sqrt(d_in)
        blocks = [w0[s : s + h] for s in range(0, len(w0), h)]
        lefts = [np.eye(len(b)) + size * rng.standard_normal((len(b), len(b))) for b in blocks]
        experts.append(np.concatenate([left @ b @ right for left, b in zip(lefts, blocks, strict=True)]))
    return experts


def tensors(arrays, dtype=torch.float64):
    return [torch.from_numpy(np.ascontiguousarray(a)).to(dtype) for a in arrays]


def relative_error(found, expected, w0):
    """|found - expected| relative to the norm of the update, or to |W_0| where there is no update."""
    update, error = np.linalg.norm(expected - w0), np.linalg.norm(np.asarray(found) - expected)
    return error / (update if update > 1e-12 * np.linalg.norm(w0) else np.linalg.norm(w0))
