"""`attn-bounds compare substitutions`: exact worst case over synonym lists against the box around them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from ..certify import certify
from ..errors import ArgumentError
from ..models import LoadedModel, seeded_readout
from ..problem import HeadProblem
from ..regions import TokenBox, TokenSubstitutions
from ..runs import runner, shared_model
from .options import add_model, indices, numbers, read_prompts, words

COLUMNS = [
    "model", "prompt", "head", "query", "neighbours", "method", "nominal", "exact", "upper", "relative_gap", "seconds",
    "reason",
]  # fmt: skip


def add_substitutions(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model(p)
    p.add_argument("--prompts", metavar="FILE", help="a text file, one prompt a line")
    p.add_argument("--token-ids", type=numbers(int), action="append", metavar="I,J,...", help="repeatable")
    p.add_argument("--heads", default="all", help="of the first layer: all, or numbers separated by commas")
    p.add_argument("--query", type=int, default=4, metavar="I", help="index of the query token")
    p.add_argument("--neighbours", type=numbers(int), default=[2, 8], metavar="K,...", help="substitutes a token")
    p.add_argument(
        "--methods", type=words, default=None, metavar="A,B,...", help="on the box; exact on the lists is added"
    )
    p.add_argument("--readout", type=int, default=0, metavar="SEED")
    p.add_argument("--out", required=True, metavar="DIR")
    p.add_argument("--no-progress", action="store_true")


def run_substitutions(args: argparse.Namespace, prompts: list[Any], methods: list[str]) -> pd.DataFrame:
    """Compute the table, write results.csv and summary.csv into the folder, and return the summary."""
    prompts = read_prompts(args.prompts) if args.prompts else args.token_ids or prompts
    if any(k < 1 for k in args.neighbours):
        raise ArgumentError(f"neighbours: expected at least 1, got {min(args.neighbours)}")
    runners = {method: runner(method) for method in methods}
    model = shared_model(args.model)
    heads = indices("heads", args.heads, model.heads)
    rows = []
    for number, prompt in enumerate(tqdm(prompts, disable=args.no_progress, unit="prompt")):
        for k in args.neighbours:
            lists = model.substitutes(prompt, k, args.tokens)
            if not 0 <= args.query < len(lists):
                raise ArgumentError(f"query: expected 0..{len(lists) - 1} (the prompt's tokens), got {args.query}")
            pairs = [_pair(model, head, lists, args.query, args.readout) for head in heads]
            exact = [certify(inner, "exact") for inner, _ in pairs]
            key = {"model": args.model, "prompt": number, "query": args.query, "neighbours": k}
            rows += [
                key | {"head": h, "method": "exact (lists)", "nominal": c.nominal, "exact": c.lower, "upper": c.upper,
                       "relative_gap": c.relative_gap, "seconds": c.seconds}
                for h, c in zip(heads, exact, strict=True)
            ]  # fmt: skip
            for name, run in runners.items():
                boxes = run([outer for _, outer in pairs])
                for h, c, box in zip(heads, exact, boxes, strict=True):
                    known = box.to_dict()["upper"] is not None and c.movement > 0
                    rows.append(key | {
                        "head": h, "method": f"{name} (box)", "nominal": c.nominal, "exact": c.lower,
                        "upper": box.to_dict()["upper"], "seconds": box.seconds, "reason": box.reason,
                        "relative_gap": (box.upper - c.lower) / c.movement if known else None,
                    })  # fmt: skip
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(rows, columns=COLUMNS)
    table.to_csv(out / "results.csv", index=False)
    by = table.groupby(["neighbours", "method"])
    summary = by["relative_gap"].quantile([0.25, 0.5, 0.75]).unstack()
    summary.columns = ["q25", "median", "q75"]
    summary = summary.assign(units=by.size(), seconds=by["seconds"].median()).reset_index()
    summary.to_csv(out / "summary.csv", index=False)
    return summary


def _pair(
    model: LoadedModel, head: int, lists: list[torch.Tensor], query: int, readout: int
) -> tuple[HeadProblem, HeadProblem]:
    """The problem over the lists (first entry: the text's own token), and over the boxes around them."""
    if model.causal:
        lists = lists[: query + 1]
    one, tokens = model.head(0, head), torch.stack([candidates[0] for candidates in lists])
    c = seeded_readout(readout, one.d_out)
    low, high = (torch.stack([getattr(x, side)(dim=0) for x in lists]) for side in ("amin", "amax"))
    inner = HeadProblem(one, tokens, query, c, TokenSubstitutions(lists))
    return inner, HeadProblem(one, tokens, query, c, TokenBox(low, high))
