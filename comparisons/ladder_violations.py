"""Hunt for violations of the closed-form and exact bounds: random small heads, any region.

    python comparisons/ladder_violations.py --count 100000 --seed 0

Per problem: interval, first-order and vertex (and exact, where the query is fixed) against the best value that search
attains, the order interval >= first-order >= vertex >= exact, and substitutions against their coordinate search. The
problems are those of `violations.py`. Prints one line per kind; exits with 1 on any violation.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import numpy as np
import torch
from violations import random_batches

from attn_bounds import AttentionHead, HeadProblem, TokenSubstitutions, search
from attn_bounds.bounds.first_order import first_order
from attn_bounds.bounds.interval import interval
from attn_bounds.bounds.vertex import vertex
from attn_bounds.exact import exact, exact_lists
from attn_bounds.reduced import Reduced
from attn_bounds.search import ascend


def ladder_violations(reduced: Reduced, seed: int) -> dict[str, int]:
    """Violations of each kind in a batch."""
    attained = ascend(reduced, starts=6, seed=seed)[2]
    rungs = {"interval": interval(reduced), "first-order": first_order(reduced), "vertex": vertex(reduced)}
    if reduced.query_fixed:
        rungs["exact"] = exact(reduced)
    uppers = {name: bound.upper for name, bound in rungs.items()}
    found = {name: int((upper < attained).sum()) for name, upper in uppers.items()}
    slack = 4 * reduced.rounding  # two bounds may differ by both their margins
    for (looser, high), (tighter, low) in zip(list(uppers.items()), list(uppers.items())[1:], strict=False):
        known = torch.isfinite(low)
        found[f"{tighter} above {looser}"] = int((known & (low > high + slack)).sum())
    return found


def list_violations(rng: np.random.Generator) -> dict[str, int]:
    """One random problem over substitutions: its exact maximum against coordinate search."""
    n, d, h = (int(rng.integers(1, k)) for k in (5, 5, 4))
    head = AttentionHead(*(rng.standard_normal((3, h, d)) * 10 ** rng.uniform(-1, 1)))
    z = rng.standard_normal((n, d))
    lists = [z[j] + rng.standard_normal((int(rng.integers(1, 4)), d)) for j in range(n)]
    problem = HeadProblem(head, z, int(rng.integers(n)), rng.standard_normal(h), TokenSubstitutions(lists))
    return {"substitutions": int(exact_lists(problem).upper < search(problem, starts=2).value)}


def main(arguments: list[str] | None = None) -> int:
    """Hunt and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rng = np.random.default_rng(options.seed)
    tried: Counter = Counter()
    violated: Counter = Counter()
    for name, reduced in random_batches(rng, options.count):
        tried[name] += reduced.size
        for what, count in ladder_violations(reduced, int(rng.integers(1 << 30))).items():
            violated[f"{name}: {what}"] += count
    for _ in range(options.count // 50):
        tried["substitutions"] += 1
        for what, count in list_violations(rng).items():
            violated[what] += count
    for name in sorted(tried):
        print(f"{name:28s} {tried[name]:8d} tried")
    for what, count in violated.items():
        if count:
            print(f"VIOLATION {what}: {count}", file=sys.stderr)
    print(f"total {sum(tried.values())} tried, {sum(violated.values())} violations")
    return int(sum(violated.values()) > 0)


if __name__ == "__main__":
    sys.exit(main())
