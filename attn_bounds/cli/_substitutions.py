"""`attn-bounds compare substitutions`: exact worst case over synonym lists against the box around them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from ..certify import certify_many
from ..errors import ArgumentError
from ..models import LoadedModel, seeded_readout
from ..problem import HeadProblem, SearchResult
from ..regions import TokenBox, TokenSubstitutions
from ..runs import beside_best, runner, shared_model
from ..tables import Row
from ._running import add_running, check_running, execute
from .options import add_model, add_prompts, indices, numbers, prompts_of, refuse_images, words

KIND = "substitutions"
COLUMNS = [
    "model", "prompt", "neighbours", "head", "query", "readout", "method", "nominal", "exact", "upper", "relative_gap",
    "seconds", "reason",
]  # fmt: skip


def add_substitutions(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model(p)
    add_prompts(p)
    p.add_argument("--heads", default="all", help="of the first layer: all, or numbers separated by commas")
    p.add_argument("--query", type=int, default=4, metavar="I", help="index of the query token")
    p.add_argument("--neighbours", type=numbers(int), default=[2, 8], metavar="K,...", help="substitutes a token")
    p.add_argument(
        "--methods", type=words, default=None, metavar="A,B,...", help="on the box; exact on the lists is added"
    )
    p.add_argument("--readout", type=int, default=0, metavar="SEED")
    add_running(p)


@dataclass(frozen=True)
class ListUnit:
    """One head of the first layer, every token with so many substitutes."""

    prompt: int
    neighbours: int
    head: int
    query: int
    readout: int


@dataclass(frozen=True)
class ListsJob:
    """Rows of a unit: exact over the lists, then every method on the box around them."""

    model: str
    prompts: tuple[Any, ...]
    methods: tuple[str, ...]
    tokens: int | None
    heads: int  # of a prompt and a number of substitutes: they share the lists, and are one batch

    @property
    def chunk(self) -> int:
        """Units a chunk."""
        return self.heads

    @property
    def per_unit(self) -> int:
        """Rows a unit."""
        return 1 + len(self.methods)

    def __call__(self, units: Sequence[ListUnit]) -> list[Row]:
        """The rows of a chunk, whose units share prompt and number of substitutes."""
        model = shared_model(self.model)
        lists = model.substitutes(self.prompts[units[0].prompt], units[0].neighbours, self.tokens)
        pairs = [_pair(model, unit, lists) for unit in units]
        exact = certify_many([inner for inner, _ in pairs], "exact")
        boxes = {name: runner(name)([outer for _, outer in pairs]) for name in self.methods}
        for (_, outer), c in zip(pairs, exact, strict=True):  # the box holds the lists, so what they attain refutes too
            outer.note(SearchResult(c.lower, c.maximizer, c.maximizer_query))
        rows: list[Row] = []
        for i, (unit, c) in enumerate(zip(units, exact, strict=True)):
            key: Row = {"model": self.model, **asdict(unit), "nominal": c.nominal, "exact": c.lower}
            answers = {"exact (lists)": c} | {
                f"{name} (box)": beside_best(found[i], pairs[i][1]) for name, found in boxes.items()
            }
            for method, answer in answers.items():
                upper = answer.to_dict()["upper"]  # None where there is no bound
                known = upper is not None and c.movement > 0
                rows.append(key | {
                    "method": method, "upper": upper, "seconds": answer.seconds, "reason": answer.reason,
                    "relative_gap": (upper - c.lower) / c.movement if known else None,
                })  # fmt: skip
        return rows


def run_substitutions(args: argparse.Namespace, default: list[str], methods: list[str]) -> None:
    """Check the options and compute what the table lacks."""
    methods = list(dict.fromkeys(methods))
    for method in methods:
        runner(method)
    if args.readout < 0:
        raise ArgumentError(f"readout: expected a seed of at least 0, got {args.readout}")
    check_running(args)
    model = shared_model(args.model)
    refuse_images(model, KIND)
    heads, prompts = indices("heads", args.heads, model.heads), prompts_of(args, model, default)
    neighbours = list(dict.fromkeys(args.neighbours))
    for prompt, k in product(prompts, neighbours):  # say so before hours of work
        count = len(model.substitutes(prompt, k, args.tokens))
        if not 0 <= args.query < count:
            raise ArgumentError(f"query: expected 0..{count - 1} (the prompt's tokens), got {args.query}")
    units = [
        ListUnit(prompt, k, head, args.query, args.readout)
        for prompt, k, head in product(range(len(prompts)), neighbours, heads)
    ]
    settings = {
        "kind": KIND, "model": args.model, "prompts": prompts, "tokens": args.tokens, "heads": heads,
        "query": args.query, "neighbours": neighbours, "methods": methods, "readout": args.readout,
    }  # fmt: skip
    execute(args, settings, COLUMNS, ListsJob(args.model, prompts, tuple(methods), args.tokens, len(heads)), units)


def _pair(model: LoadedModel, unit: ListUnit, lists: list[torch.Tensor]) -> tuple[HeadProblem, HeadProblem]:
    """The problem over the lists (first entry: the text's own token), and over the boxes around them."""
    if model.causal:
        lists = lists[: unit.query + 1]
    one, tokens = model.head(0, unit.head), torch.stack([candidates[0] for candidates in lists])
    c = seeded_readout(unit.readout, one.d_out)
    low, high = (torch.stack([getattr(x, side)(dim=0) for x in lists]) for side in ("amin", "amax"))
    inner = HeadProblem(one, tokens, unit.query, c, TokenSubstitutions(lists))
    return inner, HeadProblem(one, tokens, unit.query, c, TokenBox(low, high))
