"""A two-block transformer encoder in auto_LiRPA: widths of CROWN with the repaired softmax, of the plug-in, of alpha.

    PYTHONPATH=path/to/auto_LiRPA python comparisons/lirpa_blocks.py --tokens 5 17 --out results.csv

Random weights, width 48, 3 heads, MLP 96, box of half-width eps around random tokens of unit scale; a row is a random
readout of the last token. Width = upper - lower, mean over rows; attained = the spread that samples and projected
ascent find. A layer norm is written with its own mean and variance. Exits with 1 if an attained value lies outside.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings

import attn_bounds_lirpa
import numpy as np
import pandas as pd
import torch
from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm
from auto_LiRPA.operators.gelu import GELUOp
from torch import Tensor, nn

OPTIONS = {**attn_bounds_lirpa.OPTIONS, "optimize_bound_args": {"iteration": 8, "lr_alpha": 0.2}}


class LayerNorm(nn.Module):
    """scale (x - mean) / sqrt(var + eps) + shift over the last axis, in operations that convert."""

    def __init__(self, d: int):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(d) + 0.5), nn.Parameter(0.1 * torch.randn(d))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.scale + self.shift


class GELU(nn.Module):
    """The exact GELU as the operator that auto_LiRPA bounds."""

    def forward(self, x: Tensor) -> Tensor:
        return GELUOp.apply(x)


ACTIVATIONS: dict[str, type[nn.Module]] = {"ReLU": nn.ReLU, "GELU": GELU}


class Block(nn.Module):
    """Attention and an MLP with residuals, normed before (pre) or after (post) each."""

    def __init__(self, d: int, heads: int, hidden: int, pre: bool, activation: type[nn.Module]):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(d, hidden), activation(), nn.Linear(hidden, d))
        self.first, self.second = LayerNorm(d), LayerNorm(d)
        self.heads, self.pre = heads, pre

    def attention(self, x: Tensor) -> Tensor:
        n, d = x.shape[1:]
        q, k, v = (
            f(x).reshape(-1, n, self.heads, d // self.heads).permute(0, 2, 1, 3) for f in (self.q, self.k, self.v)
        )
        p = torch.softmax(q.matmul(k.transpose(-1, -2)) * (d // self.heads) ** -0.5, -1)
        return self.out(p.matmul(v).permute(0, 2, 1, 3).reshape(-1, n, d))

    def forward(self, x: Tensor) -> Tensor:
        if self.pre:
            x = x + self.attention(self.first(x))
            return x + self.mlp(self.second(x))
        x = self.first(x + self.attention(x))
        return self.second(x + self.mlp(x))


def attained(model: nn.Module, x: Tensor, eps: float, C: Tensor, samples: int, steps: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest C . output (s,) at corners and along projected ascent from the best of them."""
    rows = C.shape[1]
    signs = torch.cat([-torch.ones(rows), torch.ones(rows)])
    point = eps * torch.randn(samples, *x.shape[1:]).sign()

    def values(step: Tensor) -> Tensor:
        return model(x + step).flatten(1) @ C[0].T

    with torch.no_grad():
        found = values(point)
    best, start = torch.cat([-found, found], 1).max(0)
    point = point[start]
    for step in range(steps + 1):
        point.requires_grad_(True)
        value = values(point).repeat(1, 2).diagonal() * signs
        best = torch.maximum(best, value.detach())
        (gradient,) = torch.autograd.grad(value.sum(), point)
        point = (point.detach() + eps * 0.8 * 0.8**step * gradient.sign()).clamp(-eps, eps)
    return -best[:rows], best[rows:]


def bound(network: BoundedModule, x: Tensor, eps: float, C: Tensor, method: str) -> tuple[Tensor, Tensor, float]:
    """Bounds (s,) of the rows, and seconds."""
    start = time.perf_counter()
    with torch.set_grad_enabled(method != "CROWN"):
        region = BoundedTensor(x, PerturbationLpNorm(norm=np.inf, eps=eps))
        lower, upper = network.compute_bounds(x=(region,), C=C.unflatten(-1, x.shape[1:]), method=method)
    return lower[0].detach(), upper[0].detach(), time.perf_counter() - start


def main() -> int:
    """Measure the table and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[5, 17])
    parser.add_argument("--eps", type=float, nargs="+", default=[0.001, 0.005, 0.01, 0.02])
    parser.add_argument("--norm", nargs="+", choices=["pre", "post"], default=["pre", "post"])
    parser.add_argument("--activation", nargs="+", choices=list(ACTIVATIONS), default=list(ACTIVATIONS))
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--alpha", type=int, default=5, help="alpha mode up to so many tokens")
    parser.add_argument("--out")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    table, bad = [], 0
    for n in args.tokens:
        for norm in args.norm:
            for activation in args.activation:
                torch.manual_seed(0)
                blocks = [
                    Block(args.width, 3, 2 * args.width, norm == "pre", ACTIVATIONS[activation]) for _ in range(2)
                ]
                model, x = nn.Sequential(*blocks).eval(), torch.randn(1, n, args.width)
                C = torch.zeros(1, args.rows, n, args.width)
                C[:, :, -1] = torch.randn(args.rows, args.width)
                C = C.flatten(2)
                plain, ours = (BoundedModule(model, x, bound_opts=OPTIONS, verbose=False) for _ in range(2))
                attn_bounds_lirpa.repair_softmax(plain)
                attn_bounds_lirpa.attach(ours)
                for eps in args.eps:
                    low, high = attained(model, x, eps, C, args.samples, args.steps)
                    row = {"tokens": n, "norm": norm, "activation": activation, "eps": eps}
                    row["attained"] = float((high - low).mean())
                    runs = [("stock", plain, "CROWN"), ("ours", ours, "CROWN")]
                    if n <= args.alpha:
                        runs.append(("alpha", ours, "CROWN-Optimized"))
                    for name, network, method in runs:
                        lower, upper, row[f"{name}_s"] = bound(network, x, eps, C, method)
                        row[name] = float((upper - lower).mean())
                        outside = torch.maximum(lower - low, high - upper)
                        bad += int((outside > 1e-9 * (1 + high.abs())).sum())
                    row["ratio"] = row["stock"] / row["ours"]
                    table.append(row)
                    print({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    frame = pd.DataFrame(table)
    if args.out:
        frame.to_csv(args.out, index=False)
    print(frame.to_string(float_format=lambda value: f"{value:.4g}"))
    print(f"{bad} attained values outside the bounds")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
