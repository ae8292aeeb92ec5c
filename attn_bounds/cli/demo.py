"""`attn-bounds demo`: certified worst cases of real heads, in a table."""

from __future__ import annotations

import argparse

import pandas as pd

from ..certify import certify_many
from ..models import load_model

TEXT = "The quick brown fox jumps over the lazy dog"
RADII = (0.001, 0.01, 0.05)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    subparsers.add_parser("demo", help="certified worst cases of 12 MiniLM heads at 3 radii")


def run(args: argparse.Namespace) -> int:
    """Certify two heads a layer, the query fixed (exact) and moving (best), and print the table."""
    model = load_model("minilm")
    print(f"MiniLM on {TEXT!r}: tokens move by up to `radius` times their norm; readout: a random unit vector, seed 0")
    print("lower is attained, upper is proved; gap = (upper - lower) / (lower - nominal)\n")
    rows = []
    for moving in (False, True):
        names = [(layer, head, radius) for layer in range(model.layers) for head in (0, 4) for radius in RADII]
        problems = [model.problem(TEXT, layer, head, 4, r, query_moves=moving, tokens=5) for layer, head, r in names]
        for (layer, head, radius), c in zip(names, certify_many(problems, progress=True), strict=True):
            rows.append({
                "query": "moves" if moving else "fixed", "layer": layer, "head": head, "radius": radius,
                "nominal": c.nominal, "lower": c.lower, "upper": c.upper, "gap": f"{c.relative_gap:.1e}",
                "exact": "yes" if c.is_exact else "", "proved by": c.method, "ms": 1e3 * c.seconds,
            })  # fmt: skip
    print(pd.DataFrame(rows).to_string(index=False, float_format=lambda x: f"{x:.6g}"))
    return 0
