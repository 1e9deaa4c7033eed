"""Time and memory of the slice kernel beside a batched float64-SVD implementation and a plain mean.

    python examples/benchmarks/kernel.py [--size 4096] [--experts 5] [--height 8] [--threads 2]

All have the same bfloat16 matrices in the same run, and the kernel runs in both its precisions. The mean is
that of base and experts, summed in float32 a few rows at a time: about what it takes to go through the
matrices once.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from common import a_core_each
from torch import Tensor

from coram_hf import CoramConfig
from coram_hf.geometry import merge_update
from coram_hf.geometry.cores import one_core as one_core_only

ComputeDtype = Literal["float64", "float32"]
DTYPES: tuple[ComputeDtype, ...] = ("float64", "float32")
VARIANTS = (
    "full",
    "lr",
    "nca",
    "nca+ave",
    "ca+ave",
    "SS(full,mean)",
    "SS(full,owner)",
    "SS(ca+ave,variance)",
)


def svd_merge(base: Tensor, experts: list[Tensor], height: int) -> Tensor:
    """W_merge - W_0 of the line `full` as one would first write it: float64 SVDs of all slices."""

    def factors(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.linalg.svd(matrix.double().view(-1, height, matrix.shape[1]), full_matrices=False)

    u0, s0, v0 = factors(base)
    log_sum, shift_sum, v_sum = 0, 0, 0
    for expert in experts:
        u, s, v = factors(expert)
        sign = torch.where((u * u0).sum(-2) + (v * v0).sum(-1) < 0, -1.0, 1.0).double()
        u, v = u * sign.unsqueeze(-2), v * sign.unsqueeze(-1)
        a, _, b = torch.linalg.svd(u0.mT @ u)
        q = a @ b
        q[..., -1] *= torch.linalg.det(q).sign().unsqueeze(-1)
        values, vectors = torch.linalg.eig(q)
        log = (vectors * values.log().unsqueeze(-2)) @ torch.linalg.inv(vectors)
        log_sum = log_sum + (log.real - log.real.mT) / 2
        shift_sum = shift_sum + s / s0 - 1
        v_sum = v_sum + v
    a, _, b = torch.linalg.svd(torch.linalg.matrix_exp(log_sum / len(experts)))
    c, _, d = torch.linalg.svd(v_sum / len(experts), full_matrices=False)
    merged = (u0 @ a @ b) * (s0 * (1 + shift_sum / len(experts))).unsqueeze(-2) @ (c @ d)
    return merged.view(base.shape) - base.double()


def chunked_mean(matrices: list[Tensor], rows: int = 64) -> Tensor:
    """The mean of the matrices, in row blocks that stay in a cache."""
    mean = torch.empty_like(matrices[0])
    for block in range(0, len(mean), rows):
        total = matrices[0][block : block + rows].float()
        for matrix in matrices[1:]:
            total += matrix[block : block + rows]
        mean[block : block + rows] = total.div_(len(matrices))
    return mean


def best_time(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


class Best(dict[str, float]):
    """The least time of every implementation."""

    def note(self, name: str, seconds: float) -> None:
        self[name] = min(seconds, self.get(name, seconds))


def relative(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|."""
    return float((found - expected).norm() / expected.norm())


def peak_extra_bytes(run: Callable[[], Tensor]) -> int:
    """Growth of resident anonymous memory during `run`, less the tensor that it returns."""

    def anonymous() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    start, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = run()
    finally:
        done.set()
        watcher.join()
    return max(0, peak - start - result.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=5)
    parser.add_argument("--height", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    base = (0.02 * torch.randn(args.size, args.size)).bfloat16()
    experts = [
        (base + 0.0006 * torch.randn_like(base, dtype=torch.float32)).bfloat16() for _ in range(args.experts)
    ]
    configs = {
        line: CoramConfig.from_line(line if args.height == 8 else f"{line} (h={args.height})")
        for line in VARIANTS
    }

    def ours(line: str, dtype: ComputeDtype, out: Tensor | None = None) -> Tensor:
        return merge_update(base, experts, replace(configs[line], compute_dtype=dtype), out=out)[0]

    rival_update = svd_merge(base, experts, args.height)
    found = {dtype: ours("full", dtype, torch.empty(base.shape, dtype=torch.float64)) for dtype in DTYPES}
    differences = {dtype: relative(update, rival_update) for dtype, update in found.items()}
    between = relative(found["float32"], found["float64"])
    del found, rival_update
    extra = max(
        peak_extra_bytes(lambda line=line, dtype=dtype: ours(line, dtype))
        for line in VARIANTS
        for dtype in DTYPES
    )
    _, stats = merge_update(base, experts, replace(configs["full"], compute_dtype="float32"))

    one_core, all_cores, each = Best(), Best(), Best()
    updates = [torch.empty(base.shape) for _ in range(args.threads)]
    runs: dict[str, Callable[[Tensor | None], object]] = {
        "mean": lambda out: chunked_mean([base, *experts]),
        **{dtype: (lambda out, dtype=dtype: ours("full", dtype, out)) for dtype in DTYPES},
    }
    for _ in range(args.repeats):
        all_cores.note("svd", best_time(lambda: svd_merge(base, experts, args.height), 1))
        for name, run in runs.items():
            all_cores.note(name, best_time(partial(run, None), 2))
            each.note(name, a_core_each(run, updates))
            with one_core_only():
                one_core.note(name, best_time(partial(run, updates[0]), 2))
    print(
        f"{args.size} x {args.size} bfloat16, N = {args.experts}, h = {args.height}, {args.threads} threads\n"
    )
    print(
        "| implementation | one core, s | all cores, s | a matrix a core, s | times the mean | difference |"
    )
    print("|---|---|---|---|---|---|")
    print(f"| batched float64 SVD | | {all_cores['svd']:.2f} | | | |")
    for dtype in DTYPES:
        ratio = each[dtype] / each["mean"]
        print(
            f"| coram_hf, {dtype} | {one_core[dtype]:.2f} | {all_cores[dtype]:.2f} | {each[dtype]:.2f} | "
            f"{ratio:.1f} | {differences[dtype]:.1e} |"
        )
    print(
        f"| chunked mean | {one_core['mean']:.3f} | {all_cores['mean']:.3f} | {each['mean']:.3f} | 1.0 | |\n"
    )
    print(
        "The ratio to the mean is that of a matrix a core, as merges run; the difference is that of the\n"
        f"update to the SVD's, relative to its norm. float32 differs from float64 by {between:.1e}, with "
        f"{stats.float64_fallbacks} of\n{stats.slices} slices in float64.\n"
    )
    print(f"peak memory of a merge beyond inputs and output, any line: {extra / 2**20:.0f} MB\n")

    times = {line: float("inf") for line in VARIANTS}
    for _ in range(3 * args.repeats):
        for line in VARIANTS:
            times[line] = min(times[line], best_time(lambda line=line: ours(line, "float32"), 1))
    print("| line, in float32 | seconds | ratio to full |\n|---|---|---|")
    for line, seconds in times.items():
        print(f"| `{line}` | {seconds:.2f} | {seconds / times['full']:.2f} |")
    results = {
        "one_core_s": one_core,
        "all_cores_s": all_cores,
        "a_core_each_s": each,
        "difference_to_svd": differences,
        "float32_to_float64": between,
        "float64_fallbacks": stats.float64_fallbacks,
        "peak_extra_mb": extra / 2**20,
        "lines_s": times,
        "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
