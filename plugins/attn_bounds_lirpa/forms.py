"""Affine forms of a value node in the network's inputs, and the range of many directions of it by composition.

Backward rows for every direction c (see `rows.bound_rows`) are the tightest range of c . v; where there are too many,
the forms l(x) <= v <= u(x) of the coordinates are computed once and composed: c . v <= c+ . u(x) + c- . l(x). Where v
is affine in x (the first layer) the composition is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .compat import backward
from .held import Held, is_box
from .rows import paused

_CHUNK = 1 << 24  # numbers in one block of composed coefficients


def affine_forms(network, node) -> tuple[Tensor, Tensor, list[tuple]]:
    """Forms l(x) <= v <= u(x) of every coordinate v of a node, valid for the bounds that the network has now.

    Returns the constants of l and u, (b, size) each, and (root, coefficients of l, of u), (size, b, *inputs) each, for
    every perturbed root.
    """
    kept = vars(node).pop("kept_forms", None)
    if kept is not None and kept.belong_to(network, node):
        return kept.forms()
    shape = node.output_shape[1:]
    batch, size = node.lower.shape[0], shape.numel()
    eye = torch.eye(size, device=node.lower.device, dtype=node.lower.dtype)
    with paused(network), torch.no_grad():
        rows = eye.view(1, size, *shape).expand(batch, *([-1] * (1 + len(shape))))
        lower, upper = (bound.reshape(batch, size) for bound in backward(network, node, rows))
        vars(node).pop("kept_forms", None)
        return _with_constants(lower, upper, _coefficients(network))


def _coefficients(network) -> list[tuple]:
    """(root, coefficients of the lower, of the upper form) as the last backward pass left them on the roots."""
    roots = [root for root in network.roots() if getattr(root, "perturbation", None) is not None]
    return [(root, root.lA.detach(), root.uA.detach()) for root in roots if root.lA is not None]


def _with_constants(lower: Tensor, upper: Tensor, parts: list[tuple]) -> tuple[Tensor, Tensor, list[tuple]]:
    """The constants of forms whose extreme values over the region are `lower` and `upper`, and the forms' parts."""
    for root, low, high in parts:
        lower = lower - concretized(root, low.flatten(2).transpose(0, 1), -1)
        upper = upper - concretized(root, high.flatten(2).transpose(0, 1), 1)
    return lower, upper, parts


class _KeptForms:
    """What the network's own pass over every coordinate of a node found, for the bounds that it had then."""

    def __init__(self, network, node, lower: Tensor, upper: Tensor):
        self.lower, self.upper, self.parts = lower.detach(), upper.detach(), _coefficients(network)
        self.held = Held(network, node, *node.inputs)

    def belong_to(self, network, node) -> bool:
        """Whether the node's bounds are that pass's, and all before them what they were."""
        now = node.lower.flatten(1), node.upper.flatten(1)
        same = all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(now, self.ends(), strict=True))
        return same and self.held.still(network, exactly=True)

    def ends(self) -> tuple[Tensor, Tensor]:
        return self.lower.flatten(1), self.upper.flatten(1)

    def forms(self) -> tuple[Tensor, Tensor, list[tuple]]:
        return _with_constants(*self.ends(), self.parts)


def keep_forms(network, nodes) -> None:
    """Let the network's own passes over every coordinate of these nodes leave their forms for `affine_forms`.

    For auto_LiRPA 0.7; where nothing was kept, `affine_forms` makes a pass of its own.
    """
    names, backward_general = {node.name for node in nodes}, network.backward_general

    def watched(bound_node, C, *args, **kwargs):
        result = backward_general(bound_node, C, *args, **kwargs)
        both = len(result) == 2 and all(isinstance(end, Tensor) for end in result)
        if both and getattr(bound_node, "name", None) in names and _is_identity(C, bound_node):
            inputs = sum(root.lower[0].numel() for root in network.roots() if root.perturbed)
            if bound_node.output_shape[1:].numel() * inputs <= _CHUNK:
                bound_node.kept_forms = _KeptForms(network, bound_node, *result)
        return result

    network.backward_general = watched


def _is_identity(C, node) -> bool:
    """Whether the rows C (b or 1, s, ...) are the node's coordinates, one after the other."""
    size = node.output_shape[1:].numel()
    if not isinstance(C, Tensor) or C.ndim < 2 or C.shape[1] != size or C[0].numel() != size**2:
        return False
    eye = torch.eye(size, dtype=C.dtype, device=C.device)
    return all(torch.equal(rows.reshape(size, size), eye) for rows in C)


def concretized(root, a: Tensor, sign: int) -> Tensor:
    """Extreme value of a . x over the root's region; a (b, m, inputs), result (b, m)."""
    bound = root.perturbation.concretize(root.center, a, sign=sign, aux=root.aux)
    return bound.reshape(a.shape[0], a.shape[1])


class ValueForms:
    """Forms of a node v (b, h, j, c) over a network's perturbed roots, valid while `held`.

    Of one batch element, they serve directions of many.
    """

    def __init__(self, network, node):
        self.held = Held(network, node)
        self.ellipsoids = None
        shape, batch = node.output_shape[1:], node.lower.shape[0]
        lower, upper, coefficients = affine_forms(network, node)
        self.parts = [_Part(*part) for part in coefficients]
        self.bias = lower.view(batch, *shape), upper.view(batch, *shape)
        for part in self.parts:
            part.split(shape)
            self.bias = tuple(bias + at for bias, at in zip(self.bias, part.at_centre, strict=True))

    def range(self, directions: Tensor, head: int, key: int) -> tuple[Tensor, Tensor]:
        """Lower and upper bound of directions . v[head, key]; directions (m, b, c), results (m, b)."""
        step = max(1, _CHUNK // max(1, sum(part.width(head, key) for part in self.parts) * directions.shape[1]))
        blocks = [self._range(block, head, key) for block in directions.split(step)]
        return torch.cat([low for low, _ in blocks]), torch.cat([high for _, high in blocks])

    def _range(self, directions, head, key):
        pos, neg = directions.clamp(min=0), directions.clamp(max=0)
        low_bias, high_bias = (bias[:, head, key] for bias in self.bias)
        low = (pos * low_bias + neg * high_bias).sum(-1)
        high = (pos * high_bias + neg * low_bias).sum(-1)
        for part in self.parts:
            least, most = part.extremes(directions, pos, neg, head, key)
            low, high = low + least.transpose(0, 1), high + most.transpose(0, 1)
        return low, high

    def work(self, count: int) -> int:
        """Multiplications of `range` for `count` directions of every head and key."""
        return count * sum(part.total_width() for part in self.parts) * self.bias[0].shape[-1]

    def quick_range(self, directions: Tensor, head: int) -> tuple[Tensor, Tensor] | None:
        """Wider and cheaper than `range`, for all keys at once: (m, b, n_keys) each; None for regions without a box.

        With v = F x + b + e, |e| <= E and x = x0 + R t, |t| <= 1:  |c F R|_1 <= |L^T c|_2 where L L^T = F R W^-1 R F^T
        for any weights W > 0 of sum 1.
        """
        if len(self.parts) != 1 or not self.parts[0].box:
            return None
        if self.ellipsoids is None:
            self.ellipsoids = self._ellipsoids()
        centre, factor, error = (t[:, head] for t in self.ellipsoids)
        middle = torch.einsum("mbc,bjc->mbj", directions, centre)
        spread = torch.einsum("mbc,bjcd->mbjd", directions, factor).norm(dim=-1)
        spread = spread + torch.einsum("mbc,bjc->mbj", directions.abs(), error)
        return middle - spread, middle + spread

    def _ellipsoids(self):
        """Centre (b, h, j, c), factor L (b, h, j, c, c) and error E (b, h, j, c) of each value vector's enclosure."""
        part, (low_bias, high_bias) = self.parts[0], self.bias
        centre, factor, error = [], [], []
        for (head, key), (low, high) in part.blocks.items():
            form = (low + high) / 2  # (b, c, x), in units of the box
            lower, upper = low_bias[:, head, key], high_bias[:, head, key]
            weights = form.abs().mean(1, keepdim=True) + torch.finfo(form.dtype).tiny
            weights = weights / weights.sum(-1, keepdim=True)
            # L = F R W^-1/2 has as many columns as inputs; its QR factor R^T has the same products and c columns
            triangle = torch.linalg.qr((form / weights.sqrt()).transpose(-1, -2), mode="r")[1]
            square = form.new_zeros(form.shape[0], form.shape[1], form.shape[1])
            square[:, : triangle.shape[1]] = triangle
            centre.append((lower + upper) / 2)
            factor.append(square.transpose(-1, -2) * (1 + 1e-5))
            error.append(((high - low).abs().sum(-1) + upper - lower).clamp(min=0) / 2)
        heads, keys = low_bias.shape[1:3]
        return tuple(torch.stack(part, 1).unflatten(1, (heads, keys)) for part in (centre, factor, error))


class _Part:
    """The coefficients on one root."""

    def __init__(self, root, lower: Tensor, upper: Tensor):
        self.root, self.lower, self.upper = root, lower, upper
        self.exact = torch.equal(lower, upper)
        self.box = is_box(root)

    def split(self, shape) -> None:
        """Arrange the coefficients as (h, j, b, c, inputs); for a box in its units, on the inputs that each key reads.

        `at_centre` holds what then has to be added to the constants of the lower and upper forms, (b, h, j, c) each.
        """
        lower, upper = (t.flatten(2).view(*shape, t.shape[1], -1).transpose(2, 3) for t in (self.lower, self.upper))
        self.blocks, self.at_centre = {}, (0.0, 0.0)
        if self.box:
            middle = ((self.root.lower + self.root.upper) / 2).flatten(1)
            radius = ((self.root.upper - self.root.lower) / 2).flatten(1)
            self.at_centre = tuple(torch.einsum("hjbcx,bx->bhjc", t, middle) for t in (lower, upper))
        for head in range(shape[0]):
            for key in range(shape[1]):
                low, high = lower[head, key], upper[head, key]
                if self.box:
                    used = ((low != 0) | (high != 0)).any(0).any(0).nonzero().squeeze(-1)
                    low, high = (t[..., used] * radius[:, used].unsqueeze(1) for t in (low, high))
                self.blocks[head, key] = low, high
        self.lower = self.upper = None

    def width(self, head, key) -> int:
        return self.blocks[head, key][0].shape[-1]

    def total_width(self) -> int:
        return sum(low.shape[-1] for low, _ in self.blocks.values()) // max(1, len({head for head, _ in self.blocks}))

    def extremes(self, directions, pos, neg, head, key) -> tuple[Tensor, Tensor]:
        """Least and greatest value over the root's region of the forms composed for each direction, (b, m) each."""
        low, high = self.blocks[head, key]
        if self.exact:
            both = torch.einsum("mbc,bcx->bmx", directions, low)
            if self.box:
                spread = both.abs().sum(-1)
                return -spread, spread
            return self._extreme(both, -1), self._extreme(both, 1)
        least = torch.einsum("mbc,bcx->bmx", pos, low) + torch.einsum("mbc,bcx->bmx", neg, high)
        most = torch.einsum("mbc,bcx->bmx", pos, high) + torch.einsum("mbc,bcx->bmx", neg, low)
        return self._extreme(least, -1), self._extreme(most, 1)

    def _extreme(self, a: Tensor, sign: int) -> Tensor:
        return sign * a.abs().sum(-1) if self.box else concretized(self.root, a, sign)
