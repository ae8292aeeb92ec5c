"""The report of a run: every table and figure comes from results.csv, with its CSV and the command beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from . import plots
from ._page import Part, read_run, write_page
from .runs import VERIFIER_METHODS

KEYS = ["prompt", "layer", "head", "query", "query_moves", "region", "radius", "readout"]
UNIT = [key for key in KEYS if key != "radius"]
FLOOR = 1e-12  # relative gaps below this are rounding
CLOSED = 1e-9  # relative gaps below this count as exact

# Figures that the source paper prints for GPT-2 small: 144 heads, 5 prompts, r relative to the token's norm.
PUBLISHED = [
    # (figure, published, method here, statistic, query_moves, radius)
    ("relative gap of the second-order relaxation", "0.004", "moment2", "relative_gap", None, 0.002),
    ("relative gap of the second-order relaxation", "0.048", "moment2", "relative_gap", None, 0.02),
    ("relative gap of the certificate, query fixed", "6e-10", "exact", "relative_gap", False, None),
    ("slope of the gap, second-order relaxation", "2.04", "moment2", "slope", None, None),
    ("slope of the gap, first-order certificate", "1.04", "first-order", "slope", None, None),
    ("slope of the movement", "1.00", "movement", "slope", None, None),
    ("relative gap of IBP", "5.7 to 19", "ibp", "relative_gap", None, None),
    ("CROWN's gap over the second-order relaxation's, query fixed", "3.8 to 4.7", "crown", "ratio", False, None),
    ("CROWN's gap over the second-order relaxation's, query moving", "7.8", "crown", "ratio", True, 0.001),
    ("CROWN's gap over the second-order relaxation's, query moving", "22", "crown", "ratio", True, 0.01),
    ("alpha-CROWN's gap over the second-order relaxation's, query moving", "6.7", "alpha-crown", "ratio", True, 0.001),
    ("alpha-CROWN's gap over the second-order relaxation's, query moving", "17.5", "alpha-crown", "ratio", True, 0.01),
    ("seconds a unit, certificate, query fixed", "10", "exact", "seconds", False, None),
    ("seconds a unit, certificate, query moving", "22", "moment2", "seconds", True, None),
    ("seconds a unit, CROWN", "0.01 to 0.02", "crown", "seconds", None, None),
    ("seconds a unit, alpha-CROWN", "0.2 to 0.7", "alpha-crown", "seconds", None, None),
]
REFERENCE = "moment2"  # the method whose gap the published ratios divide by


def write_report(folder: str | Path) -> Path:
    """Write report.md, report.html and figures/ (PNG and CSV each) of the run in `folder`; return the page.

    Raises: ArgumentError where the folder holds no run.
    """
    folder = Path(folder)
    table, command = read_run(folder)
    model = table["model"].iloc[0]
    units = len(table) // max(table["method"].nunique(), 1)
    lead = (
        f"{units} units of {model}: {table['layer'].nunique()} layers, "
        f"{table['head'].nunique()} heads, "
        f"{table['prompt'].nunique()} prompts, {table['query'].nunique()} query positions, radii "
        f"{', '.join(f'{r:g}' for r in sorted(table['radius'].unique()))} ({table['region'].iloc[0]}); all methods of "
        "a unit see the same region and readout, and every gap is taken to the best value that any of them attained."
    )
    return write_page(folder, "Heads side by side", lead, _parts(table), command)


def gaps(table: pd.DataFrame) -> pd.DataFrame:
    """Rows that have a bound, with gap = upper - lower, movement = lower - nominal."""
    t = table[table["upper"].notna()].copy()
    t["gap"] = (t["upper"] - t["lower"]).clip(lower=0.0)
    t["movement"] = t["lower"] - t["nominal"]
    return t


def slopes(table: pd.DataFrame) -> pd.DataFrame:
    """Log-log slope of gap (and of movement) against radius, of each unit with at least two radii above rounding."""
    t = gaps(table)
    rows = []
    for label, value, source in (
        ("gap", "gap", t[(t["gap"] > CLOSED * t["movement"]) & (t["radius"] > 0)]),
        ("movement", "movement", t[(t["movement"] > 0) & (t["radius"] > 0)].drop_duplicates(KEYS)),
    ):
        by = [*UNIT, "method"] if label == "gap" else UNIT
        x, y = np.log(source["radius"]), np.log(source[value])
        frame = source[by].assign(x=x, y=y, xx=x * x, xy=x * y, n=1)
        s = frame.groupby(by, as_index=False)[["x", "y", "xx", "xy", "n"]].sum()
        spread = s["n"] * s["xx"] - s["x"] ** 2
        s = s[(s["n"] > 1) & (spread > 1e-12)]
        slope = (s["n"] * s["xy"] - s["x"] * s["y"]) / spread
        found = s[["query_moves"]].assign(method=s["method"] if label == "gap" else "movement", slope=slope)
        rows.append(found)
    return pd.concat(rows, ignore_index=True)


def ratios(table: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Each verifier's gap over the reference's, unit by unit; units that the reference closes are left out."""
    t = gaps(table)
    ours = t[t["method"] == reference].set_index(KEYS)["gap"]
    theirs = t[t["method"].str.partition(":")[0].isin(VERIFIER_METHODS)]
    joined = theirs.join(ours.rename("reference_gap"), on=KEYS, how="inner")
    joined = joined[joined["reference_gap"] > CLOSED * joined["movement"].abs()]
    return joined.assign(ratio=joined["gap"] / joined["reference_gap"])[[*KEYS, "method", "ratio"]]


def _quartiles(table: pd.DataFrame, value: str) -> pd.DataFrame:
    by = ["query_moves", "method", "radius"]
    q = table.groupby(by)[value].quantile([0.25, 0.5, 0.75]).unstack().reset_index()
    return q.rename(columns={0.25: "q25", 0.5: "median", 0.75: "q75"})


def _wide(frame: pd.DataFrame, value: str) -> pd.DataFrame:
    """One row a query regime and method, one column a radius."""
    wide = frame.pivot(index=["query_moves", "method"], columns="radius", values=value)
    wide.columns = [f"r={radius:g}" for radius in wide.columns]
    wide = wide.reset_index()
    wide.insert(0, "query", wide.pop("query_moves").map(_regime))
    return wide


def _regime(moves: bool) -> str:
    return "moves" if moves else "fixed"


def _parts(table: pd.DataFrame) -> list[Part]:
    bounded = table[table["relative_gap"].notna()]
    median = _quartiles(bounded, "relative_gap")
    parts = [
        Part(
            "relative-gap", "Relative gap against radius",
            "(upper - lower) / (lower - nominal): median of the units; the band in the figure holds the quartiles.",
            _wide(median, "median"), median, plots.lines("median", "relative gap", log=True),
        ),
        _certified(table),
        _slopes(table),
    ]  # fmt: skip
    # Not moment3: at small radii its gap is what the conic solver's tolerance leaves, and a ratio to it says nothing.
    references = [m for m in table["method"].unique() if m in ("first-order", "moment2", "lagrangian")]
    for reference in sorted(references, key=lambda m: m != REFERENCE):
        found = ratios(table, reference)
        if len(found):
            parts.append(_ratio(found, reference))
    parts += [_time(table), *_slack(table), _published(table), _nothing(table)]
    return parts


def _certified(table: pd.DataFrame) -> Part:
    by = ["query_moves", "method", "radius"]
    t = table[table["method"] != "search"].assign(
        within_10=table["relative_gap"] <= 0.1,
        within_1=table["relative_gap"] <= 0.01,
        exact=table["is_exact"] == True,  # noqa: E712
    )
    t = t[~t["reason"].fillna("").str.startswith("method:")]  # where a method does not apply it is not counted
    share = t.groupby(by)[["within_10", "within_1", "exact"]].mean().mul(100).reset_index()
    shown = share.assign(
        text=[
            f"{a:.0f} / {b:.0f} / {c:.0f}"
            for a, b, c in zip(share["within_10"], share["within_1"], share["exact"], strict=True)
        ]
    )
    return Part(
        "certified", "Share certified",
        "Percent of units whose gap is at most 10% / at most 1% of the movement / zero to rounding (1e-9).",
        _wide(shown, "text"), share, plots.shares,
    )  # fmt: skip


def _slopes(table: pd.DataFrame) -> Part:
    found = slopes(table)
    by = found.groupby(["query_moves", "method"])["slope"]
    rows = by.quantile([0.25, 0.5, 0.75]).unstack().assign(units=by.size()).reset_index()
    rows = rows.rename(columns={0.25: "q25", 0.5: "median", 0.75: "q75"})
    rows.insert(0, "query", rows.pop("query_moves").map(_regime))
    return Part(
        "slopes", "Slopes",
        "Least-squares slope of log(upper - lower) against log(radius), unit by unit, over the radii where the gap is "
        "above rounding; `movement` is lower - nominal. A gap of order r^2 has slope 2.",
        rows, found, plots.boxes("slope", "log-log slope of the gap"),
    )  # fmt: skip


def _ratio(found: pd.DataFrame, reference: str) -> Part:
    median = _quartiles(found, "ratio")
    return Part(
        f"ratio-{reference}", f"Verifiers' gap over that of {reference}",
        f"Median over the units that {reference} leaves open: where its gap is zero there is no ratio.",
        _wide(median, "median"), median, plots.lines("median", f"gap over the gap of {reference}", log=True),
    )  # fmt: skip


def _time(table: pd.DataFrame) -> Part:
    t = table[table["seconds"].notna()]
    t = t.assign(relative_gap=t["relative_gap"].clip(lower=FLOOR))
    rows = t.groupby(["query_moves", "method"])[["seconds", "relative_gap"]].median().reset_index()
    shown = rows.rename(columns={"seconds": "median seconds a unit", "relative_gap": "median relative gap"})
    shown.insert(0, "query", shown.pop("query_moves").map(_regime))
    data = t.groupby(["query_moves", "method", "radius"])[["seconds", "relative_gap"]].median().reset_index().dropna()
    return Part(
        "time", "Time against gap",
        "Seconds a unit in batches of like units, all radii together; in the figure one point a radius.",
        shown, data, plots.scatter,
    )  # fmt: skip


def _slack(table: pd.DataFrame) -> list[Part]:
    """The gaps of the moment relaxations beside the secant slack; nothing where no such method was run."""
    if "gap_over_slack" not in table:
        return []
    t = gaps(table[table["gap_over_slack"].notna()])
    t = t[(t["movement"] > 0) & (t["gap"] > 0)]
    if t.empty:
        return []
    relative = t["gap"] / t["movement"]
    data = t[[*KEYS, "method", "gap_over_slack"]].assign(gap=relative, slack=relative / t["gap_over_slack"])
    return [
        Part(
            "slack", "Gap against secant slack",
            "The value-weighted secant slack: the closed form of how far chords of exp can lift a moment relaxation. "
            "With the coupling of weights and values (`bounds/slack.py`) it bounds the gap to the solver's accuracy; "
            "where the slack is tiny that rest shows, above the line of equality. Table: gap over slack, median. "
            "Figure: both over the movement, a point a unit and radius; what is below 1e-12 is drawn there.",
            _wide(_quartiles(t, "gap_over_slack"), "median"), data,
            plots.against("slack", "gap", "secant slack / movement", "gap / movement"),
        )
    ]  # fmt: skip


def _published(table: pd.DataFrame) -> Part:
    bounded = table[table["relative_gap"].notna()]
    steep, ratio = slopes(table), ratios(table, REFERENCE)
    source = {"relative_gap": bounded, "slope": steep, "ratio": ratio, "seconds": table[table["seconds"].notna()]}
    rows = []
    for figure, published, method, statistic, moves, radius in PUBLISHED:
        found = source[statistic]
        found = found[found["method"] == method]
        for regime in [moves] if moves is not None else sorted(found["query_moves"].unique()):
            part = found[found["query_moves"] == regime]
            if radius is not None:
                part = part[np.isclose(part["radius"], radius)]
            if len(part):
                rows.append({
                    "figure": figure, "radius": "all" if radius is None else f"{radius:g}", "published": published,
                    "query": _regime(regime), "here (median)": float(part[statistic].median()), "units": len(part),
                })  # fmt: skip
    return Part(
        "published", "Beside the published figures",
        "Published: GPT-2 small, 144 heads, 5 prompts. Here: the model, prompts, readouts and machine of this run, and "
        "the repaired softmax in CROWN and alpha-CROWN. Another model and other data: only orders of "
        "magnitude and slopes compare.",
        pd.DataFrame(rows) if rows else None,
    )  # fmt: skip


def _nothing(table: pd.DataFrame) -> Part:
    none = table[table["upper"].isna() & (table["method"] != "search")]
    reason = none["reason"].fillna("").str.replace(r" by [0-9.e+-]+;", ";", regex=True)
    rows = none.assign(reason=reason).groupby(["method", "reason"]).size().rename("rows").reset_index()
    return Part(
        "no-bound", "Where a method gave no bound",
        "With its reason. A bound that an attained value refutes is thrown away and counted here.",
        rows if len(rows) else None,
    )  # fmt: skip
