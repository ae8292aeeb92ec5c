"""The report of a block-residual run: every table and figure comes from its results.csv."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from . import plots
from ._page import Part, read_run, write_page

# Figures that the source paper prints for GPT-2's blocks, 132 units: median (range).
PUBLISHED_BLOCKS = {
    "second_order / attained - 1 at r <= 0.001": "0.0004 to 0.015",
    "crown / per-operation sum": "1.63 (1.26 to 2.34); softmax as one operation: 0.75 to 1.01",
    "predicted looseness": "140 (33 to 722)",
    "effective rank": "11 (2.4 to 50)",
    "Spearman, predicted and measured looseness": "0.98",
}

LOOSENESS = plots.against(
    "predicted", "measured", "predicted: sum of operations / joint term", "measured: CROWN / attained maximum"
)


def write_block_report(folder: str | Path) -> Path:
    """Write report.md, report.html and figures/ of a block-residual run. Raises: ArgumentError."""
    folder = Path(folder)
    t, command = read_run(folder)
    forms = {
        "softmax one operation": ("crown", "per_operation"),
        "softmax in parts": ("crown_split", "per_operation_split"),
    }
    unit = t[["layer", "prompt", "readout", "radius"]]
    loose = pd.concat(
        unit.assign(
            method=name,
            predicted=t[total] / t["second_order"],
            measured=t[bound] / t["attained"],
            ratio=t[bound] / t[total],
        )
        for name, (bound, total) in forms.items()
    ).dropna()
    rows = [
        _spread(
            "second_order / attained - 1 at r <= 0.001",
            t[t["radius"] <= 0.001].eval("second_order / attained - 1").abs(),
        )
    ]
    rows += [_spread("effective rank", t["effective_rank"])]
    rows += [_spread("predicted looseness", (t[total] / t["second_order"]), name) for name, (_, total) in forms.items()]
    for name, part in loose.groupby("method"):
        rows.append(_spread("measured looseness", part["measured"], str(name)))
        rows.append(_spread("crown / per-operation sum", part["ratio"], str(name)))
        rank = part[["predicted", "measured"]].corr(method="spearman").iloc[0, 1]
        rows.append(
            {"figure": "Spearman, predicted and measured looseness", "form": name, "median": rank, "units": len(part)}
        )
    shown = pd.DataFrame(rows)
    shown["published (GPT-2)"] = shown["figure"].map(PUBLISHED_BLOCKS).fillna("")
    parts_by = pd.DataFrame([json.loads(x) for x in t["by_operation"]]).div(t["per_operation"], axis=0)
    share = parts_by.quantile([0.25, 0.5, 0.75]).T.reset_index()
    share.columns = ["operation", "q25", "median", "q75"]
    said = (
        "Median and range over the units. Looseness is a bound over the attained maximum; the prediction is the sum of "
        "the operations' own second-order maxima over the joint one."
    )
    points = "One point a unit; the line is equality."
    parts = [
        Part("blocks", "Figures", said, shown),
        Part("looseness", "Predicted against measured looseness", points, None, loose, LOOSENESS),
        Part("operations", "Share of each operation", "Of the per-operation sum, softmax one operation.", share),
    ]
    blocks, radii = t["layer"].nunique(), ", ".join(f"{r:g}" for r in sorted(t["radius"].unique()))
    lead = f"{len(t)} units of {t['model'].iloc[0]}: {blocks} blocks, radii {radii}."
    return write_page(folder, "Blocks: one joint maximum against a sum", lead, parts, command)


def _spread(figure: str, values: pd.Series, form: str = "") -> dict[str, Any]:
    if not len(values):
        return {"figure": figure, "form": form, "units": 0}
    return {
        "figure": figure, "form": form, "median": float(values.median()), "least": float(values.min()),
        "greatest": float(values.max()), "units": len(values),
    }  # fmt: skip
