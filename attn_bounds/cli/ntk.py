"""`attn-bounds ntk`: kernel and influence diagnostics of linearized attention on a data set."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from attn_bounds.errors import ArgumentError

if TYPE_CHECKING:
    from attn_bounds.ntk.settings import Settings

_COMMANDS = {
    "spectrum": "condition numbers, exponent and width thresholds",
    "convergence": "finite against infinite width",
    "influence": "closed-form leave-one-out and the most influential points",
    "malleability": "how often influence changes sign when training inputs are attacked",
    "poison": "accuracy lost to flipped labels",
    "defend": "what lowers malleability, and at what cost",
    "softmax": "the same for softmax attention, through its empirical NTK",
    "errors": "test errors of networks and kernels",
    "report": "all of it on one page, with a verdict per published claim",
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand `ntk` and its own subcommands."""
    parser = subparsers.add_parser("ntk", help="NTK and influence diagnostics of linearized attention")
    commands = parser.add_subparsers(dest="ntk_command", metavar="COMMAND", required=True)
    for name, text in _COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument(
            "--data", default="digits", help="digits, FILE.npz or a folder; append :3,8 for some classes only"
        )
        sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for tables, plots and JSON")
        sub.add_argument("--json", action="store_true", help="print JSON instead of tables")
        sub.add_argument("--quick", action="store_true", help="smaller sizes and fewer seeds")
        sub.add_argument("--n", type=int, help="training examples")
        sub.add_argument("--test", type=int, dest="n_test", help="test examples")
        sub.add_argument("--seeds", type=int, help="random splits")
        sub.add_argument("--tol", type=float, help="relative eigenvalue cut-off of the rank")
        sub.add_argument("--ridge", help="KIND:NUMBER with KIND value, relative, dof or accuracy; e.g. dof:50")
        sub.add_argument("--epsilon", type=float, help="size of the perturbation of each training input")
        sub.add_argument("--steps", type=int, help="PGD steps")
        sub.add_argument("--norm", choices=("linf", "l2"))
        sub.add_argument("--objective", choices=("refit", "fixed"), help="what the attack maximises the loss of")
        sub.add_argument("--bounds", type=float, nargs=2, metavar=("LOW", "HIGH"), help="attacked inputs stay in here")
        sub.add_argument("--pair", nargs=2, metavar="CLASS", help="the two classes of the convergence study")
        sub.add_argument("--widths", type=int, nargs="+", help="network widths")
        sub.add_argument("--times", type=float, nargs="+", help="training times")
        sub.add_argument("--fraction", type=float, dest="poison_fraction", help="share of labels flipped")
        sub.add_argument("--limit", type=int, help="use at most this many examples of the data")
        sub.add_argument("--image-size", type=int, default=32, help="image folders are resized to this")
        sub.add_argument("--device", default="cpu", help="torch device")
        sub.add_argument("--no-pretrained", action="store_true", help="leave out the pretrained head")


def settings_of(args: argparse.Namespace) -> Settings:
    """Build Settings from parsed arguments; ArgumentError names the option that cannot be used."""
    from attn_bounds.ntk.ridge import Ridge
    from attn_bounds.ntk.settings import Settings

    settings = Settings.quick() if args.quick else Settings()
    changes = {
        name: getattr(args, name)
        for name in ("n", "n_test", "seeds", "tol", "poison_fraction")
        if getattr(args, name) is not None
    }
    for name, least in (("n", 2), ("n_test", 1), ("seeds", 1)):
        if changes.get(name, least) < least:
            raise ArgumentError(f"{name}: expected an integer >= {least}, got {changes[name]}")
    if args.ridge is not None:
        changes["ridge"] = Ridge.parse(args.ridge)
    for name in ("pair", "widths", "times"):
        if getattr(args, name) is not None:
            changes[name] = tuple(getattr(args, name))
    if "widths" in changes:
        changes["kernel_widths"] = changes["widths"]
    if args.no_pretrained:
        changes["pretrained"] = False
    attack = {
        name: getattr(args, name)
        for name in ("epsilon", "steps", "norm", "objective")
        if getattr(args, name) is not None
    }
    if args.bounds is not None:
        attack["bounds"] = tuple(args.bounds)
    return dataclasses.replace(settings, **changes, attack=dataclasses.replace(settings.attack, **attack))


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return its exit code. Raises: AttnBoundsError, naming the option at fault."""
    from attn_bounds.ntk.data import load_data
    from attn_bounds.ntk.report import report, run_study

    settings = settings_of(args)
    data = load_data(args.data, limit=args.limit, image_size=args.image_size)
    try:
        data = data.to(args.device)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"device: cannot use {args.device!r} ({error})") from error
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"out: cannot make the folder {args.out} ({error})") from error
    progress = not args.json and sys.stderr.isatty()
    if args.ntk_command == "report":
        page, found = report(data, settings, args.out, progress=not args.json)
        if args.json:
            print((args.out / "report.json").read_text())
        else:
            for v in found:
                print(f"{v.verdict.upper()}: {v.claim}\n    published {v.published}\n    here      {v.measured}")
            print(f"\n{page}")
        return 0
    study = run_study(args.ntk_command, data, settings, args.out, progress=progress)
    if args.json:
        print(json.dumps(study.to_dict(), default=str))
        return 0
    print(study.title)
    for note in study.notes:
        print(f"  {note}")
    for title, table in study.tables.items():
        print(f"\n{title}\n{table.to_string(index=False, na_rep='', float_format=lambda x: f'{x:.4g}')}")
    print(f"\n{args.out}")
    return 0
