"""`attn-bounds compare block-residual`: second-order terms of whole blocks beside CROWN's bound."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import product
from typing import Any

from ..errors import ArgumentError, MissingDependencyError
from ..models import LoadedModel, seeded_readout
from ..residual import BlockReadout, block_of, block_residual
from ..runs import shared_model
from ..tables import Row
from ._running import add_running, check_running, execute
from .options import add_model, add_prompts, indices, numbers, prompts_of, refuse_images

KIND = "block-residual"
COLUMNS = [
    "model", "prompt", "layer", "position", "readout", "radius", "attained", "second_order", "per_operation",
    "per_operation_split", "effective_rank", "crown", "crown_split", "seconds", "crown_seconds", "by_operation",
]  # fmt: skip


def add_blocks(p: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model(p)
    add_prompts(p)
    p.add_argument("--layers", default="all", help="all, or numbers separated by commas")
    p.add_argument("--position", type=int, default=-1, help="of the token that is read, among the kept ones; -1: last")
    p.add_argument("--readouts", type=int, default=4, metavar="N", help="random unit readouts a block")
    p.add_argument("--radii", type=numbers(float), default=[0.001], metavar="R,S,...")
    p.add_argument("--no-crown", action="store_true", help="leave the verifier's bound out")
    add_running(p)
    p.set_defaults(tokens=4)


@dataclass(frozen=True)
class BlockUnit:
    """One readout of one block."""

    prompt: int
    layer: int
    position: int
    readout: int
    radius: float


@dataclass(frozen=True)
class BlocksJob:
    """One row a unit: what `block_residual` measures, and CROWN's bounds."""

    model: str
    prompts: tuple[Any, ...]
    tokens: int | None
    crown: bool

    @property
    def chunk(self) -> int:
        """Units a chunk: nothing is shared between units."""
        return 1

    @property
    def per_unit(self) -> int:
        """Rows a unit."""
        return 1

    def __call__(self, units: Sequence[BlockUnit]) -> list[Row]:
        """The rows of a chunk."""
        model, crown = shared_model(self.model), _crown() if self.crown else None
        return [self._row(model, unit, crown) for unit in units]

    def _row(self, model: LoadedModel, unit: BlockUnit, crown: Any) -> Row:
        stream = model.stream(self.prompts[unit.prompt], unit.layer, self.tokens)
        c = seeded_readout(unit.readout, model.width)
        g = BlockReadout(block_of(model.model, unit.layer), stream, unit.position, c)
        started = time.perf_counter()
        found = block_residual(g, unit.radius)
        between = time.perf_counter()
        row: Row = {
            "model": self.model, **asdict(unit), "attained": found.attained, "second_order": found.second_order,
            "per_operation": found.per_operation, "per_operation_split": found.per_operation_split,
            "effective_rank": found.effective_rank, "by_operation": json.dumps(found.by_operation),
            "seconds": between - started,
        }  # fmt: skip
        if crown is not None:
            bounds = {"crown": crown(g, unit.radius), "crown_split": crown(g, unit.radius, split_softmax=True)}
            row |= {name: value for name, value in bounds.items() if math.isfinite(value)}
            row["crown_seconds"] = (time.perf_counter() - between) / 2
        return row


def run_blocks(args: argparse.Namespace, default: list[str]) -> None:
    """Check the options and measure every unit that the table lacks."""
    if any(not (math.isfinite(r) and r > 0) for r in args.radii):
        raise ArgumentError(f"radii: expected finite numbers above 0, got {args.radii}")
    if args.readouts < 1:
        raise ArgumentError(f"readouts: expected at least 1, got {args.readouts}")
    check_running(args)
    if not args.no_crown:
        _crown()
    model = shared_model(args.model)
    refuse_images(model, KIND)
    layers = indices("layers", args.layers, model.layers)
    for layer in layers:
        block_of(model.model, layer)  # refuses early what it cannot read
    prompts, positions = prompts_of(args, model, default), []
    for prompt in prompts:
        count = model.stream(prompt, 0, args.tokens).shape[0]
        if not -count <= args.position < count:
            raise ArgumentError(f"position: expected {-count}..{count - 1} (the kept tokens), got {args.position}")
        positions.append(args.position % count)
    units = [
        BlockUnit(prompt, layer, positions[prompt], readout, radius)
        for prompt, layer, readout, radius in product(
            range(len(prompts)), layers, range(args.readouts), dict.fromkeys(args.radii)
        )
    ]
    settings = {
        "kind": KIND, "model": args.model, "prompts": prompts, "tokens": args.tokens, "layers": layers,
        "position": args.position, "readouts": args.readouts, "radii": args.radii, "crown": not args.no_crown,
    }  # fmt: skip
    execute(args, settings, COLUMNS, BlocksJob(args.model, prompts, args.tokens, not args.no_crown), units)


def _crown() -> Any:
    try:
        return import_module("attn_bounds_lirpa.blocks").crown_upper
    except ImportError as error:
        raise MissingDependencyError(
            f"block-residual: CROWN's bound needs auto_LiRPA 0.7 and the plug-in ({error}); or add --no-crown"
        ) from None
