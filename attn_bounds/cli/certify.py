"""`attn-bounds certify`: the worst case of one head at one query."""

from __future__ import annotations

import argparse
import json

from ..certify import METHODS, certify
from ..errors import ArgumentError
from ..models import load_model
from .options import IMAGE_FILES, add_model, numbers, one_source


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the subcommand."""
    p = subparsers.add_parser("certify", help="the worst case of one head at one query")
    add_model(p)
    p.add_argument("--text", help="the prompt")
    p.add_argument("--token-ids", type=numbers(int), metavar="I,J,...", help="the prompt as token ids")
    p.add_argument("--image", metavar="FILE", help=f"for a ViT: {IMAGE_FILES}")
    p.add_argument("--layer", type=int, required=True)
    p.add_argument("--head", type=int, required=True)
    p.add_argument("--query", type=int, required=True, help="index of the query's token")
    p.add_argument("--radius", type=float, required=True, help="ball: times each token's norm; box: half-width")
    p.add_argument("--region", choices=["ball", "box"], default="ball")
    p.add_argument("--fixed-query", action="store_true", help="hold the query's token still")
    p.add_argument("--readout", type=int, default=0, metavar="SEED", help="seed of the random unit readout")
    p.add_argument("--method", default="best", help=f"one of {', '.join(METHODS)}")
    p.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Certify and print."""
    if args.method not in METHODS:
        raise ArgumentError(f"method: expected one of {', '.join(METHODS)}, got {args.method!r}")
    model = load_model(args.model)
    prompt = one_source(model, {"--text": args.text, "--token-ids": args.token_ids, "--image": args.image})
    problem = model.problem(
        prompt, args.layer, args.head, args.query, args.radius,
        args.region, args.readout, not args.fixed_query, args.tokens,
    )  # fmt: skip
    c = certify(problem, args.method)
    if args.json:
        print(json.dumps(c.to_dict()))
        return 0
    known = c.to_dict()["upper"] is not None
    print(f"nominal       {c.nominal: .12g}")
    print(f"lower         {c.lower: .12g}   attained; moves by {c.movement:.3g}")
    print(f"upper         {c.upper: .12g}   proved by {c.method}" if known else f"upper          none: {c.reason}")
    print(f"relative gap  {c.relative_gap: .3g}{'   (exact)' if c.is_exact else ''}")
    print(f"seconds       {c.seconds: .3g}")
    return 0
