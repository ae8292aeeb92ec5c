"""Figures of a run: relative gap against radius, by method."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

# Okabe and Ito's palette, told apart by colour-blind readers; markers tell lines apart in grey.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
FLOOR = 1e-12  # gaps below this are rounding; drawn here


def gap_against_radius(table: pd.DataFrame, path: Path) -> Path:
    """Draw the median relative gap (band: quartiles) against the radius, log-log, one panel a query regime."""
    table = table[table["relative_gap"].notna()]
    regimes = sorted(table["query_moves"].unique())
    figure, axes = plt.subplots(1, max(len(regimes), 1), figsize=(5.2 * max(len(regimes), 1), 4), squeeze=False)
    for axis, moves in zip(axes[0], regimes, strict=False):
        part = table[table["query_moves"] == moves]
        for i, (method, rows) in enumerate(part.groupby("method", sort=True)):
            by = rows.groupby("radius")["relative_gap"].quantile([0.25, 0.5, 0.75]).unstack().clip(lower=FLOOR)
            style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
            axis.plot(by.index, by[0.5], label=method, **style)
            axis.fill_between(by.index, by[0.25], by[0.75], alpha=0.15, color=style["color"], linewidth=0)
        axis.set(xscale="log", yscale="log", xlabel="radius", ylabel="relative gap (median, quartiles)")
        axis.set_title("query moves" if moves else "query fixed")
        axis.grid(alpha=0.3, which="both", linewidth=0.4)
        if len(part):
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
