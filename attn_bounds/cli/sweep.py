"""`attn-bounds sweep`: heads x queries x prompts x radii x methods into one table."""

from __future__ import annotations

import argparse
import json

from ..plots import gap_against_radius
from ..runs import summarise
from ._units import add_units, run_units


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    add_units(subparsers.add_parser("sweep", help="heads x queries x prompts x radii x methods into one table"))


def run(args: argparse.Namespace) -> int:
    """Run the sweep, then write summary.json and gap.png."""
    done, table = run_units(args, "sweep")
    summary = {"settings": done.settings, "rows": len(table), "results": summarise(table)}
    (done.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    gap_against_radius(table, done.out / "gap.png")
    print("summary.json and gap.png beside it")
    return 0
