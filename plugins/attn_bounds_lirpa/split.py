"""Branch on the signs of ReLU inputs where optimised bounds do not suffice: a small branch and bound with a budget."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from auto_LiRPA import BoundedTensor, PerturbationLpNorm
from torch import Tensor

from attn_bounds.errors import MethodNotApplicableError

from .optimise import optimisation

_REPEATS = 12


@dataclass
class Leaf:
    """A part of the region on which some ReLU inputs have a known sign, and what is known of one row there."""

    row: int
    bounds: dict[str, tuple[Tensor, Tensor]]  # of every ReLU input, (1, ...), cut at zero where its sign is known
    signs: dict[str, list[tuple[int, int]]]  # ReLU input -> (unit, +1 or -1)
    bound: float = -math.inf
    alphas: dict[str, Tensor] | None = None  # relaxation parameters of each node
    betas: dict[str, Tensor] | None = None  # multipliers of the signs
    branch: tuple[str, int] | None = None  # the unit to split next, None where none is left
    repeats: int = 0  # how often it was bounded again for want of one


@dataclass(frozen=True)
class Split:
    """What splitting found: lower bounds (1, s) of the rows, and how many leaves were bounded for it."""

    lower: Tensor
    leaves: int


def split_rows(
    network,
    x,
    C: Tensor,  # (1, s, outputs)
    limits: Tensor,  # (1, s)
    bounds: dict,
    deadline: float = math.inf,
    batch: int = 128,
    iterations: int = 40,
    leaf_iterations: int = 6,
    lr: float = 0.1,
    max_leaves: int = 10000,
) -> Split:
    """Lower bounds (1, s) of C . output, by splitting on ReLU inputs until a row's leaves all lie above its limit.

    bounds: {node name: (lower, upper)} of every intermediate node, valid on the whole region, a box of batch size 1.
    A row's bound is the lowest over its leaves, which together cover the region. The first leaves are the whole region,
    with `iterations` steps of optimisation; later ones start from their parents' parameters and take
    `leaf_iterations`. Ends when every row is above its limit, after `deadline` or beyond `max_leaves`.
    """
    relus = [node for node in network.nodes() if type(node).__name__ == "BoundRelu" and node.perturbed]
    names = [node.inputs[0].name for node in relus if node.inputs[0].name in bounds]
    limit = limits.flatten().tolist()
    box = _box(x)
    pool = _Pool(network, box, C, limits, bounds, {node.inputs[0].name: node for node in relus}, lr)
    root = {name: tuple(t.detach() for t in bounds[name]) for name in names}
    leaves = [Leaf(row, root, {}) for row in range(C.shape[1])]
    open_leaves, lowest, count = leaves, [math.inf] * C.shape[1], 0
    fresh = True
    while open_leaves and (fresh or (count < max_leaves and time.monotonic() < deadline)):
        open_leaves.sort(key=lambda leaf: leaf.bound - limit[leaf.row])
        if fresh:
            work, open_leaves = open_leaves, []
        else:
            parents, open_leaves = open_leaves[: batch // 2], open_leaves[batch // 2 :]
            work = [child for parent in parents for child in _children(parent)]
        pool.bound(work, iterations if fresh else leaf_iterations, deadline)
        count, fresh = count + len(work), False
        for leaf in work:
            if leaf.bound > limit[leaf.row]:
                lowest[leaf.row] = min(lowest[leaf.row], leaf.bound)
            elif leaf.repeats > _REPEATS:  # every sign is known, and the multipliers had their chance
                lowest[leaf.row] = min(lowest[leaf.row], leaf.bound)
                return Split(_rows(open_leaves + work, lowest, limits), count)
            else:
                open_leaves.append(leaf)
    return Split(_rows(open_leaves, lowest, limits), count)


def _box(x) -> tuple[Tensor, Tensor]:
    """Ends of the one input's box; of token balls, the box around them."""
    region = x[0].ptb
    if len(x) != 1 or region.norm != math.inf:
        raise MethodNotApplicableError(
            f"x: expected one input in a box, got {len(x)} and a region of norm {region.norm}; split nothing there"
        )
    if region.x_L is None:
        return x[0].detach() - region.eps, x[0].detach() + region.eps
    return region.x_L, region.x_U


def _rows(open_leaves: list[Leaf], lowest: list[float], limits: Tensor) -> Tensor:
    for leaf in open_leaves:
        lowest[leaf.row] = min(lowest[leaf.row], leaf.bound)
    return torch.tensor([lowest]).to(limits)


def _children(parent: Leaf) -> list[Leaf]:
    """The two halves of a leaf: the branching unit at most, and at least, zero; itself again where none is left."""
    if parent.branch is None:
        parent.repeats += 1
        return [parent]
    name, unit = parent.branch
    children = []
    for sign in (-1, 1):
        lower, upper = (t.clone() for t in parent.bounds[name])
        (upper if sign < 0 else lower).flatten(1)[:, unit] = 0
        signs = {**parent.signs, name: [*parent.signs.get(name, []), (unit, sign)]}
        child = Leaf(parent.row, {**parent.bounds, name: (lower, upper)}, signs, parent.bound)
        child.alphas, child.betas = parent.alphas, parent.betas
        children.append(child)
    return children


class _Pool:
    """Bounds many leaves at once, one batch element each."""

    def __init__(self, network, box, C, limits, bounds, relus: dict, lr: float):
        self.network, self.box, self.C, self.limits, self.bounds = network, box, C, limits, bounds
        self.relus, self.lr = relus, lr

    def bound(self, leaves: list[Leaf], iterations: int, deadline: float) -> None:
        """Set the bound, the parameters and the next branch of each leaf."""
        size = len(leaves)
        low, high = (end.expand(size, *end.shape[1:]) for end in self.box)
        x = (BoundedTensor((low + high) / 2, PerturbationLpNorm(norm=math.inf, x_L=low, x_U=high)),)
        rows = torch.tensor([leaf.row for leaf in leaves], device=self.C.device)
        interm = {key: tuple(t.expand(size, *t.shape[1:]) for t in pair) for key, pair in self.bounds.items()}
        for name in leaves[0].bounds:
            interm[name] = tuple(torch.cat([leaf.bounds[name][end] for leaf in leaves]) for end in (0, 1))
        self._multipliers(leaves)
        alphas = None
        if all(leaf.alphas is not None for leaf in leaves):
            alphas = {key: torch.cat([leaf.alphas[key] for leaf in leaves], 2) for key in leaves[0].alphas}
        limit = self.limits[0, rows].unsqueeze(1)
        try:
            lower = optimisation(
                self.network, x, None, self.C[0, rows].unsqueeze(1), interm, iterations, self.lr, "lower", deadline,
                limit, alphas=alphas, multipliers=True,
            )  # fmt: skip
            self._read(leaves, lower, interm)
        finally:
            for node in self.relus.values():
                node.inputs[0].sparse_betas = None

    def _multipliers(self, leaves: list[Leaf]) -> None:
        """Give the ReLU inputs with known signs one multiplier for each, starting at the parent's where it has one."""
        self.network.split_nodes = []
        for name in self.relus:
            longest = max(len(leaf.signs.get(name, ())) for leaf in leaves)
            if not longest:
                continue
            node = self.network[name]
            self.network.split_nodes.append(node)
            start = [leaf.betas.get(name) if leaf.betas else None for leaf in leaves]
            self.network.reset_beta(node, (len(leaves), longest), start)
            history = [{name: tuple(zip(*leaf.signs[name], strict=True)) if name in leaf.signs else ((), ())}
                       for leaf in leaves]  # fmt: skip
            node.sparse_betas[0].apply_splits(history, name)

    def _read(self, leaves: list[Leaf], lower: Tensor, interm: dict) -> None:
        final = self.network.final_name
        alphas = {
            node.name: node.alpha[final].detach()
            for node in self.network.nodes()
            if isinstance(getattr(node, "alpha", None), dict) and final in node.alpha
        }
        scores = self._scores(interm)
        for i, leaf in enumerate(leaves):
            # not a number is no bound; min and sort would let it pass for any
            leaf.bound = -math.inf if torch.isnan(lower[i, 0]) else lower[i, 0].item()
            leaf.alphas = {key: t[:, :, i : i + 1] for key, t in alphas.items()}
            leaf.betas = {
                node.name: node.sparse_betas[0].val[i, : len(leaf.signs[node.name])].detach()
                for node in self.network.split_nodes
                if node.name in leaf.signs
            }
            if not scores:  # nothing to split: the row is bounded as a whole
                continue
            name = max(scores, key=lambda key: scores[key][i].max().item())
            best = scores[name][i].max(0)
            leaf.branch = (name, int(best.indices)) if best.values > 0 else None

    def _scores(self, interm: dict) -> dict[str, Tensor]:
        """How much of the bound each unit's relaxation costs at most, (leaves, units) for each ReLU input."""
        scores = {}
        for name, relu in self.relus.items():
            if name not in interm:
                continue
            lower, upper = (t.flatten(1) for t in interm[name])
            height = (-lower).clamp(min=0) * upper.clamp(min=0) / (upper - lower).clamp(min=1e-12)
            reach = relu.lA.detach()[0].flatten(1)
            scores[name] = height * ((-reach).clamp(min=0) + 0.1 * reach.clamp(min=0))
        return scores
