"""What the moment relaxations reach on MiniLM: gaps, slopes, time, the price of rigour, the secant slack; and a hunt.

    python comparisons/moment.py fixed --radius 0.002 0.005 0.01 0.02      # 72 heads, against the exact value
    python comparisons/moment.py moving --radius 0.002 --heads 12          # against the best value that search attains
    python comparisons/moment.py time --n 5 10 20 40                       # CPU seconds a unit, query moving
    python comparisons/moment.py random --count 2000 --seed 0              # small heads, saturated ones included

gap = (upper - max f) / (max f - f at the nominal tokens); cost = recovered upper minus the solver's own value, in the
same unit; slope = of the absolute gap against the radius, log-log, median over units, taken where the gap is above 1e-6
at both ends. "plain" leaves the products of exp's tangent and chord with the region out.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import torch

from attn_bounds.bounds.moment import moment
from attn_bounds.bounds.slack import gap_bound
from attn_bounds.exact import exact
from attn_bounds.head import AttentionHead
from attn_bounds.problem import HeadProblem
from attn_bounds.reduced import Reduced, reduce
from attn_bounds.regions import TokenBall
from attn_bounds.search import ascend
from comparisons.exactness import TEXTS, minilm
from comparisons.violations import random_batches

LOADED: list = []


def units(n: int, radius: float, heads: range, moves: bool, seed: int) -> Reduced:
    """Heads (layer, head) = divmod(h, 12) on the first n tokens of a text, a random query and a random unit readout."""
    if not LOADED:
        LOADED.extend(minilm())
    model, tokenizer = LOADED
    rng = np.random.default_rng(seed)
    ids = tokenizer(TEXTS[seed % len(TEXTS)] + " " + " ".join(TEXTS), return_tensors="pt")
    with torch.no_grad():
        states = model(**ids, output_hidden_states=True).hidden_states
    problems = []
    for h in heads:
        readout = rng.standard_normal(384)
        layer, index = divmod(h, 12)
        one = AttentionHead.from_bert(model, layer, index)
        query = int(rng.integers(n))
        where, c = TokenBall(radius), readout / np.linalg.norm(readout)
        problems.append(HeadProblem(one, states[layer][0][:n], query, c, where, query_moves=moves))
    return reduce(problems)


def gaps(options: argparse.Namespace, moves: bool) -> None:
    heads = range(0, 72, 72 // options.heads)
    absolute: dict[tuple, list[torch.Tensor]] = {}
    for radius in options.radius:
        reduced = units(options.n[0], radius, heads, moves, options.seed)
        x, y, f = ascend(reduced, starts=8)
        top = f if moves else torch.maximum(f, exact(reduced).upper - 2 * reduced.rounding)
        parts = gap_bound(reduced, (x, y), top)
        movement = top - reduced.nominal
        uppers = {}
        for order in (2, 3):
            for products in (True, False):
                start = time.process_time()
                bound = moment(reduced, order, products=products, point=(x, y))
                seconds = (time.process_time() - start) / reduced.size
                gap = (bound.upper - top) / movement
                cost = (bound.upper - bound.witness["solver_value"]) / movement
                slack = (bound.upper - top) / parts["secant"].clamp_min(1e-300)
                uppers[order, products] = bound.upper
                absolute.setdefault((order, products), []).append(gap * movement)
                above = ((bound.upper - top) > parts["secant"] + 1e-6 * movement).sum()
                proven = ((bound.upper - top) <= parts["total"] + 1e-6 * movement).all()
                print(
                    f"r={radius:<6g} moment{order}{'' if products else ' plain':6s} gap median {gap.median():.1e} "
                    f"worst {gap.max():.1e} least {gap.min():.1e} | cost median {cost.median():+.1e} worst "
                    f"{cost.max():+.1e} | over secant slack: median ratio {slack.median():.2f}, units above it "
                    f"{int(above)}, proven bound holds {bool(proven)} | {seconds:.3f} cpu-s a unit"
                )
        for products in (True, False):
            assert (uppers[3, products] <= uppers[2, products]).all()
    ends = np.log(options.radius[-1] / options.radius[0])
    for (order, products), rows in absolute.items():
        seen = (rows[0] / movement > 1e-7) & (rows[-1] / movement > 1e-6)
        slope = (torch.log(rows[-1] / rows[0]) / ends)[seen]
        shown = f"{slope.median():.2f}" if len(slope) and ends else "-"
        print(
            f"slope of moment{order}{'' if products else ' plain'}: {shown} ({int(seen.sum())} units above the noise)"
        )


def clock(options: argparse.Namespace) -> None:
    rows = []
    for n in options.n:
        reduced = units(n, options.radius[0], range(0, 72, 72 // options.heads), True, options.seed)
        point = ascend(reduced)[:2]
        times = []
        for order in (2, 3):
            start = time.process_time()
            moment(reduced, order, point=point)
            times.append((time.process_time() - start) / reduced.size)
        rows.append(times)
        print(f"n={n:3d}  moment2 {times[0]:.3f}  moment3 {times[1]:.3f} cpu-s a unit")
    if len(rows) > 1:
        growth = np.log(np.array(rows[-1]) / np.array(rows[0])) / np.log(options.n[-1] / options.n[0])
        print(f"growth n^{growth[0]:.2f} (moment2), n^{growth[1]:.2f} (moment3)")


def hunt(options: argparse.Namespace) -> int:
    tried = bounded = violations = above = 0
    for name, reduced in random_batches(np.random.default_rng(options.seed), options.count):
        x, y, f = ascend(reduced, starts=8, seed=options.seed)
        best = f
        if reduced.query_fixed:
            true = exact(reduced)
            best = torch.where(torch.isfinite(true.upper), torch.maximum(f, true.upper - 3 * reduced.rounding), f)
        second, third = (moment(reduced, order, point=(x, y)).upper for order in (2, 3))
        bad = (second < best) | (third < best)
        tried, bounded = tried + reduced.size, bounded + int(torch.isfinite(third).sum())
        violations, above = violations + int(bad.sum()), above + int((third > second).sum())
        if bad.any():
            print(f"VIOLATION {name}: problems {bad.nonzero()[:, 0].tolist()}", file=sys.stderr)
    print(f"{tried} tried, {bounded} bounded, {violations} violations, moment3 above moment2: {above}")
    return int(violations > 0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fixed", "moving", "time", "random"))
    parser.add_argument("--radius", type=float, nargs="+", default=[0.002, 0.02])
    parser.add_argument("--n", type=int, nargs="+", default=[5])
    parser.add_argument("--heads", type=int, default=72)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.what == "random":
        return hunt(options)
    if options.what == "time":
        clock(options)
    else:
        gaps(options, options.what == "moving")
    return 0


if __name__ == "__main__":
    sys.exit(main())
