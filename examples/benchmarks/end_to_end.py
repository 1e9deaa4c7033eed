"""Merge the same checkpoints with `coram-hf merge` and `mergekit-yaml`, as commands, and print both.

    python examples/benchmarks/end_to_end.py [--size 0.1B] [--methods full linear ties] [--processes]

Times are those of whole commands, the start of Python included: the best of several runs, taken in turn; one
that takes over a minute is not repeated. `full` is CORAM's, and has mergekit's linear average beside it. The
floor is what no merge can beat: `cat` of all inputs to /dev/null, and one write of the output. The inputs are
in the page cache, and the disk is idle before every run. With `--processes`, `full` is also merged by two
processes of one thread, which must write the same tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from common import SIZES, beside_python, machine, make, run_command

METHODS = ("full", "linear", "task_arithmetic", "ties", "dare_ties")
DENSITY, DROP = 0.2, 0.9
LONG = 60.0
"""Seconds above which a run is not repeated."""
PARAMETERS = {"ties": [f"density={DENSITY}"], "dare_ties": [f"drop={DROP}"]}
THEIR_DENSITY = {"ties": DENSITY, "dare_ties": 1 - DROP}


def ours(method: str, sources: list[str], out: str) -> list[str]:
    """The command of a merge by coram_hf."""
    words = [beside_python("coram-hf"), "--quiet", "merge", *sources, "-o", out]
    if method == "full":
        return words
    given = (word for text in PARAMETERS.get(method, []) for word in ("--parameter", text))
    return [*words, "--method", method, *given]


def theirs(method: str, sources: list[str], out: str, python: str) -> list[str]:
    """The command of a merge by mergekit, with lazy reading."""
    weight = 1.0 / (len(sources) - 1)
    models = [{"model": source, "parameters": {"weight": weight}} for source in sources[1:]]
    recipe: dict[str, Any] = {"merge_method": method, "dtype": "bfloat16", "models": models}
    if method != "linear":
        recipe |= {"base_model": sources[0], "parameters": {"normalize": method == "ties"}}
    if method in THEIR_DENSITY:
        recipe["parameters"]["density"] = THEIR_DENSITY[method]
    path = Path(out).with_name(f"{method}.yml")
    path.write_text(yaml.safe_dump(recipe))
    words = [beside_python("mergekit-yaml", python), str(path), out]
    return [*words, "--lazy-unpickle", "--quiet", "--no-copy-tokenizer"]


def by_processes(sources: list[str], out: str) -> list[str]:
    """The command of a merge by two processes, of one thread each."""
    launcher = [beside_python("torchrun"), "--nproc_per_node", "2", "-m", "coram_hf", "--quiet", "merge"]
    return ["env", "OMP_NUM_THREADS=1", *launcher, *sources, "-o", out]


def tensors(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor in a folder, as a hash, by its name: the files differ in their number."""
    import hashlib

    from safetensors import safe_open

    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                data = file.get_tensor(name).flatten().view(-1).float().numpy().data
                found[name] = hashlib.sha256(data).digest()
    return found


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


def best_of(jobs: dict[str, list[str]], out: Path, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fastest run of every command, and the tensors that those of one and of two processes wrote."""
    best: dict[str, Any] = {}
    written: dict[str, Any] = {}
    for _ in range(repeats):
        for name, words in jobs.items():
            if best.get(name, {"seconds": 0.0})["seconds"] > LONG:
                continue
            os.sync()
            found = run_command(*words)
            print(f"{name}: {found['seconds']:.1f} s", file=sys.stderr, flush=True)
            if TWO in jobs and name in (ONE, TWO) and name not in written:
                written[name] = tensors(out)
            shutil.rmtree(out)
            if name not in best or found["seconds"] < best[name]["seconds"]:
                best[name] = found
    return best, written


ONE, TWO = "coram_hf full", "coram_hf full, two processes"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", default="0.1B", choices=list(SIZES))
    parser.add_argument("--experts", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--processes", action="store_true", help="also merge by two processes")
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many runs")
    parser.add_argument("--mergekit", help="an interpreter that has mergekit, by default this one")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()

    python = options.mergekit or sys.executable
    folder = Path(tempfile.mkdtemp(prefix="coram-bench-", dir=options.folder))
    out = folder / "out"
    try:
        sources = make(folder, options.size, options.experts)
        jobs = {}
        for method in options.methods:
            jobs[f"coram_hf {method}"] = ours(method, sources, str(out))
            if method != "full" and Path(beside_python("mergekit-yaml", python)).exists():
                jobs[f"mergekit {method}"] = theirs(method, sources, str(out), python)
        if options.processes:
            jobs[TWO] = by_processes(sources, str(out))
        lowest = floor(sources, folder)
        best, written = best_of(jobs, out, options.repeats)
    finally:
        shutil.rmtree(folder)

    print(f"{options.size}, {options.experts} experts, bf16, files to files; {machine()}\n")
    print("| command | seconds | CPU s | peak anonymous | x mergekit, seconds | x mergekit, CPU | x floor |")
    print("|---" * 7 + "|")
    for name, found in best.items():
        method = name.removeprefix("coram_hf ")
        rival = best.get("mergekit linear" if method.startswith("full") else f"mergekit {method}", {})
        ratios = [f"{found[key] / rival[key]:.2f}" if rival else "" for key in ("seconds", "cpu")]
        peak = "" if name == TWO else f"{found['peak'] / 2**20:.0f} MB"  # the launcher's
        print(
            f"| {name} | {found['seconds']:.1f} | {found['cpu']:.1f} | {peak} "
            f"| {' | '.join(ratios)} | {found['seconds'] / lowest:.1f} |"
        )
    print(f"| floor: cat and one write | {lowest:.1f} | | | | | 1.0 |")
    if "mergekit ties" in best and ONE in best:
        print(
            f"\nmergekit's TIES takes {best['mergekit ties']['seconds'] / best[ONE]['seconds']:.1f} x {ONE}"
        )
    if written:
        print(f"\none and two processes write the same tensors: {written[ONE] == written[TWO]}")
    results = {"size": options.size, "experts": options.experts, "floor_s": lowest, "merges": best}
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
