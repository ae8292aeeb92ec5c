"""How many Lagrangian certificates the audit re-proves in ball arithmetic, on all 72 heads of MiniLM, query moving.

    python comparisons/audit.py --n 5 64 --radius 0.002 0.005 0.01

Prints, per token count and radius: certificates made and re-proved, the largest inflation (the part of a bound that
only pays for rounding) in units of the movement among exact ones, and milliseconds an audit. Exits with 1 if one is
refused.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from attn_bounds.certify import certify_many
from comparisons.exactness import units


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[5])
    parser.add_argument("--radius", type=float, nargs="+", default=[0.002, 0.005, 0.01])
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    refused = 0
    for n in options.n:
        for radius in options.radius:
            problems = units(n, radius, options.texts, options.seed, layers=options.layers)
            made = certify_many(problems, "lagrangian")
            start = time.process_time()
            proved = sum(c.verify() for c in made)
            milliseconds = 1e3 * (time.process_time() - start) / len(made)
            exact = [c for c in made if c.is_exact]
            inflation = max((c.inflation / c.movement for c in exact), default=float("nan"))
            refused += len(made) - proved
            print(
                f"n={n} r={radius:g}: {proved} of {len(made)} re-proved, {len(exact)} exact, inflation at most "
                f"{inflation:.1e} of the movement, {milliseconds:.0f} ms an audit",
                flush=True,
            )
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())
