"""Draw the picture of the front page: every method over the suites, from the committed results.

python examples/suite/picture.py
"""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from study import RESULTS, average
from tables import FRONT, bands, complete, read

FILE = RESULTS / "comparison.png"
OURS = {"full": "#7fb2e5", "DEC(full)": "#7fb2e5", "recommended": "#1f6fb8", "calibrated": "#0b3d6b"}
GREY, DARK, LINE = "#c9ced6", "#30363d", "#8b949e"
PLAIN = {
    "full": "CORAM, the paper's rule",
    "DEC(full)": "CORAM, decorrelated",
    "recommended": "CORAM, recommended",
}
PLAIN["calibrated"] = "CORAM, calibrated on 16 prompts"


def bars(suites: dict[str, Any]) -> list[tuple[str, float, list[float]]]:
    """Every method with its mean over suites and its score on each, in percent; the best come first."""
    found = []
    for row in FRONT:
        if row not in ("base", "experts"):
            scores = [100 * average(rows[row]) for rows in suites.values()]
            found.append((row, sum(scores) / len(scores), scores))
    return sorted(found, key=lambda bar: -bar[1])


def main() -> None:
    suites = complete(read("test"))
    rows = bars(suites)
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 10, "text.color": DARK})
    figure, axis = plt.subplots(figsize=(9, 0.36 * len(rows) + 1.45), dpi=160)
    for place, (row, mean, scores) in enumerate(rows):
        band = bands(suites, row)
        axis.barh(place, mean, height=0.62, color=OURS.get(row, GREY), zorder=2)
        axis.plot([100 * band.low, 100 * band.high], [place] * 2, color=DARK, linewidth=1.4, zorder=3)
        axis.scatter(
            scores, [place] * len(scores), s=16, color="white", edgecolor=DARK, linewidth=0.8, zorder=4
        )
        axis.text(103, place, f"{mean:.0f}", va="center", weight="bold" if row in OURS else "normal")
    for row, words in (("base", "the base"), ("experts", "each expert\non its own task")):
        mean = sum(100 * average(found[row]) for found in suites.values()) / len(suites)
        axis.axvline(mean, color=LINE, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axis.text(mean, -0.75, words, ha="center", va="bottom", color=LINE, fontsize=8.5)
    axis.set_yticks(range(len(rows)), [PLAIN.get(row, FRONT[row]) for row, _, _ in rows])
    for label, (row, _, _) in zip(axis.get_yticklabels(), rows, strict=True):
        label.set_weight("bold" if row in OURS else "normal")
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(0, 102)
    axis.set_xlabel(
        "percent of held-out questions answered correctly: bar, mean over suites; circles, each suite"
    )
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", color=LINE)
    axis.xaxis.label.set_color(DARK)
    figure.tight_layout()
    figure.savefig(FILE, facecolor="white")
    print(FILE.relative_to(RESULTS.parent))


if __name__ == "__main__":
    main()
