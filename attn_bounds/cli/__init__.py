"""The command `attn-bounds`: each subcommand is a module with `add_parser(subparsers)` and `run(args) -> int`.

Exit codes: 0 done, 2 bad arguments (one clear line), 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from ..errors import AttnBoundsError

COMMANDS = ("certify", "sweep", "compare", "demo", "ntk", "verify")


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, ModuleType]]:
    """The parser of the whole command line, and the module of each subcommand."""
    parser = argparse.ArgumentParser(
        prog="attn-bounds", description="How far can an attention head's output move when its tokens move a little?"
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: import_module(f".{name}", __name__) for name in COMMANDS}
    for module in modules.values():
        module.add_parser(subparsers)
    return parser, modules


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser, modules = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return modules[args.command].run(args)
    except AttnBoundsError as error:
        print(f"attn-bounds {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("attn-bounds: interrupted", file=sys.stderr)
        return 130
