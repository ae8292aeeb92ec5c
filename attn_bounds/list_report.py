"""The report of a substitutions run: every table and figure comes from its results.csv."""

from __future__ import annotations

from pathlib import Path

from . import plots
from ._page import Part, read_run, write_page


def write_list_report(folder: str | Path) -> Path:
    """Write report.md, report.html and figures/ of a substitutions run. Raises: ArgumentError."""
    folder = Path(folder)
    t, command = read_run(folder)
    by = t.groupby(["neighbours", "method"])
    quartiles = by["relative_gap"].quantile([0.25, 0.5, 0.75]).unstack()
    quartiles.columns = ["q25", "median", "q75"]
    bounded = quartiles.assign(
        units=by.size(), bounded=by["upper"].count(), seconds=by["seconds"].median()
    ).reset_index()
    said = (
        "(upper - exact) / (exact - nominal): median and quartiles of the units. `lists` is the exact worst case over "
        "every choice of substitutes; `box` is what a method proves on the box around them, which holds far more."
    )
    none = t[t["upper"].isna()].groupby(["method", "reason"], dropna=False).size().rename("rows").reset_index()
    parts = [
        Part(
            "substitutions", "Relative gap to the exact worst case", said, bounded,
            bounded.dropna(), plots.lines("median", "relative gap", log=True, x="neighbours"),
        ),
        Part("no-bound", "Where a method gave no bound", "With its reason.", none if len(none) else None),
    ]  # fmt: skip
    lead = (
        f"{len(t) // t['method'].nunique()} units of {t['model'].iloc[0]}, first layer: {t['head'].nunique()} heads, "
        f"{t['prompt'].nunique()} prompts; every token may become one of its nearest in the embedding."
    )
    return write_page(folder, "Substitutions: the lists against the box around them", lead, parts, command)
