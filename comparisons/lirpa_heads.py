"""Gaps of one MiniLM head under token balls in auto_LiRPA: CROWN (repaired softmax), alpha-CROWN, and the plug-in.

    PYTHONPATH=path/to/auto_LiRPA python comparisons/lirpa_heads.py --layers 6 --heads 12 --out results.csv

A unit is one head, five tokens, each in an L2 ball of radius r times its own norm, the last token's query moving, a
random readout. gap = bound - attained maximum; ratios are stock gap / our gap, times are of the same run.
"""

from __future__ import annotations

import argparse
import time
import warnings

import attn_bounds_lirpa
import numpy as np
import pandas as pd
import torch
from attn_bounds_lirpa import PerturbationTokenBall
from auto_LiRPA import BoundedModule, BoundedTensor

from attn_bounds.certify import search_many
from attn_bounds.models import load_model, seeded_readout
from attn_bounds.problem import HeadProblem
from attn_bounds.regions import TokenBall

TEXT = "The quick brown fox jumps over the lazy dog"
OPTIONS = {**attn_bounds_lirpa.OPTIONS, "optimize_bound_args": {"iteration": 20, "lr_alpha": 0.1}}


class Head(torch.nn.Module):
    """One attention head as a torch module, tokens (1, n, d) to mixed values (1, 1, n, d_head)."""

    def __init__(self, head):
        super().__init__()
        for name, weight, bias in (("q", head.W_Q, head.b_Q), ("k", head.W_K, head.b_K), ("v", head.W_V, head.b_V)):
            layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
            layer.weight.data, layer.bias.data = weight.clone(), bias.clone()
            setattr(self, name, layer)
        self.scale, self.width = head.scale, head.d_head

    def forward(self, x):
        q, k, v = (
            part(x).reshape(-1, x.shape[1], 1, self.width).permute(0, 2, 1, 3) for part in (self.q, self.k, self.v)
        )
        return torch.softmax(q.matmul(k.transpose(-1, -2)) * self.scale, -1).matmul(v)


def convert(head, tokens):
    """Two bounded graphs of the head: with the softmax repaired only, and with this package's operators."""
    plain, ours = (BoundedModule(Head(head), tokens, bound_opts=OPTIONS, verbose=False) for _ in range(2))
    attn_bounds_lirpa.repair_softmax(plain)
    attn_bounds_lirpa.attach(ours)
    return plain, ours


def timed(function, *args, repeats=3, **kwargs):
    """The function's value and its fastest time."""
    best = np.inf
    for _ in range(repeats):
        start = time.perf_counter()
        value = function(*args, **kwargs)
        best = min(best, time.perf_counter() - start)
    return value, best


def main() -> None:
    """Measure the units, print the summary, and write one row a unit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--radii", type=float, nargs="+", default=[0.001, 0.005, 0.01, 0.05])
    parser.add_argument("--alpha", action="store_true", help="alpha-CROWN too")
    parser.add_argument("--readouts", type=int, default=1)
    parser.add_argument("--out")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    model, n = load_model("minilm"), 5
    rows = []
    for layer in range(args.layers):
        tokens = model.tokens(TEXT, layer, n)
        for index in range(args.heads):
            head = model.head(layer, index)
            plain, ours = convert(head, tokens[None])
            cs = [
                torch.as_tensor(seeded_readout(1000 * layer + 10 * index + i, head.d_out)) for i in range(args.readouts)
            ]
            C = torch.zeros(1, len(cs), 1, n, head.d_head)
            for i, c in enumerate(cs):
                C[0, i, 0, n - 1] = head.W_O.T @ c
            C = C.flatten(2)
            for radius in args.radii:
                x = BoundedTensor(tokens[None], PerturbationTokenBall(radius, relative=True))
                problems = [HeadProblem(head, tokens, n - 1, c, TokenBall(radius)) for c in cs]
                attained = torch.tensor([certificate.lower for certificate in search_many(problems)])

                def crown(network, method="CROWN", x=x, C=C):
                    with torch.set_grad_enabled(method != "CROWN"):
                        return network.compute_bounds(x=(x,), C=C, method=method, bound_lower=False)[1][0].detach()

                row = {"layer": layer, "head": index, "radius": radius}
                (stock, row["stock_s"]), (mine, row["ours_s"]) = timed(crown, plain), timed(crown, ours)
                row |= {"stock_gap": float((stock - attained).mean()), "gap": float((mine - attained).mean())}
                row["looser"] = bool((mine > stock + 1e-12).any())
                if args.alpha:
                    alpha, row["alpha_s"] = timed(crown, plain, method="CROWN-Optimized", repeats=1)
                    row["alpha_gap"] = float((alpha - attained).mean())
                    row["looser"] |= bool((mine > alpha + 1e-12).any())
                rows.append(row)
    table = pd.DataFrame(rows)
    if args.out:
        table.to_csv(args.out, index=False)
    floor = table.gap.clip(lower=1e-12)
    table["ratio"], table["time_ratio"] = table.stock_gap / floor, table.ours_s / table.stock_s
    columns = {"ratio": "median", "time_ratio": "median", "looser": "sum", "gap": "median", "stock_gap": "median"}
    if args.alpha:
        table["alpha_ratio"] = table.alpha_gap / floor
        columns["alpha_ratio"] = "median"
    print(table.groupby("radius").agg(columns).to_string())


if __name__ == "__main__":
    main()
