"""Merge checkpoints from files to files, and print time and memory beside the kernel alone.

    python examples/benchmarks/streaming.py [--sizes 0.3B 1B] [--experts 3] [--folder DIR]

Llama-shaped bf16 checkpoints of random weights are made in the folder (10 GB for 1B), merged in a process of
their own whose anonymous memory is sampled, and compared with the time of the geometry alone on the same
matrices, in the page cache. `told` is what `--dry-run` says of time and memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

from common import SIZES, Watch, in_process, make


def merge(sources: list[str], out: str) -> dict[str, float]:
    """The merge from files to files."""
    from coram_hf import CoramMerger

    with Watch() as watch:
        CoramMerger(sources[0], sources[1:], progress=False).merge_to(out, max_shard_size="1GB")
    return watch.found()


def told(sources: list[str], out: str) -> dict[str, float]:
    """What a dry run says beforehand."""
    from coram_hf import CoramMerger

    merger = CoramMerger(sources[0], sources[1:], progress=False)
    _, memory = merger.requirements("1GB")
    return {"seconds": merger.forecast(out).seconds, "memory": memory}


def kernel(sources: list[str]) -> dict[str, float]:
    """The geometry alone, on the same matrices, read once before."""
    from coram_hf import CoramConfig, CoramMerger
    from coram_hf.geometry import merge_rows

    inputs = CoramMerger(sources[0], sources[1:], progress=False).inputs
    total, largest = 0.0, 0
    for name in inputs.base:
        tensor = inputs.base.original(name)
        largest = max(largest, tensor.numel() * tensor.element_size())
    for name in inputs.targets:
        parameter = inputs.parameter(name)
        base, experts = parameter.base, parameter.experts
        for tensor in (base, *experts):
            tensor.float().sum()
        started = time.perf_counter()
        for _ in merge_rows(base, experts, CoramConfig()):
            pass
        total += time.perf_counter() - started
    return {"seconds": total, "largest": largest}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["0.3B", "1B"], choices=list(SIZES))
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--role", choices=["merge", "told", "kernel"], help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.role:
        run = {"merge": merge, "told": told}.get(options.role)
        found = kernel(arguments) if run is None else run(arguments[:-1], arguments[-1])
        print(json.dumps(found))
        return
    print("| size | merge | told | kernel | merge / kernel | peak anonymous | told | largest tensor |")
    print("|---" * 8 + "|")
    results = {}
    for size in options.sizes:
        folder = Path(tempfile.mkdtemp(prefix="coram-bench-", dir=options.folder))
        try:
            sources = make(folder, size, options.experts)
            alone = in_process(__file__, "--role", "kernel", *sources)
            before = in_process(__file__, "--role", "told", *sources, str(folder / "out"))
            whole = in_process(__file__, "--role", "merge", *sources, str(folder / "out"))
        finally:
            shutil.rmtree(folder)
        print(
            f"| {size} | {whole['seconds']:.1f} s | {before['seconds']:.1f} s | {alone['seconds']:.1f} s "
            f"| {whole['seconds'] / alone['seconds']:.2f} | {whole['peak'] / 2**20:.0f} MB "
            f"| {before['memory'] / 2**20:.0f} MB | {alone['largest'] / 2**20:.0f} MB |",
            flush=True,
        )
        results[size] = {"merge": whole, "told": before, "kernel": alone}
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
