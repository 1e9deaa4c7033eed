"""Draw the validation scores against the size of the update and against kappa of the neutral scale.

python examples/suite/figure.py
"""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from study import RESULTS, average
from suites import SUITES
from tables import read, recommended_direction

AXES = {
    "a": "a, size of the update over an expert's",
    "kappa": "kappa, lambda over the neutral scale",
}
MARKERS = {"even": "o", "uneven": "s", "2": "^", "3": "D"}
FILE = RESULTS / "amplitude.png"


def main() -> None:
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True)
    for panel, (key, label) in zip(panels, AXES.items(), strict=True):
        for name, rows in read("validation").items():
            own = (row for at, row in rows.items() if at.startswith(recommended_direction(name)))
            points = sorted((row[key], 100 * average(row)) for row in own if "kappa" in row)
            full = name.startswith("full")
            style = {"color": "tab:blue" if full else "tab:orange", "linestyle": "--" if full else "-"}
            style["marker"] = MARKERS[name.partition("-")[2]]
            panel.plot(*zip(*points, strict=True), markersize=5, label=SUITES[name].title, **style)
        panel.set_xscale("log")
        ticks = (1, 1.5, 2, 3) if key == "a" else (0.8, 1, 1.15, 1.3, 1.5)
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set_xlabel(label)
        panel.spines[["top", "right"]].set_visible(False)
    panels[1].axvline(1.15, color="grey", linewidth=0.8)
    panels[1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    panels[0].set_ylabel("percent right, validation")
    figure.tight_layout()
    figure.savefig(FILE, dpi=150)
    print(FILE.relative_to(RESULTS.parent))


if __name__ == "__main__":
    main()
