"""Draws the peers' chart. Runs in the environment `chart` of envs.py: data (report.chart) as JSON on stdin.

    .cache/bench-envs/chart/bin/python benchmarks/peers/chart.py OUT.png < data.json

CPU for each piece of work on a logarithmic scale, one panel for each group.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

OURS, OTHERS = "#1f6feb", "#9aa4b2"
BAR_IN, PANEL_IN = 0.32, 0.9


def draw(groups: list[dict[str, Any]], path: str) -> None:
    heights = [len(group["bars"]) for group in groups]
    size = (9.0, sum(heights) * BAR_IN + len(groups) * PANEL_IN)
    figure, panels = plt.subplots(len(groups), 1, figsize=size, squeeze=False, height_ratios=heights)
    for group, panel in zip(groups, panels[:, 0], strict=True):
        bars = group["bars"][::-1]
        values = [bar["cpu_ms"] for bar in bars]
        drawn = panel.barh(
            [bar["name"] for bar in bars], values, color=[OURS if bar["ours"] else OTHERS for bar in bars]
        )
        panel.bar_label(
            drawn,
            [f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms" for value in values],
            padding=3,
            fontsize=8,
        )
        panel.set(xscale="log", xlim=(min(values) / 2, max(values) * 4))
        panel.set_title(f"{group['title']}: CPU ms for each {group['unit']}", fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(json.load(sys.stdin), sys.argv[1])
