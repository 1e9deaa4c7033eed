"""All diagnostics beside one merge of the same models: time, and anonymous memory.

    python examples/benchmarks/report.py [--sizes 0.1B] [--experts 3] [--rounds 3] [--folder DIR]

The checkpoints are those of common.py. Merge and report run in processes of their own, in turn, and the
fastest round of each counts; the report also reads the merged folder, for retention, and draws the page.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from common import SIZES, Watch, in_process, make
from streaming import merge


def report(sources: list[str], merged: str) -> dict[str, float]:
    """The numbers and the page; loading the libraries does not count."""
    import coram_hf.merger  # noqa: F401
    from coram_hf.report.diagnostics import diagnose
    from coram_hf.report.page import render_page

    with Watch() as watch:
        render_page(diagnose(sources[0], sources[1:], merged=[merged], progress=False))
    return watch.found()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["0.1B"], choices=list(SIZES))
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--role", choices=["merge", "report"], help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.role:
        part = merge if options.role == "merge" else report
        print(json.dumps(part(arguments[:-1], arguments[-1])))
        return
    print("  size     merge    report  ratio  peak anonymous     bound")
    for size in options.sizes:
        folder = Path(tempfile.mkdtemp(prefix="coram-bench-", dir=options.folder))
        try:
            sources = make(folder, size, options.experts)
            merges, reports = [], []
            for _ in range(options.rounds):
                shutil.rmtree(folder / "out", ignore_errors=True)
                merged = str(folder / "out")
                merges.append(in_process(__file__, "--role", "merge", *sources, merged)["seconds"])
                reports.append(in_process(__file__, "--role", "report", *sources, merged))
        finally:
            shutil.rmtree(folder)
        seconds = min(found["seconds"] for found in reports)
        largest = 2 * SIZES[size]["vocab_size"] * SIZES[size]["hidden_size"]
        print(
            f"{size:>6} {min(merges):>7.1f} s {seconds:>7.1f} s {seconds / min(merges):>6.2f} "
            f"{max(found['peak'] for found in reports) / 2**20:>12.0f} MB "
            f"{(2**30 + 3 * largest) / 2**20:>6.0f} MB"
        )


if __name__ == "__main__":
    main()
