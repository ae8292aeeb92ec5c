"""What a computed result rests on, and whether it still holds: a region, constants, and bounds of nodes."""

from __future__ import annotations

import torch
from auto_LiRPA.perturbations import PerturbationLpNorm
from torch import Tensor

from .regions import PerturbationTokenBall


class Held:
    """Region, constants and bounds that a result about `node` was computed from."""

    def __init__(self, network, node, *up_to):
        """up_to: the nodes whose bounds, and all before them, the result rests on; by default `node` itself."""
        self.nodes = up_to or (node,)
        self.region = Region.find(network)
        self.constants = Constants([node])
        self.bounds = {name: (a.clone(), b.clone()) for name, (a, b) in bounds_up_to(*self.nodes).items()}

    def still(self, network, exactly: bool = False) -> bool:
        """Whether region and constants are what they were, and every bound its own or, unless `exactly`, within.

        On a region of a kind that `Region` does not know nothing is known to hold. A result of one batch element holds
        for a batch of them.
        """
        region = Region.find(network)
        if region is None or self.region is None or not self.constants.unchanged():
            return False
        now = bounds_up_to(*self.nodes)
        return region.is_same(self.region) and (same_bounds if exactly else bounds_within)(now, self.bounds)


class Region:
    """The one perturbed root's region as centre + radius t, where every block of t lies in a unit ball.

    centre and radius (b, x), block (x,) the number of each coordinate's block: its own for a box, its token's for token
    balls, all the same for one L2 ball.
    """

    def __init__(self, root):
        self.root, perturbation = root, root.perturbation
        middle = root.center
        if is_box(root):
            middle, radius = (root.lower + root.upper) / 2, (root.upper - root.lower) / 2
            block = torch.arange(middle[0].numel(), device=middle.device)
        elif isinstance(perturbation, PerturbationTokenBall):
            radius = perturbation.radii(middle).unsqueeze(-1).expand_as(middle)
            block = torch.arange(middle.shape[1], device=middle.device).repeat_interleave(middle.shape[2])
        else:
            radius = torch.as_tensor(perturbation.eps).to(middle).expand_as(middle)
            block = torch.zeros(middle[0].numel(), dtype=torch.long, device=middle.device)
        # copies: what a caller changes in place must not change what is remembered of it
        self.centre, self.radius = middle.detach().flatten(1).clone(), radius.detach().flatten(1).clone()
        self.block = block

    @staticmethod
    def find(network) -> Region | None:
        """The region, or None where it is not one of these three kinds or there are several perturbed inputs."""
        roots = [root for root in network.roots() if getattr(root, "perturbation", None) is not None]
        if len(roots) != 1:
            return None
        perturbation = roots[0].perturbation
        is_l2 = type(perturbation) is PerturbationLpNorm and perturbation.norm == 2 and perturbation.x_L is None
        known = is_box(roots[0]) or is_l2 or isinstance(perturbation, PerturbationTokenBall)
        return Region(roots[0]) if known else None

    def is_same(self, other: Region) -> bool:
        """Whether `other`, of one batch element or as many, is the same region everywhere."""
        return torch.equal(self.block, other.block) and all(
            there.shape[1:] == here.shape[1:] and there.shape[0] in (1, here.shape[0]) and bool((here == there).all())
            for here, there in ((self.centre, other.centre), (self.radius, other.radius))
        )


class Constants:
    """What nodes rest on beside the perturbed inputs, as it is now: parameters, buffers, other inputs.

    Equal bounds do not show that weights are the same: a weight of the other sign has them too around zero.
    """

    def __init__(self, nodes):
        self.values = []
        todo, seen = list(nodes), set()
        while todo:
            node = todo.pop()
            if node.name in seen:
                continue
            seen.add(node.name)
            todo.extend(node.inputs)
            kind = type(node).__name__
            if kind in ("BoundParams", "BoundBuffers") or (kind == "BoundInput" and not node.perturbed):
                self.values.append((node, self._kept(node)))

    def unchanged(self) -> bool:
        """Whether all values are what they were."""
        return all(_equal(self._value(node), value) for node, value in self.values)

    def _kept(self, node) -> Tensor:
        """A copy of the node's value, the same one for all that was computed while it did not change."""
        value, kept = self._value(node), getattr(node, "kept_value", None)
        if kept is None or not _equal(kept, value):
            kept = node.kept_value = value.clone()
        return kept

    @staticmethod
    def _value(node) -> Tensor:
        return node.forward().detach()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def bounds_up_to(*nodes) -> dict[str, tuple[Tensor, Tensor]]:
    """Every bound that forms of the nodes rest on, by name: their own and those of all nodes before them."""
    todo, found, seen = list(nodes), {}, set()
    while todo:
        node = todo.pop()
        if node.name in seen or not node.perturbed:
            continue
        seen.add(node.name)
        todo.extend(node.inputs)
        ends = getattr(node, "lower", None), getattr(node, "upper", None)
        if all(isinstance(end, Tensor) for end in ends):
            found[node.name] = tuple(end.detach() for end in ends)
    return found


def same_bounds(one: dict, other: dict) -> bool:
    """Whether two results of `bounds_up_to` are equal, tensor by tensor."""
    return one.keys() == other.keys() and all(
        a.shape == b.shape and torch.equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True)
    )


def bounds_within(inner: dict, outer: dict) -> bool:
    """Whether `inner` implies every bound of `outer`; where `outer` has one batch element, `inner` may have more."""
    for name, (low, high) in outer.items():
        if name not in inner or low.shape[0] not in (1, inner[name][0].shape[0]):
            return False
        least, most = (low, high) if low.shape == inner[name][0].shape else _loosened(low, high)
        if not bool((least <= inner[name][0]).all() and (inner[name][1] <= most).all()):
            return False
    return True


def _loosened(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """An interval with its last digits added, which the remainders' own margin pays for.

    A batch of another size sums in another order. Zero, where a sign is cut, has no such digits, nor has infinity.
    """
    last = 64 * torch.finfo(low.dtype).eps * (low.abs() + high.abs())
    last = torch.where(torch.isfinite(last), last, torch.zeros_like(last))
    return torch.where(low == 0, low, low - last), torch.where(high == 0, high, high + last)


def is_box(root) -> bool:
    """Whether the root's region is a plain box."""
    perturbation = root.perturbation
    constrained = getattr(perturbation, "constraints", None) is not None
    return type(perturbation) is PerturbationLpNorm and perturbation.norm == float("inf") and not constrained
