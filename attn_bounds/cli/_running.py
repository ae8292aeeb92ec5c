"""How a run is computed and what is kept of it: options that `sweep` and all of `compare` share."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from typing import Any

import pandas as pd

from ..engines import ENGINES
from ..errors import ArgumentError
from ..tables import FORMATS, Job, Run, check_format


def add_running(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    p.add_argument("--out", required=True, metavar="DIR")
    p.add_argument("--resume", action="store_true", help="continue a run that was stopped")
    p.add_argument(
        "--format", choices=FORMATS, default="csv",
        help="parquet: a results.parquet as well, written when the run ends (the csv is what resumes)",
    )  # fmt: skip
    p.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (engine local)")
    p.add_argument("--engine", choices=ENGINES, default="local")
    p.add_argument("--address", help="the Dask scheduler's (engine dask)")
    p.add_argument("--no-progress", action="store_true")


def check_running(args: argparse.Namespace) -> None:
    """Refuse early, before any folder is made. Raises: ArgumentError, MissingDependencyError."""
    if args.jobs < 1:
        raise ArgumentError(f"jobs: expected at least 1, got {args.jobs}")
    check_format(args.format)


def execute(
    args: argparse.Namespace, settings: dict[str, Any], columns: Sequence[str], job: Job, units: Sequence[Any]
) -> tuple[Run, pd.DataFrame]:
    """Compute what is missing of the run, print the rate, and return the run and its table."""
    run = Run(args.out, settings, columns, args.resume)
    note = run.out / "command.txt"
    if not note.exists():
        note.write_text(shlex.join(["attn-bounds", *(a for a in args.argv if a != "--resume")]) + "\n")
    before, started = run.rows(), time.perf_counter()
    table = run.execute(job, units, args.jobs, args.engine, args.address, not args.no_progress)
    seconds, new = time.perf_counter() - started, (len(table) - before) / job.per_unit
    if args.format == "parquet":
        table.to_parquet(run.out / "results.parquet")
    print(f"{len(table)} rows in {run.table}; {new:.0f} units now, {seconds:.1f} s, {new / seconds:.1f} units a second")
    return run, table
