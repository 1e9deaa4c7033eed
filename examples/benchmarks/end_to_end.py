"""Merge the same checkpoints from files to files with coram_hf and with mergekit, and print both.

    python examples/benchmarks/end_to_end.py [--size 0.1B] [--experts 5] [--mergekit PYTHON] [--folder DIR]

PYTHON is an interpreter that has mergekit; by default this one, if it has. The floor is what no merge can
beat: `cat` of all inputs to /dev/null, and one write of the output. Every run has a process of its own, and
starts with the inputs in the page cache; the disk is idle before it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import SIZES, Watch, in_process, machine, make

OURS = ("full", "linear")
THEIRS = ("linear", "ties")
DENSITY = 0.2


def ours(method: str, sources: list[str], out: str) -> dict[str, float]:
    """One merge by coram_hf; opening the checkpoints counts."""
    from coram_hf import CoramMerger
    from coram_hf.baselines import open_merger

    with Watch() as watch:
        if method == "full":
            CoramMerger(sources[0], sources[1:], progress=False).merge_to(out)
        else:
            open_merger(sources[0], sources[1:], method, progress=False).merge_to(out)
    return watch.found()


def theirs(method: str, sources: list[str], out: str) -> dict[str, float]:
    """One merge by mergekit, with lazy reading and its multi-threaded option."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import MergeOptions, run_merge

    weight = {"parameters": {"weight": 1.0 / (len(sources) - 1)}}
    recipe: dict[str, Any] = {"merge_method": method, "dtype": "bfloat16"}
    recipe["models"] = [{"model": source, **weight} for source in sources[1:]]
    if method == "ties":
        recipe |= {"base_model": sources[0], "parameters": {"density": DENSITY, "normalize": True}}
    with Watch() as watch:
        run_merge(
            MergeConfiguration.model_validate(recipe),
            out,
            MergeOptions(lazy_unpickle=True, quiet=True, multi_gpu=False, copy_tokenizer=False),
        )
    return watch.found()


def floor(sources: list[str], folder: Path) -> float:
    """Seconds to read all inputs, and to write as much as one of them holds, to the disk."""
    inputs = [str(path) for source in sources for path in sorted(Path(source).glob("*.safetensors"))]
    size = sum(path.stat().st_size for path in Path(sources[0]).glob("*.safetensors"))
    started = time.perf_counter()
    with open(os.devnull, "wb") as nowhere:
        subprocess.run(["cat", *inputs], stdout=nowhere, check=True)
    block = os.urandom(2**24)
    with open(folder / "floor", "wb") as file:
        for _ in range(size // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    (folder / "floor").unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", default="0.1B", choices=list(SIZES))
    parser.add_argument("--experts", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2, help="the best of so many runs, taken in turn")
    parser.add_argument("--mergekit", help="an interpreter that has mergekit")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--role", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--method", help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.role:
        run = ours if options.role == "ours" else theirs
        print(json.dumps(run(options.method, arguments[:-1], arguments[-1])))
        return

    rival = options.mergekit or (sys.executable if importlib.util.find_spec("mergekit") else None)
    jobs = [("ours", method, sys.executable) for method in OURS]
    jobs += [("theirs", method, rival) for method in THEIRS if rival]
    folder = Path(tempfile.mkdtemp(prefix="coram-bench-", dir=options.folder))
    best: dict[str, dict[str, float]] = {}
    try:
        sources = make(folder, options.size, options.experts)
        lowest = floor(sources, folder)
        for role, method, python in jobs * options.repeats:
            out = folder / "out"
            found = in_process(
                __file__, "--role", role, "--method", method, *sources, str(out), python=str(python)
            )
            os.sync()
            shutil.rmtree(out)
            name = f"{'coram_hf' if role == 'ours' else 'mergekit'} {method}"
            if name not in best or found["seconds"] < best[name]["seconds"]:
                best[name] = found
    finally:
        shutil.rmtree(folder)

    print(f"{options.size}, {options.experts} experts, bf16, files to files; {machine()}\n")
    print("| merge | seconds | CPU s | peak anonymous | read from disk | x coram_hf full | x floor |")
    print("|---|---|---|---|---|---|---|")
    full = best["coram_hf full"]["seconds"]
    for name, found in best.items():
        seconds = found["seconds"]
        print(
            f"| {name} | {seconds:.1f} | {found['cpu']:.1f} | {found['peak'] / 2**20:.0f} MB "
            f"| {found['read'] / 2**20:.0f} MB | {seconds / full:.2f} | {seconds / lowest:.1f} |"
        )
    print(f"| floor: cat and one write | {lowest:.1f} | | | | {lowest / full:.2f} | 1.0 |")
    results = {"size": options.size, "experts": options.experts, "floor_s": lowest, "merges": best}
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
