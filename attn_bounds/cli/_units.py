"""The units of a run and how it is computed: the options that `sweep` and `compare heads` share."""

from __future__ import annotations

import argparse
import math
from itertools import product
from typing import Any

import pandas as pd

from ..errors import ArgumentError
from ..models import DTYPES
from ..runs import COLUMNS, RUN_METHODS, HeadsJob, Unit, runner, shared_model
from ..tables import Run
from ._running import add_running, check_running, execute
from .options import add_model, add_prompts, indices, numbers, prompts_of, words


def add_units(p: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the options; `defaults` sets other defaults than those of a sweep."""
    add_model(p)
    add_prompts(p, images=True)
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
    p.add_argument("--device", help="cpu, cuda, ... (default: cpu)")
    p.add_argument("--dtype", choices=DTYPES, default="float64", help="of the model's pass; bounds are float64 always")
    add_running(p)
    p.set_defaults(**defaults)


def run_units(args: argparse.Namespace, kind: str, default: list[str] | None = None) -> tuple[Run, pd.DataFrame]:
    """Check the options, compute what is missing of the run, and return it and its table.

    Args: kind of the run, noted in its settings; default prompts where none are given.
    """
    if not args.methods:
        raise ArgumentError(f"methods: expected some of {', '.join(RUN_METHODS)}, got none")
    for method in args.methods:
        runner(method)
    for radius in args.radii:
        if not 0 <= radius < math.inf:
            raise ArgumentError(f"radii: expected finite numbers of at least 0, got {radius:g}")
    if args.readout < 0:
        raise ArgumentError(f"readout: expected a seed of at least 0, got {args.readout}")
    check_running(args)
    for name in ("radii", "queries", "methods"):  # a unit named twice would be two rows of the same
        if getattr(args, name) is not None:
            setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    model = shared_model(args.model, args.dtype, args.device)
    prompts = prompts_of(args, model, default)
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
        "kind": kind, "model": args.model, "prompts": prompts, "layers": layers, "heads": heads,
        "queries": args.queries, "radii": args.radii, "methods": args.methods, "region": args.region,
        "query_moves": moves, "readout": args.readout, "tokens": args.tokens, "dtype": args.dtype,
    }  # fmt: skip
    job = HeadsJob(args.model, prompts, tuple(args.methods), args.tokens, args.device, args.dtype)
    return execute(args, settings, COLUMNS, job, units)
