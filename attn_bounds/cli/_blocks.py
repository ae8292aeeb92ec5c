"""`attn-bounds compare block-residual`: second-order terms of whole blocks beside CROWN's bound."""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from ..errors import ArgumentError, MissingDependencyError
from ..models import LoadedModel, seeded_readout
from ..residual import BlockReadout, block_of, block_residual
from ..runs import shared_model
from .options import add_model, indices, numbers, read_prompts

KEYS = ["prompt", "layer", "position", "readout", "radius"]
COLUMNS = [
    "model", *KEYS, "attained", "second_order", "per_operation", "per_operation_split", "effective_rank", "crown",
    "crown_split", "seconds", "crown_seconds", "by_operation",
]  # fmt: skip


def add_blocks(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model(p)
    p.add_argument("--prompts", metavar="FILE", help="a text file, one prompt a line")
    p.add_argument("--token-ids", type=numbers(int), action="append", metavar="I,J,...", help="repeatable")
    p.add_argument("--layers", default="all", help="all, or numbers separated by commas")
    p.add_argument("--position", type=int, default=-1, help="of the token that is read, among the kept ones")
    p.add_argument("--readouts", type=int, default=4, metavar="N", help="random unit readouts a block")
    p.add_argument("--radii", type=numbers(float), default=[0.001], metavar="R,S,...")
    p.add_argument("--no-crown", action="store_true", help="leave the verifier's bound out")
    p.add_argument("--out", required=True, metavar="DIR")
    p.add_argument("--resume", action="store_true")
    p.add_argument("--no-progress", action="store_true")
    p.set_defaults(tokens=4)


def run_blocks(args: argparse.Namespace, prompts: list[Any]) -> None:
    """Measure every unit that the table lacks, one row as it comes."""
    if args.prompts is not None and args.token_ids is not None:
        raise ArgumentError("prompts: expected either --prompts FILE or --token-ids, got both")
    prompts = read_prompts(args.prompts) if args.prompts else args.token_ids or prompts
    if any(not (math.isfinite(r) and r > 0) for r in args.radii):
        raise ArgumentError(f"radii: expected finite numbers above 0, got {args.radii}")
    if args.readouts < 1:
        raise ArgumentError(f"readouts: expected at least 1, got {args.readouts}")
    crown = None if args.no_crown else _crown()
    model = shared_model(args.model)
    layers = indices("layers", args.layers, model.layers)
    for layer in layers:
        block_of(model.model, layer)  # refuses early what it cannot read
    out = Path(args.out)
    table = out / "results.csv"
    if table.exists() and not args.resume:
        raise ArgumentError(f"out: {out} already holds a run; add --resume to continue it, or choose another")
    out.mkdir(parents=True, exist_ok=True)
    done = _done(table)
    units = list(product(range(len(prompts)), layers, range(args.readouts), args.radii))
    for prompt, layer, readout, radius in tqdm(units, disable=args.no_progress, unit="unit"):
        stream = model.stream(prompts[prompt], layer, args.tokens)
        position = args.position % stream.shape[0]
        if (prompt, layer, position, readout, radius) in done:
            continue
        row = _row(model, layer, stream, position, readout, radius, crown)
        row |= {"model": args.model, "prompt": prompt, "layer": layer, "position": position, "readout": readout}
        _append(table, row | {"radius": radius})


def _crown() -> Any:
    try:
        return import_module("attn_bounds_lirpa.blocks").crown_upper
    except ImportError as error:
        raise MissingDependencyError(
            f"block-residual: CROWN's bound needs auto_LiRPA 0.7 and the plug-in ({error}); or add --no-crown"
        ) from None


def _row(
    model: LoadedModel, layer: int, stream: Any, position: int, readout: int, radius: float, crown: Any
) -> dict[str, Any]:
    g = BlockReadout(block_of(model.model, layer), stream, position, seeded_readout(readout, model.width))
    started = time.perf_counter()
    found = block_residual(g, radius)
    between = time.perf_counter()
    row: dict[str, Any] = {
        "attained": found.attained, "second_order": found.second_order, "per_operation": found.per_operation,
        "per_operation_split": found.per_operation_split, "effective_rank": found.effective_rank,
        "by_operation": json.dumps(found.by_operation), "seconds": between - started,
    }  # fmt: skip
    if crown is not None:
        bounds = {"crown": crown(g, radius), "crown_split": crown(g, radius, split_softmax=True)}
        row |= {name: value for name, value in bounds.items() if math.isfinite(value)}
        row["crown_seconds"] = (time.perf_counter() - between) / 2
    return row


def _done(table: Path) -> set[tuple]:
    """The units that are written; a last line without an end is cut."""
    if not table.exists():
        with table.open("w", newline="") as file:
            csv.writer(file).writerow(COLUMNS)
        return set()
    text = table.read_text()
    table.write_text(text[: text.rfind("\n") + 1])
    rows = pd.read_csv(table)
    return set(rows[KEYS].itertuples(index=False, name=None))


def _append(table: Path, row: dict[str, Any]) -> None:
    with table.open("a", newline="") as file:
        csv.writer(file).writerow([row.get(column, "") for column in COLUMNS])
