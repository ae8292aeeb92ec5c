"""Rates of the Lagrangian certificate: against n, and CPU beside GPU.

    python comparisons/timing.py --n 5 64 128 256 512 1024 --radius 0.002 [--device cpu cuda]

MiniLM heads, query moving, batched; ascent and proof, not the reduction of the problems. Prints milliseconds a unit for
units closed at the first try (the others are left out), the log-log slope against n from 64 on, and for every further
device the largest difference from the first device's bound. Without a GPU it says so and runs on the CPU alone.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from attn_bounds.bounds.lagrangian import lagrangian
from attn_bounds.reduced import reduce
from comparisons.exactness import units


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, nargs="+", default=[5, 64, 128, 256])
    parser.add_argument("--radius", type=float, default=0.002)
    parser.add_argument("--device", nargs="+", default=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    devices = [name for name in options.device if name == "cpu" or torch.cuda.is_available()]
    if "cuda" in options.device and "cuda" not in devices:
        print("cuda: skipped, torch sees no GPU here")
    rates: dict[str, list[float]] = {name: [] for name in devices}
    for n in options.n:
        problems = units(n, options.radius, 1, 0)
        first: torch.Tensor | None = None
        for name in devices:
            reduced = reduce([problem.to(name) for problem in problems])
            found = lagrangian(reduced)
            movement = found.upper - reduced.nominal
            closed = found.upper - found.witness["base"] <= 1e-9 * movement
            reduced = reduced[closed.nonzero()[:, 0]]
            clock = time.process_time if name == "cpu" else time.perf_counter  # one thread: other programs do not count
            seconds = []
            for _ in range(options.repeats):
                start = clock()
                lagrangian(reduced)
                if name != "cpu":
                    torch.cuda.synchronize()
                seconds.append(clock() - start)
            rates[name].append(1e3 * min(seconds) / reduced.size)
            line = f"n={n} {name}: {rates[name][-1]:.3f} ms a unit, {reduced.size} of {len(problems)} closed at once"
            if first is None:
                first = found.upper.cpu()
            else:
                line += f", bounds differ by at most {float((found.upper.cpu() - first).abs().max()):.1e}"
            print(line, flush=True)
    for name in devices:
        pairs = [(n, rate) for n, rate in zip(options.n, rates[name], strict=True) if n >= 64]
        if len(pairs) > 1:
            slope = np.polyfit(*np.log(np.array(pairs)).T, 1)[0]
            print(f"{name}: log-log slope of the time against n, from n = {pairs[0][0]} on: {slope:.2f}")


if __name__ == "__main__":
    main()
