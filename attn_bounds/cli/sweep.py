"""`attn-bounds sweep`: heads x queries x prompts x radii x methods into one table."""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

from .._arrays import checked_device
from ..certify import METHODS
from ..errors import ArgumentError
from ..models import load_model
from ..plots import gap_against_radius
from ..runs import Run, Unit, runner, summarise
from .options import add_model, indices, known_methods, numbers, read_prompts, words


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    p = subparsers.add_parser("sweep", help="heads x queries x prompts x radii x methods into one table")
    add_model(p)
    p.add_argument("--prompts", metavar="FILE", help="a text file, one prompt a line")
    p.add_argument("--token-ids", type=numbers(int), metavar="I,J,...", help="one prompt as token ids")
    p.add_argument("--layers", default="all", help="all, or numbers separated by commas")
    p.add_argument("--heads", default="all", help="all, or numbers separated by commas")
    p.add_argument("--queries", type=numbers(int), default=[0], metavar="I,J,...", help="indices of query tokens")
    p.add_argument("--radii", type=numbers(float), default=[0.001, 0.01], metavar="R,S,...")
    p.add_argument("--methods", type=words, default=["best"], metavar="A,B,...", help=f"of {', '.join(METHODS)}")
    p.add_argument("--region", choices=["ball", "box"], default="ball")
    p.add_argument("--query-moves", choices=["yes", "no", "both"], default="yes")
    p.add_argument("--fixed-query", action="store_true", help="short for --query-moves no")
    p.add_argument("--readout", type=int, default=0, metavar="SEED")
    p.add_argument("--out", required=True, metavar="DIR")
    p.add_argument("--resume", action="store_true", help="continue a run that was stopped")
    p.add_argument("--format", choices=["csv", "parquet"], default="csv", help="parquet: a results.parquet as well")
    p.add_argument("--device", help="cpu, cuda, ... (default: cpu)")
    p.add_argument("--no-progress", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Run the sweep, then write summary.json and gap.png."""
    known_methods(args.methods, METHODS)
    if (args.prompts is None) == (args.token_ids is None):
        raise ArgumentError("prompts: expected either --prompts FILE or --token-ids, got both or neither")
    if any(r < 0 for r in args.radii):
        raise ArgumentError(f"radii: expected at least 0, got {min(args.radii):g}")
    if args.device is not None:
        checked_device(args.device)
    prompts = read_prompts(args.prompts) if args.prompts else [args.token_ids]
    model = load_model(args.model)
    layers, heads = indices("layers", args.layers, model.layers), indices("heads", args.heads, model.heads)
    for prompt, query in product(prompts, args.queries):  # say so before hours of work
        count = model.tokens(prompt, 0, args.tokens).shape[0]
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
        "readout": args.readout, "tokens": args.tokens,
    }  # fmt: skip
    out = Run(args.out, settings, args.resume)
    runners = {method: runner(method, args.device) for method in args.methods}
    table = out.execute(model, prompts, units, runners, args.tokens, not args.no_progress)
    summary = {"settings": settings, "rows": len(table), "results": summarise(table)}
    (Path(args.out) / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    if args.format == "parquet":
        table.to_parquet(Path(args.out) / "results.parquet")
    gap_against_radius(table, Path(args.out) / "gap.png")
    print(f"{len(table)} rows in {out.table}; summary.json and gap.png beside it")
    return 0
