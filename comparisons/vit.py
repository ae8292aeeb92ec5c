"""Margins and times on the VNN-COMP 2023 ViT benchmark: repaired CROWN, alpha-CROWN and this plug-in in one run.

    PYTHONPATH=path/to/auto_LiRPA:plugins:. python comparisons/vit.py DATA --numbers 4021 7308 1159 388
    PYTHONPATH=path/to/auto_LiRPA:plugins:. python comparisons/vit.py DATA --one-pass

DATA holds onnx/, vnnlib/ and instances.csv. Lowest margins over the nine other classes; > 0 proves the property.
`alpha` is CROWN-Optimized of the graph with only the softmax repaired (intermediate bounds optimised with the outputs,
as alpha-beta-CROWN does at its root), `ours` one pass, `optimised` the row-by-row optimisation and ReLU splits of the
incomplete verifier, which stop when done or after `--seconds`. Times are processor seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import resource
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from attn_bounds_abcrown.incomplete import Settings, Verifier, box_and_rows
from attn_bounds_abcrown.vnnlib_reader import read_vnnlib
from tqdm import tqdm


def timed(function, *args, **kwargs):
    """The function's value and the processor seconds it took."""
    start = time.process_time()
    value = function(*args, **kwargs)
    return value, time.process_time() - start


def crown(network, x, C):
    """Lowest margin of one CROWN pass."""
    with torch.no_grad():
        return network.compute_bounds(x=(x,), C=C, method="CROWN", bound_upper=False)[0].min().item()


def alpha_crown(network, x, C, iterations):
    """Lowest margin after alpha-CROWN."""
    network.bound_opts["optimize_bound_args"].update(iteration=iterations, lr_alpha=0.5)
    with contextlib.redirect_stdout(io.StringIO()):
        lower = network.compute_bounds(x=(x,), C=C, method="CROWN-Optimized", bound_upper=False)[0]
    return lower.min().item()


def main() -> None:
    """Measure, print the table and the medians, write the csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="pgd_2_3_16")
    parser.add_argument("--numbers", nargs="*", help="instance numbers; default: all of the model")
    parser.add_argument("--alpha-iterations", type=int, default=10, help="0 leaves alpha-CROWN out")
    parser.add_argument("--one-pass", action="store_true", help="one pass of CROWN of each kind, nothing optimised")
    parser.add_argument("--seconds", type=float, default=60.0, help="wall time of the optimisation, splits included")
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    files = sorted((args.data / "vnnlib").glob(f"{args.model}_*.vnnlib.gz"))
    if args.numbers:
        files = [args.data / "vnnlib" / f"{args.model}_{number}.vnnlib.gz" for number in args.numbers]
    onnx = args.data / "onnx" / f"{args.model}.onnx.gz"
    ours = Verifier(onnx, Settings(), guard=False)
    stock = None if args.no_stock else Verifier(onnx, Settings(graph="repair_softmax"), guard=False)
    rows = []
    for path in tqdm(files):
        prop = read_vnnlib(path)
        x, C, _ = box_and_rows(prop, ours.shape, ours.dtype)
        row = {"instance": path.name.split(".")[0]}
        if stock is not None:
            row["crown"], row["crown_s"] = timed(crown, stock.network, x, C)
            if args.alpha_iterations and not args.one_pass:
                row["alpha"], row["alpha_s"] = timed(alpha_crown, stock.network, x, C, args.alpha_iterations)
        row["ours"], row["ours_s"] = timed(crown, ours.network, x, C)
        if not args.one_pass:
            (_, best, row["how"]), row["optimised_s"] = timed(ours.margins, prop, time.monotonic() + args.seconds)
            row["optimised"] = best.min()
        row["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append(row)
        if args.out:
            pd.DataFrame(rows).to_csv(args.out, index=False)
    table = pd.DataFrame(rows)
    print(table.round(4).to_string(index=False))
    print("medians:", table.median(numeric_only=True).round(4).to_dict())
    verified = {name: int(np.sum(table[name] > 0)) for name in ("crown", "alpha", "ours", "optimised") if name in table}
    print(f"verified of {len(table)}:", verified)


if __name__ == "__main__":
    main()
