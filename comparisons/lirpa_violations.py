"""Hunt for violations of the auto_LiRPA plug-in: random small graphs, their bounds against values that search attains.

    PYTHONPATH=path/to/auto_LiRPA python comparisons/lirpa_violations.py --count 20000 --seed 0

A graph is attention alone, with a residual, a block with ReLU, or two attentions, with random weights and tokens, a
box, an L2 ball or an L2 ball per token, a mask or none, narrow to very wide scores, and several rows. 32 graphs of one
shape, each with weights, tokens and a radius of its own, are one group and go through auto_LiRPA as one batch; every
fourth group is one graph at 8 inputs whose weights are constants: there attention that reads the input is one operator
with certificates and affine bounds of its own, once found in the graph and once as `AttentionHeads`. Values
come from samples and projected ascent of every row in both directions. Prints one line a kind and the total; a
violation names its group, which `--only` repeats. Exits with 1 if there is any.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass

import attn_bounds_lirpa
import numpy as np
import torch
from attn_bounds_lirpa import PerturbationTokenBall
from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm
from torch import Tensor, nn
from tqdm import tqdm

KINDS = ("attention", "residual", "block", "two")
LOCAL_KINDS = ("attention", "attention", "residual", "two")
REGIONS = ("box", "ball", "tokens")
BATCH, LOCAL_BATCH = 32, 8
OPTIONS = {
    **attn_bounds_lirpa.OPTIONS,
    "optimize_bound_args": {"iteration": 3, "lr_alpha": 0.3, "early_stop_patience": 100},
}
TOLERANCE = 1e-9  # of the row's size: what float64 rounding may cost


@dataclass
class Shape:
    """Sizes of a group's graphs."""

    kind: str
    n: int
    d: int
    heads: int
    width: int
    mask: Tensor | None


class Graph(nn.Module):
    """base + radius * z through the parts; weights (b, in, out) and biases (b, 1, out) are inputs, or constants."""

    def __init__(self, shape: Shape, constants: list[Tensor] | None = None, whole: bool = False):
        super().__init__()
        self.shape, self.constants, self.whole = shape, constants, whole

    def forward(self, z: Tensor, *inputs: Tensor) -> Tensor:
        if self.constants is None:
            base, radius, *weights = inputs
            return self.parts(base + radius * z, weights)
        return self.parts(z, self.constants)

    def parts(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        linear = list(zip(weights[::2], weights[1::2], strict=True))
        for part in range(2 if self.shape.kind == "two" else 1):
            y = self._attention(x, linear[4 * part : 4 * part + 4])
            x = y if self.shape.kind == "attention" else x + y
        if self.shape.kind == "block":
            (up, a), (down, b) = linear[-2:]
            x = x + (torch.relu(x.matmul(up) + a).matmul(down) + b)
        return x

    def _attention(self, x: Tensor, linear: list[tuple[Tensor, Tensor]]) -> Tensor:
        s = self.shape
        if self.whole:
            layers = [nn.Linear(*weight.shape) for weight, _ in linear[:3]]
            for layer, (weight, bias) in zip(layers, linear[:3], strict=True):
                layer.weight, layer.bias = nn.Parameter(weight.T), nn.Parameter(bias)
            mask = None if s.mask is None else s.mask.expand(s.n, s.n)
            heads = attn_bounds_lirpa.AttentionHeads(*layers, s.heads, s.width**-0.5, mask)
            return heads(x).matmul(linear[3][0]) + linear[3][1]
        q, k, v = (
            (x.matmul(weight) + bias).reshape(-1, s.n, s.heads, s.width).permute(0, 2, 1, 3)
            for weight, bias in linear[:3]
        )
        scores = q.matmul(k.transpose(-1, -2)) * s.width**-0.5
        if s.mask is not None:
            scores = scores + s.mask
        mixed = torch.softmax(scores, -1).matmul(v).permute(0, 2, 1, 3).reshape(-1, s.n, s.heads * s.width)
        weight, bias = linear[3]
        return mixed.matmul(weight) + bias


@dataclass
class Group:
    """Graphs of one shape: tokens base (b, n, d), radius (b, 1 or n, 1), rows C (b, s, n d)."""

    region: str
    graph: Graph
    weights: list[Tensor]
    base: Tensor
    radius: Tensor
    C: Tensor

    @property
    def local(self) -> bool:
        return self.graph.constants is not None

    def inputs(self) -> tuple:
        """What compute_bounds takes: the unit region of z, or of a graph with constant weights the region itself."""
        unit = torch.zeros_like(self.base)
        centre, radius = (self.base, self.radius) if self.local else (unit, torch.ones_like(self.radius))
        if self.region == "box":
            where = PerturbationLpNorm(norm=np.inf, x_L=centre - radius, x_U=centre + radius)
        elif self.region == "ball":
            where = PerturbationLpNorm(norm=2, eps=float(radius[0]))
        else:
            where = PerturbationTokenBall(radius.squeeze(-1).expand(self.base.shape[:2]))
        return (BoundedTensor(centre, where), *self.rest())

    def rest(self) -> tuple[Tensor, ...]:
        return () if self.local else (self.base, self.radius, *self.weights)

    def values(self, z: Tensor) -> Tensor:
        """Rows (m, b, s) at displacements z (m, b, n, d) of the unit region."""
        weights = self.weights
        if not self.local:
            weights = [w.expand(len(z), *w.shape).flatten(0, 1) for w in weights]
        y = self.graph.parts((self.base + self.radius * z).flatten(0, 1), weights)
        return torch.einsum("mbo,bso->mbs", y.view(*z.shape[:2], -1), self.C)

    def projected(self, z: Tensor) -> Tensor:
        if self.region == "box":
            return z.clamp(-1, 1)
        return z / z.norm(dim=self._axes(), keepdim=True).clamp(min=1)

    def ascent(self, gradient: Tensor) -> Tensor:
        if self.region == "box":
            return gradient.sign()
        return gradient / gradient.norm(dim=self._axes(), keepdim=True).clamp(min=1e-30)

    def _axes(self) -> tuple[int, ...]:
        return (-1, -2) if self.region == "ball" else (-1,)


def random_group(seed: int, number: int) -> Group:
    """The group of this number."""
    rng = np.random.default_rng([seed, number])
    torch.manual_seed(int(rng.integers(2**31)))
    local = number % 4 == 3
    kind = str(rng.choice(LOCAL_KINDS if local else KINDS))
    region = str(rng.choice(("box", "tokens"))) if local else str(rng.choice(REGIONS))
    n, d, heads, width = (int(rng.integers(low, high)) for low, high in ((2, 5), (2, 5), (1, 3), (1, 4)))
    causal, padding = torch.triu(torch.full((n, n), -1e9), 1), torch.tensor([0.0] * (n - 1) + [-1e9])
    masks = [None, None, causal, padding, torch.randn(n)]
    shape = Shape(kind, n, d, heads, width, masks[int(rng.integers(4 if local else 5))])
    batch, rows = LOCAL_BATCH if local else BATCH, int(rng.integers(1, 4))
    copies = 1 if local else batch
    weights: list[Tensor] = []

    def linear(n_in: int, n_out: int, gain: Tensor | float = 1.0) -> None:
        weights.extend((gain * torch.randn(copies, n_in, n_out) * n_in**-0.5, 0.5 * torch.randn(copies, 1, n_out)))

    for _ in range(2 if kind == "two" else 1):
        gain = 10 ** (2.5 * torch.rand(copies, 1, 1) - 1)
        for factor in (gain, gain, 1.0):
            linear(d, heads * width, factor)
        linear(heads * width, d)
    if kind == "block":
        linear(d, 6)
        linear(6, d)
    base = torch.randn(batch, n, d) * 10 ** (1.5 * torch.rand(batch, 1, 1) - 1)
    radius = 10 ** (3.5 * torch.rand(batch, 1, 1) - 3)
    if region == "tokens":
        radius = radius * torch.rand(batch, n, 1)
        radius[:, int(rng.integers(n))] *= int(rng.integers(2))  # a token that does not move
    C = torch.randn(batch, rows, n, d)
    if rng.integers(2):  # rows that read one token, as a query's certificate does
        C = C * nn.functional.one_hot(torch.tensor(int(rng.integers(n))), n).view(1, 1, n, 1)
    if local:
        weights = [w[0, 0] if i % 2 else w[0] for i, w in enumerate(weights)]  # weight, bias, ...
    return Group(region, Graph(shape, weights if local else None).eval(), weights, base, radius, C.flatten(2))


def attained(group: Group, samples: int = 40, steps: int = 8) -> tuple[Tensor, Tensor]:
    """Smallest and largest values (b, s) of the rows that samples, and ascent from the best of them, find."""
    batch, rows = group.C.shape[:2]
    noise = torch.randn(samples, *group.base.shape)
    noise = noise.sign() if group.region == "box" else 10 * noise  # corners; after the projection the surface
    noise[samples // 2 :] *= torch.rand(samples - samples // 2, 1, 1, 1)
    noise = group.projected(noise)
    with torch.no_grad():
        found = group.values(noise)
    best, start = torch.cat([-found, found], -1).max(0)  # (b, 2 s): what is raised
    point = noise[start, torch.arange(batch)[:, None]].transpose(0, 1).contiguous()  # (2 s, b, n, d)
    sign = torch.cat([-torch.ones(rows), torch.ones(rows)])
    row = torch.arange(rows).repeat(2).view(-1, 1, 1).expand(-1, batch, 1)
    for step in range(steps + 1):
        point.requires_grad_(True)
        value = group.values(point).gather(2, row).squeeze(2) * sign[:, None]
        best = torch.maximum(best, value.detach().T)
        (gradient,) = torch.autograd.grad(value.sum(), point)
        point = group.projected(point.detach() + 0.8 * 0.6**step * group.ascent(gradient))
    return -best[:, :rows], best[:, rows:]


def bounds(group: Group, network: BoundedModule, method: str) -> tuple[Tensor, Tensor]:
    """Bounds (b, s) of the rows by one method; of IBP those that its box of the outputs gives."""
    C = group.C
    if method == "IBP":
        found = network.compute_bounds(x=group.inputs(), method=method)
        low, high = (t.detach().flatten(1).unsqueeze(1) for t in found)
        up, down = C.clamp(min=0), C.clamp(max=0)
        return (up * low + down * high).sum(-1), (up * high + down * low).sum(-1)
    with torch.set_grad_enabled(method == "CROWN-Optimized"):
        found = network.compute_bounds(x=group.inputs(), C=C.unflatten(-1, group.base.shape[1:]), method=method)
    return found[0].detach().reshape(C.shape[:2]), found[1].detach().reshape(C.shape[:2])


def check(group: Group, optimise: bool) -> list[tuple[str, Tensor]]:
    """(method, excess (b,)) of every method of the plug-in; excess > 0: an attained value lies outside."""
    low, high = attained(group)
    size = 1 + torch.maximum(low.abs(), high.abs()) + group.C.abs().sum(-1)
    out = []
    for name in ("fused", "whole") if group.local else ("fused", "repaired"):
        sample = (group.base if group.local else torch.zeros_like(group.base), *group.rest())
        graph = Graph(group.graph.shape, group.graph.constants, name == "whole").eval()
        network = BoundedModule(graph, sample, bound_opts=OPTIONS, verbose=False)
        if name == "repaired":
            attn_bounds_lirpa.repair_softmax(network)
        elif name == "whole":
            assert any(type(node).__name__ == "BoundAttentionHead" for node in network.nodes())
        elif skipped := attn_bounds_lirpa.attach(network)["skipped"]:
            raise RuntimeError(f"attention was not fused: {skipped}")
        methods = ["IBP", "CROWN"] if group.region != "ball" else ["CROWN"]
        if group.local and group.region == "box":
            methods.append("Forward+Backward")
        for method in methods + ["CROWN-Optimized"] * (optimise and name != "repaired"):
            lower, upper = bounds(group, network, method)
            outside = (torch.maximum(lower - low, high - upper) / size).amax(1)
            finite = (torch.isfinite(lower) & torch.isfinite(upper)).all(1)
            out.append((f"{name} {method}", torch.where(finite, outside, torch.inf)))
    return out


def main() -> int:
    """Run the groups and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20000, help="graphs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first group")
    parser.add_argument("--only", type=int, help="one group by its number")
    parser.add_argument("--optimised", type=int, default=5, help="CROWN-Optimized on every n-th group (0: none)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no group after so long")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    started, kinds, checks, worst, bad, rows = time.monotonic(), Counter(), Counter(), {}, 0, 0
    bar = tqdm(total=args.count, unit="graph")
    number = args.first if args.only is None else args.only
    while sum(kinds.values()) < (args.count if args.only is None else 1) and time.monotonic() - started < args.seconds:
        group = random_group(args.seed, number)
        kind = f"{'one head, ' if group.local else ''}{group.graph.shape.kind}, {group.region}"
        kinds[kind] += 1 if group.local else BATCH
        bar.update(1 if group.local else BATCH)
        rows += group.C.shape[0] * group.C.shape[1]
        for name, excess in check(group, bool(args.optimised) and number % args.optimised == 0):
            name = f"{name}{', constant weights' if group.local else ''}"
            checks[name] += len(excess)
            worst[name] = max(worst.get(name, -float("inf")), float(excess.max()))
            for index in (~(excess <= TOLERANCE)).nonzero().flatten().tolist():
                bad += 1
                print(
                    f"VIOLATION group {number}, element {index} ({kind}) {name}: {float(excess[index]):.3g}", flush=True
                )
        number += 1
    for kind, count in sorted(kinds.items()):
        print(f"{kind:28s} {count} graphs")
    for name, count in sorted(checks.items()):
        print(f"{name:36s} {count} inputs, largest excess {worst[name]:.2g}")
    print(f"{sum(kinds.values())} graphs, {rows} rows bounded from both sides, {bad} violations")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
