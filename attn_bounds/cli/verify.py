"""`attn-bounds verify`: VNN-COMP instances with attention, by an incomplete pass or inside alpha-beta-CROWN."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ..errors import AttnBoundsError, MissingDependencyError

DESCRIPTION = """\
Verify ONNX networks against VNN-LIB properties with the attention bounds. Without --abcrown: bounds, optimised rows
and an attack, no branch and bound. With --abcrown (or ATTN_BOUNDS_ABCROWN): the verifier of that checkout, same yaml.
Exit codes: 0 every instance has a verdict (sat or unsat), 1 some are unknown or timed out, 2 bad arguments or files,
3 an instance ended in an error."""


def add_parser(subparsers) -> None:
    """Add the subcommand and its options."""
    parser = subparsers.add_parser(
        "verify",
        help="verify VNN-COMP instances (ONNX, VNN-LIB) with attention in them",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, required=True, help="alpha-beta-CROWN yaml, e.g. verify_configs/vit.yaml"
    )
    parser.add_argument("--onnx", type=Path, help="network, .onnx or .onnx.gz")
    parser.add_argument("--vnnlib", type=Path, help="property, .vnnlib or .vnnlib.gz")
    parser.add_argument("--csv", type=Path, help="instances, one onnx,vnnlib,timeout a line, paths relative to the csv")
    parser.add_argument("--results", type=Path, help="folder for result files and results.csv; a stopped run resumes")
    parser.add_argument("--timeout", type=float, help="seconds an instance, instead of those of the csv or config")
    parser.add_argument(
        "--abcrown", type=Path, help="alpha-beta-CROWN checkout", default=os.environ.get("ATTN_BOUNDS_ABCROWN")
    )


def run(args) -> int:
    """Verify the instances, print one line each, and return the exit code."""
    try:
        from attn_bounds_abcrown import checkout, config, results
        from attn_bounds_abcrown.incomplete import Verdict, Verifier
    except ImportError as error:
        raise MissingDependencyError(
            f"{error.name}: not installed; pip install 'attn-bounds[verify]' and pip install --no-deps auto_LiRPA"
        ) from error
    text = config.read_config(args.config)
    settings = config.settings_from(text)
    todo = config.instances_from(text, args.config.parent, args.onnx, args.vnnlib, args.csv, args.timeout)
    where = checkout.check_checkout(args.abcrown) if args.abcrown else None
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
    words, verifiers = [], {}
    for instance in todo:
        name = results.instance_name(instance.onnx, instance.vnnlib)
        word = results.finished(args.results, name) if args.results else None
        if word is not None:
            print(f"{name}: {word} (from an earlier run)")
            words.append(word)
            continue
        try:
            if where is not None:
                verdict = checkout.run_checkout(
                    where, args.config, instance, args.results / f"{name}.log" if args.results else None
                )
            else:
                if instance.onnx not in verifiers:
                    verifiers = {instance.onnx: Verifier(instance.onnx, settings)}
                verdict = verifiers[instance.onnx].verify(instance.vnnlib, instance.timeout)
        except AttnBoundsError:
            if len(todo) == 1:
                raise
            verdict = Verdict("error", method=str(sys.exc_info()[1]))
        words.append(verdict.word)
        margin = f", lowest margin {verdict.margin_crown:.4g} then {verdict.margin_alpha:.4g}"
        shown = margin if verdict.margin_alpha == verdict.margin_alpha else ""
        print(f"{name}: {verdict.word}{shown}, {verdict.seconds:.1f} s ({verdict.method})", flush=True)
        if args.results:
            results.write_result(args.results, name, verdict)
    if "error" in words:
        return 3
    return 0 if set(words) <= {"sat", "unsat"} else 1
