"""A two-block transformer encoder in auto_LiRPA: widths of CROWN with the repaired softmax, of the plug-in, of alpha.

    PYTHONPATH=path/to/auto_LiRPA python comparisons/lirpa_blocks.py --tokens 5 --out results.csv

Width 48, 3 heads, MLP 96, box of half-width eps around random tokens of unit scale; a row is a random readout of the
last token. Weights are random, or trained to copy, into the last token, the token that it is most similar to. Width =
upper - lower, mean over rows; attained = the spread that 1,000 points find, raised by projected ascent. alpha: the
plug-in's CROWN-Optimized for the rows, with the intermediate bounds of its CROWN pass. A layer norm is written with its
own mean and variance. Exits with 1 if an attained value lies outside, or if alpha mode does not improve.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from itertools import product

import attn_bounds_lirpa
import numpy as np
import pandas as pd
import torch
from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm
from auto_LiRPA.operators.gelu import GELUOp
from torch import Tensor, nn


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


def train(model: nn.Module, n: int, width: int, steps: int) -> float:
    """Train the model on its toy task and return the last loss: output of the last token = its most similar token."""
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        x = torch.randn(64, n, width)
        nearest = torch.einsum("bnd,bd->bn", x[:, :-1], x[:, -1]).argmax(1)
        loss = (model(x)[:, -1] - x[torch.arange(64), nearest]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return float(loss.detach())


def attained(model: nn.Module, x: Tensor, eps: float, C: Tensor, points: int, steps: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest C . output (s,) that `points` starts at corners and inside, then ascent from each, find."""
    rows = C.shape[1]
    which = torch.arange(points) % (2 * rows)
    sign = torch.where(which < rows, -1.0, 1.0)
    point = eps * torch.randn(points, *x.shape[1:]).sign()
    point[points // 2 :] *= torch.rand(points - points // 2, 1, 1)
    best = torch.full((2 * rows,), -torch.inf)
    for step in range(steps + 1):
        point.requires_grad_(True)
        value = (model(x + point).flatten(1) @ C[0].T)[torch.arange(points), which % rows] * sign
        best = best.scatter_reduce(0, which, value.detach(), "amax")
        (gradient,) = torch.autograd.grad(value.sum(), point)
        point = (point.detach() + eps * 0.6 * 0.7**step * gradient.sign()).clamp(-eps, eps)
    return -best[:rows], best[rows:]


def bound(
    network: BoundedModule, x: Tensor, eps: float, C: Tensor, method: str, known: dict | None = None
) -> tuple[Tensor, Tensor, float]:
    """Bounds (s,) of the rows, and seconds of this process; known: intermediate bounds to keep."""
    start = time.process_time()
    with torch.set_grad_enabled(method != "CROWN"):
        region = BoundedTensor(x, PerturbationLpNorm(norm=np.inf, eps=eps))
        rows = C.unflatten(-1, x.shape[1:])
        lower, upper = network.compute_bounds(x=(region,), C=rows, method=method, interm_bounds=known)
    return lower[0].detach(), upper[0].detach(), time.process_time() - start


def intermediate(network: BoundedModule) -> dict:
    """The intermediate bounds of the network's last pass."""
    nodes = [node for node in network.layers_requiring_bounds if isinstance(node.lower, Tensor)]
    return {node.name: (node.lower.detach().clone(), node.upper.detach().clone()) for node in nodes}


def encoder(args: argparse.Namespace, n: int, norm: str, activation: str, weights: str) -> nn.Module:
    """Two blocks with the seed's weights, trained where asked."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(Block(args.width, 3, 2 * args.width, norm == "pre", ACTIVATIONS[activation]) for _ in range(2))
    )
    if weights == "trained":
        loss = train(model, n, args.width, args.training)
        print(
            f"trained: {n} tokens, {norm}-norm, {activation}, loss {loss:.3f} after {args.training} steps", flush=True
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


def main() -> int:
    """Measure the table and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[5, 17])
    parser.add_argument("--eps", type=float, nargs="+", default=[0.001, 0.005, 0.01, 0.02])
    parser.add_argument("--norm", nargs="+", choices=["pre", "post"], default=["pre", "post"])
    parser.add_argument("--activation", nargs="+", choices=list(ACTIVATIONS), default=list(ACTIVATIONS))
    parser.add_argument("--weights", nargs="+", choices=["random", "trained"], default=["random", "trained"])
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--training", type=int, default=300, help="training steps")
    parser.add_argument("--alpha", type=int, default=20, help="steps of alpha mode (0: none)")
    parser.add_argument("--out")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    table, bad, idle = [], 0, 0
    for n, norm, activation, weights in product(args.tokens, args.norm, args.activation, args.weights):
        model = encoder(args, n, norm, activation, weights)
        torch.manual_seed(1)
        x, C = torch.randn(1, n, args.width), torch.zeros(1, args.rows, n, args.width)
        C[:, :, -1] = torch.randn(args.rows, args.width)
        C = C.flatten(2)
        options = {**attn_bounds_lirpa.OPTIONS, "optimize_bound_args": {"iteration": args.alpha, "lr_alpha": 0.1}}
        plain, ours = (BoundedModule(model, x, bound_opts=options, verbose=False) for _ in range(2))
        attn_bounds_lirpa.repair_softmax(plain)
        attn_bounds_lirpa.attach(ours)
        for eps in args.eps:
            low, high = attained(model, x, eps, C, args.points, args.steps)
            row = {"tokens": n, "norm": norm, "activation": activation, "weights": weights, "eps": eps}
            row["attained"] = float((high - low).mean())
            found = {"stock": bound(plain, x, eps, C, "CROWN"), "ours": bound(ours, x, eps, C, "CROWN")}
            if args.alpha:
                found["alpha"] = bound(ours, x, eps, C, "CROWN-Optimized", intermediate(ours))
            for name, (lower, upper, row[f"{name}_s"]) in found.items():
                row[name] = float((upper - lower).mean())
                outside = torch.maximum(lower - low, high - upper)
                bad += int((~(outside <= 1e-9 * (1 + high.abs()))).sum())
            row["ratio"] = row["stock"] / row["ours"]
            row["looser"] = int(((found["ours"][1] > found["stock"][1]) | (found["ours"][0] < found["stock"][0])).sum())
            if args.alpha:
                row["alpha_ratio"] = row["ours"] / row["alpha"]
                idle += row["alpha"] > row["ours"] * (1 + 1e-9)
            table.append(row)
            print({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    frame = pd.DataFrame(table)
    if args.out:
        frame.to_csv(args.out, index=False)
    print(frame.to_string(float_format=lambda value: f"{value:.4g}"))
    print(f"{bad} attained values outside the bounds; alpha mode wider than CROWN mode in {idle} of {len(table)} rows")
    return 1 if bad or idle else 0


if __name__ == "__main__":
    sys.exit(main())
