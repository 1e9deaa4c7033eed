"""How the cost of a merge grows with parameters, experts and slice height.

    python examples/benchmarks/scaling.py [--sizes 50M 0.1B 1B] [--experts 2 3 5 8 10] [--heights 8 16 32]

Every point is a merge from files to files in a process of its own, measured in processor seconds, which other
programs disturb least. The exponents are those of the best fits cost = c * x^p, printed and drawn.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
from common import SIZES, Watch, in_process, machine, make


def merge(height: int, sources: list[str], out: str) -> dict[str, float]:
    """One merge by the line `full`; its seconds, and how many target parameters it merged."""
    from coram_hf import CoramConfig, CoramMerger

    merger = CoramMerger(sources[0], sources[1:], CoramConfig(slice_height=height), progress=False)
    with Watch() as watch:
        merger.merge_to(out)
    inputs = merger.inputs
    merged = sum(inputs.base.original(name).numel() for name in inputs.targets)
    return {**watch.found(), "parameters": merged}


def exponent(x: list[float], y: list[float]) -> float:
    """p of the least-squares fit log y = p log x + c."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def draw(curves: dict[str, tuple[list[float], list[float]]], path: Path) -> None:
    """One panel a curve, on logarithmic axes, with its exponent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(curves), 3.4), layout="constrained")
    for panel, (name, (x, y)) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        panel.loglog(x, y, "o-", color="#2a6f97")
        panel.set(xlabel=name, ylabel="processor seconds", title=f"exponent {exponent(x, y):.2f}")
        panel.grid(alpha=0.3, which="both")
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["50M", "0.1B", "0.3B", "1B"], choices=list(SIZES))
    parser.add_argument("--experts", nargs="+", type=int, default=[2, 3, 5, 8, 10])
    parser.add_argument("--heights", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--figure", type=Path, default=Path("scaling.png"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--role", type=int, help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.role:
        print(json.dumps(merge(options.role, arguments[:-1], arguments[-1])))
        return

    def point(size: str, experts: int, height: int) -> dict[str, float]:
        folder = Path(tempfile.mkdtemp(prefix="coram-bench-", dir=options.folder))
        try:
            sources = make(folder, size, experts)
            found = [
                in_process(__file__, "--role", str(height), *sources, str(folder / f"out{i}"))
                for i in range(2)
            ]
        finally:
            shutil.rmtree(folder)
        best: dict[str, float] = min(found, key=lambda run: run["cpu"])
        print(
            f"| {size} | {experts} | {height} | {best['parameters'] / 1e6:.0f}M "
            f"| {best['seconds']:.1f} | {best['cpu']:.1f} | {best['peak'] / 2**20:.0f} MB |",
            flush=True,
        )
        return best

    print(f"{machine()}\n")
    print("| size | experts | height | target parameters | seconds | CPU s | peak anonymous |")
    print("|---|---|---|---|---|---|---|")
    sizes = [point(size, 5, 8) for size in options.sizes]
    experts = [point(options.sizes[0], n, 8) for n in options.experts]
    heights = [point(options.sizes[0], 5, h) for h in options.heights]
    curves = {
        "target parameters": ([p["parameters"] for p in sizes], [p["cpu"] for p in sizes]),
        "experts": ([float(n) for n in options.experts], [p["cpu"] for p in experts]),
        "slice height": ([float(h) for h in options.heights], [p["cpu"] for p in heights]),
    }
    fits = {name: exponent(x, y) for name, (x, y) in curves.items() if len(x) > 1}
    print("\n" + "\n".join(f"cost ~ {name}^{p:.2f}" for name, p in fits.items()))
    draw(curves, options.figure)
    print("\n" + json.dumps({"exponents": fits, "curves": curves}))


if __name__ == "__main__":
    main()
