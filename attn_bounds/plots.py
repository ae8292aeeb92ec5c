"""Figures of a run, each drawn from a small table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

# Okabe and Ito's palette, told apart by colour-blind readers; markers and dashes tell lines apart in grey.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C00"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
DASHES = ["-", "--", ":"]
FLOOR = 1e-12  # gaps below this are rounding; drawn here

FEW = 5  # units below which a distribution is not drawn

Draw = Callable[[pd.DataFrame, Path], Path]


def styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and dash of each method, the same in every panel of a figure."""
    out = {}
    for i, method in enumerate(sorted(methods)):
        turn, place = divmod(i, len(COLOURS))
        out[method] = {
            "color": COLOURS[place],
            "marker": MARKERS[(place + 3 * turn) % len(MARKERS)],
            "linestyle": DASHES[turn % len(DASHES)],
        }
    return out


def gap_against_radius(table: pd.DataFrame, path: Path) -> Path:
    """Draw the median relative gap (band: quartiles) against the radius, log-log, one panel a query regime."""
    table = table[table["relative_gap"].notna()]
    q = table.groupby(["query_moves", "method", "radius"])["relative_gap"].quantile([0.25, 0.5, 0.75]).unstack()
    q = q.reset_index().rename(columns={0.25: "q25", 0.5: "median", 0.75: "q75"})
    return lines("median", "relative gap", log=True)(q, path)


def lines(value: str, label: str, log: bool, x: str = "radius") -> Draw:
    """A figure of `value` (band: q25 to q75) against `x`, a line a method and a panel a query regime."""

    def draw(data: pd.DataFrame, path: Path) -> Path:
        def panel(axis: Axes, part: pd.DataFrame, style: dict[str, dict[str, Any]]) -> None:
            for method, rows in part.groupby("method", sort=True):
                rows = rows.sort_values(x)
                middle, low, high = (rows[c].clip(lower=FLOOR) if log else rows[c] for c in (value, "q25", "q75"))
                axis.plot(rows[x], middle, label=method, markersize=5, **style[str(method)])
                axis.fill_between(rows[x], low, high, alpha=0.12, color=style[str(method)]["color"], linewidth=0)
            axis.set(xscale="log", yscale="log" if log else "linear", xlabel=x, ylabel=f"{label} (median, quartiles)")
            few = sorted(part[x].unique())
            if part[x].dtype.kind == "i" and len(few) <= 8:  # counts: a tick each
                axis.set_xticks(few, [str(n) for n in few])
                axis.xaxis.set_minor_formatter(NullFormatter())

        return _panels(data, path, panel)

    return draw


def shares(data: pd.DataFrame, path: Path) -> Path:
    """Percent of units certified within 10% (solid) and 1% (hollow) of the movement against radius."""

    def panel(axis: Axes, part: pd.DataFrame, style: dict[str, dict[str, Any]]) -> None:
        for method, rows in part.groupby("method", sort=True):
            rows, own = rows.sort_values("radius"), style[str(method)]
            x = rows["radius"] * 1.025 ** list(style).index(str(method))  # side by side, since many meet at 0 and 100
            axis.plot(x, rows["within_10"], label=method, markersize=5, linewidth=0.9, **own)
            axis.plot(x, rows["within_1"], markersize=5, fillstyle="none", linewidth=0.9, alpha=0.7, **own)
        axis.set(xscale="log", xlabel="radius", ylabel="% of units within 10% (hollow: 1%)", ylim=(-4, 104))

    return _panels(data, path, panel)


def boxes(value: str, label: str) -> Draw:
    """A figure with one bar (median, quartiles, 5% to 95%) a method of at least FEW units, a panel a query regime."""

    def draw(data: pd.DataFrame, path: Path) -> Path:
        def panel(axis: Axes, part: pd.DataFrame, style: dict[str, dict[str, Any]]) -> None:
            groups = [(str(m), rows[value]) for m, rows in part.groupby("method", sort=True) if len(rows) >= FEW]
            for place, (method, found) in enumerate(groups):
                low, q25, middle, q75, high = found.quantile([0.05, 0.25, 0.5, 0.75, 0.95])
                colour = style[method]["color"]
                axis.hlines(place, low, high, color=colour, linewidth=1)
                axis.hlines(place, q25, q75, color=colour, linewidth=9, alpha=0.5)
                axis.plot(middle, place, "|", color="black", markersize=11, markeredgewidth=1.6)
            axis.set_yticks(range(len(groups)), [f"{method} ({len(found)})" for method, found in groups])
            axis.set_ylim(-0.7, len(groups) - 0.3)
            axis.set_xlabel(f"{label}\n(bar: quartiles; line: 5% to 95%)")

        return _panels(data, path, panel, legend=False)

    return draw


def scatter(data: pd.DataFrame, path: Path) -> Path:
    """Median relative gap against median seconds a unit, a point a method and radius."""

    def panel(axis: Axes, part: pd.DataFrame, style: dict[str, dict[str, Any]]) -> None:
        for method, rows in part.groupby("method", sort=True):
            rows = rows.sort_values("radius")
            axis.plot(
                rows["seconds"], rows["relative_gap"].clip(lower=FLOOR), label=method, markersize=5, linewidth=0.6,
                **style[str(method)],
            )  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="seconds a unit (median)", ylabel="relative gap (median)")

    return _panels(data, path, panel)


def against(x: str, y: str, xlabel: str, ylabel: str) -> Draw:
    """A figure of `y` against `x`, log-log: a point a unit, a mark a method, a line where they are equal."""

    def draw(data: pd.DataFrame, path: Path) -> Path:
        seen = data[data[x].notna() & data[y].notna()]
        seen = seen.assign(**{name: seen[name].clip(lower=FLOOR) for name in (x, y)})

        def panel(axis: Axes, part: pd.DataFrame, style: dict[str, dict[str, Any]]) -> None:
            size = 5 if len(part) < 400 else 2.5
            for method, rows in part.groupby("method", sort=True):
                own = style[str(method)] | {"linestyle": "none"}
                axis.plot(rows[x], rows[y], label=method, markersize=size, alpha=0.6, markeredgewidth=0, **own)
            ends = [seen[[x, y]].min().min(), seen[[x, y]].max().max()]
            axis.plot(ends, ends, color="grey", linewidth=0.8)
            axis.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)

        return _panels(seen, path, panel)

    return draw


def _panels(
    data: pd.DataFrame, path: Path, panel: Callable[[Axes, pd.DataFrame, dict[str, dict[str, Any]]], None],
    legend: bool = True,
) -> Path:  # fmt: skip
    """One panel a query regime (one in all where there is none); one legend beside them, so that it covers no line."""
    regimes: list[Any] = sorted(data["query_moves"].unique()) if "query_moves" in data else [None]
    style = styles([str(m) for m in data["method"].unique()])
    count = max(len(regimes), 1)
    figure = Figure(figsize=(4.9 * count + (1.5 if legend else 0.8), 4.2))
    axes = figure.subplots(1, count, squeeze=False, sharex=legend, sharey=legend)[0]
    seen: dict[str, Any] = {}
    for axis, moves in zip(axes, regimes, strict=False):
        panel(axis, data if moves is None else data[data["query_moves"] == moves], style)
        if moves is not None:
            axis.set_title("query moves" if moves else "query fixed")
        axis.grid(alpha=0.3, which="major", linewidth=0.4)
        handles, labels = axis.get_legend_handles_labels()
        seen |= dict(zip(labels, handles, strict=True))
    if legend and seen:
        names = sorted(seen)
        figure.legend(handles=[seen[n] for n in names], labels=names, loc="center right", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1 - 1.4 / figure.get_size_inches()[0] if legend else 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


__all__ = ["against", "boxes", "gap_against_radius", "lines", "scatter", "shares"]
