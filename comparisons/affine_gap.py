"""How tight the affine bound at the gradient slope is: its offset beside the true remainder, on MiniLM, query moving.

    python comparisons/affine_gap.py --n 5 --radius 0.0005 0.001 0.002 0.005

Prints, per radius and in units of the first-order movement |G| . r, the medians of the offset, of the largest remainder
f - f0 - G.w that search attains, and of the gap between them; at the end the log-log slope of the offset and the gap.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from attn_bounds.affine import affine_upper_bounds, gradient_slope
from attn_bounds.bounds._majorant import radii, reach
from attn_bounds.reduced import reduce
from comparisons.exactness import units
from comparisons.violations import linear_search


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=5)
    parser.add_argument("--radius", type=float, nargs="+", default=[0.0005, 0.001, 0.002, 0.005])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    offsets, gaps = [], []
    for radius in options.radius:
        reduced = reduce(units(options.n, radius, 1, options.seed))
        keys, query = gradient_slope(reduced)
        rx, ry = radii(reduced)
        movement = reach(keys, rx).sum(1) + reach(query, ry)
        offset = affine_upper_bounds(reduced, keys, query)[0] - reduced.nominal
        true = linear_search(reduced, keys, query, seed=0, steps=200) - reduced.nominal
        offsets.append(float(offset.median()))
        gaps.append(float((offset - true).median()))
        print(
            f"n={options.n} r={radius:g}: offset {float((offset / movement).median()):.4f}, remainder "
            f"{float((true / movement).median()):.4f}, gap {float(((offset - true) / movement).median()):.4f} of the "
            f"movement; {int((offset < true).sum())} violations of {reduced.size}",
            flush=True,
        )
    if len(options.radius) > 1:
        for name, values in (("offset", offsets), ("gap", gaps)):
            slope = np.polyfit(np.log(options.radius), np.log(values), 1)[0]
            print(f"log-log slope of the {name} (absolute, median) against the radius: {slope:.2f}")


if __name__ == "__main__":
    main()
