"""The units of a run and how it is computed: the options that `sweep` and `compare heads` share."""

from __future__ import annotations

import argparse
import math
import time
from itertools import product
from typing import Any

import pandas as pd

from ..engines import ENGINES
from ..errors import ArgumentError
from ..models import DTYPES
from ..runs import RUN_METHODS, Job, Run, Unit, runner, shared_model
from .options import add_model, indices, numbers, read_prompts, words


def add_units(p: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the options; `defaults` sets other defaults than those of a sweep."""
    add_model(p)
    p.add_argument(
        "--prompts", metavar="FILE", help="a text file, one prompt a line (for a ViT: one image file a line)"
    )
    p.add_argument(
        "--token-ids", type=numbers(int), action="append", metavar="I,J,...", help="a prompt as token ids; repeatable"
    )
    p.add_argument("--layers", default="all", help="all, or numbers separated by commas")
    p.add_argument("--heads", default="all", help="all, or numbers separated by commas")
    p.add_argument("--queries", type=numbers(int), default=[0], metavar="I,J,...", help="indices of query tokens")
    p.add_argument("--radii", type=numbers(float), default=[0.001, 0.01], metavar="R,S,...")
    p.add_argument(
        "--methods", type=words, default=["best"], metavar="A,B,...",
        help=f"of {', '.join(RUN_METHODS)}; a verifier's may have variants, as in crown:stock or crown:unfolded",
    )  # fmt: skip
    p.add_argument("--region", choices=["ball", "box"], default="ball")
    p.add_argument("--query-moves", choices=["yes", "no", "both"], default="yes")
    p.add_argument("--fixed-query", action="store_true", help="short for --query-moves no")
    p.add_argument("--readout", type=int, default=0, metavar="SEED")
    p.add_argument("--out", required=True, metavar="DIR")
    p.add_argument("--resume", action="store_true", help="continue a run that was stopped")
    p.add_argument("--format", choices=["csv", "parquet"], default="csv", help="parquet: a results.parquet as well")
    p.add_argument("--device", help="cpu, cuda, ... (default: cpu)")
    p.add_argument("--dtype", choices=DTYPES, default="float64", help="of the model's pass; bounds are float64 always")
    p.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (engine local)")
    p.add_argument("--engine", choices=ENGINES, default="local")
    p.add_argument("--address", help="the Dask scheduler's (engine dask)")
    p.add_argument("--no-progress", action="store_true")
    p.set_defaults(**defaults)


def run_units(args: argparse.Namespace, prompts: list[Any] | None = None) -> tuple[dict[str, Any], Run, pd.DataFrame]:
    """Check the options, compute what is missing of the run, and return its settings, the run and its table.

    Args: prompts to use where neither --prompts nor --token-ids is given.
    """
    if not args.methods:
        raise ArgumentError(f"methods: expected some of {', '.join(RUN_METHODS)}, got none")
    for method in args.methods:
        runner(method)
    if args.prompts is not None and args.token_ids is not None:
        raise ArgumentError("prompts: expected either --prompts FILE or --token-ids, got both")
    prompts = read_prompts(args.prompts) if args.prompts else args.token_ids or prompts
    if prompts is None:
        raise ArgumentError("prompts: expected either --prompts FILE or --token-ids, got neither")
    for radius in args.radii:
        if not 0 <= radius < math.inf:
            raise ArgumentError(f"radii: expected finite numbers of at least 0, got {radius:g}")
    if args.readout < 0:
        raise ArgumentError(f"readout: expected a seed of at least 0, got {args.readout}")
    if args.jobs < 1:
        raise ArgumentError(f"jobs: expected at least 1, got {args.jobs}")
    for name in ("radii", "queries", "methods"):  # a unit named twice would be two rows of the same
        if getattr(args, name) is not None:
            setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    prompts = [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]
    model = shared_model(args.model, args.dtype, args.device)
    layers, heads = indices("layers", args.layers, model.layers), indices("heads", args.heads, model.heads)
    for prompt in prompts:  # say so before hours of work
        count = model.tokens(prompt, 0, args.tokens).shape[0]
        for query in args.queries:
            if not 0 <= query < count:
                raise ArgumentError(f"queries: expected indices in 0..{count - 1} (the prompt's tokens), got {query}")
    moves = {"yes": [True], "no": [False], "both": [False, True]}["no" if args.fixed_query else args.query_moves]
    units = [
        Unit(prompt, layer, head, query, moving, args.region, radius, args.readout)
        for prompt, layer, query, moving, radius, head in product(
            range(len(prompts)), layers, args.queries, moves, args.radii, heads
        )
    ]
    settings = {
        "model": args.model, "prompts": prompts, "layers": layers, "heads": heads, "queries": args.queries,
        "radii": args.radii, "methods": args.methods, "region": args.region, "query_moves": moves,
        "readout": args.readout, "tokens": args.tokens, "dtype": args.dtype,
    }  # fmt: skip
    run = Run(args.out, settings, args.resume)
    job = Job(args.model, tuple(prompts), tuple(args.methods), args.tokens, args.device, args.dtype)
    before, started = run.rows(), time.perf_counter()
    table = run.execute(job, units, args.jobs, args.engine, args.address, not args.no_progress)
    seconds, new = time.perf_counter() - started, (len(table) - before) / len(args.methods)
    if args.format == "parquet":
        table.to_parquet(run.out / "results.parquet")
    print(f"{len(table)} rows in {run.table}; {new:.0f} units now, {seconds:.1f} s, {new / seconds:.1f} units a second")
    return settings, run, table
