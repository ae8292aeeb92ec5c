"""`attn-bounds compare`: every bound beside the verifiers' on the same heads, and the report of a run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..block_report import write_block_report
from ..errors import ArgumentError, MissingDependencyError
from ..list_report import write_list_report
from ..report import write_report
from ..runs import VERIFIER_METHODS, runner
from ._blocks import KIND as BLOCKS
from ._blocks import add_blocks, run_blocks
from ._substitutions import KIND as LISTS
from ._substitutions import add_substitutions, run_substitutions
from ._units import add_units, run_units

HEADS = "heads"
# The writer of each kind of run; a sweep's table is a heads table.
WRITERS = {HEADS: write_report, "sweep": write_report, BLOCKS: write_block_report, LISTS: write_list_report}
PROMPTS = [
    "The old bridge was closed after the flood, and nobody knows when it will open again.",
    "Her second novel sold far better than the first, although the critics liked it less.",
]
METHODS = [
    "search",
    "exact",
    "first-order",
    "vertex",
    "moment2",
    "moment3",
    "lagrangian",
    "ibp",
    "crown",
    "crown:stock",
    "alpha-crown",
]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the subcommand and what it compares."""
    kinds = subparsers.add_parser("compare", help="every bound beside the verifiers' on the same units").add_subparsers(
        dest="what", required=True, metavar="WHAT"
    )
    heads = kinds.add_parser("heads", help="heads x queries x prompts x radii x methods, with a report")
    add_units(heads, queries=[4], radii=[0.001, 0.002, 0.01, 0.02], methods=None, query_moves="both")
    heads.set_defaults(compare=_heads)
    blocks = kinds.add_parser("block-residual", help="second-order terms of whole blocks beside CROWN's bound")
    add_blocks(blocks)
    blocks.set_defaults(compare=_blocks)
    lists = kinds.add_parser("substitutions", help="synonym lists, exactly, against the box around them")
    add_substitutions(lists)
    lists.set_defaults(compare=_substitutions)
    report = kinds.add_parser("report", help="the Markdown and HTML page of a run, from its table")
    report.add_argument("run", metavar="DIR", help="the --out of a run")
    report.set_defaults(compare=lambda args: _report(args.run))


def run(args: argparse.Namespace) -> int:
    """Run what was asked for."""
    return args.compare(args)


def _heads(args: argparse.Namespace) -> int:
    if args.methods is None:
        args.methods = _default_methods()
    run_units(args, HEADS, PROMPTS)
    return _report(args.out)


def _blocks(args: argparse.Namespace) -> int:
    run_blocks(args, PROMPTS)
    return _report(args.out)


def _default_methods() -> list[str]:
    """All methods; without those of a verifier, and a line that says so, where it is not installed."""
    try:
        runner("crown")
    except MissingDependencyError as error:
        print(f"attn-bounds compare: without {', '.join(VERIFIER_METHODS)}: {error}", file=sys.stderr)
        return [m for m in METHODS if m.partition(":")[0] not in VERIFIER_METHODS]
    return METHODS


def _substitutions(args: argparse.Namespace) -> int:
    box = ("interval", "vertex", "lagrangian", "ibp", "crown", "alpha-crown")
    methods = args.methods or [m for m in box if m not in VERIFIER_METHODS or m in _default_methods()]
    run_substitutions(args, PROMPTS, methods)
    return _report(args.out)


def _report(folder: str) -> int:
    """Write the page of a run, of whatever kind its settings say."""
    page = WRITERS[_kind(Path(folder))](folder)
    print(f"{page}; report.md, figures and their CSVs beside it")
    return 0


def _kind(folder: Path) -> str:
    try:
        kind = json.loads((folder / "settings.json").read_text())["kind"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArgumentError(f"run: expected a folder that holds a run, got {folder} ({error})") from None
    if kind not in WRITERS:
        raise ArgumentError(f"run: expected a run of compare ({', '.join(WRITERS)}), got {kind!r} in {folder}")
    return kind
