"""LOCAL regime: an attention head that sits directly on the perturbed tokens is bounded by the library's certificates.

Applies where every path from the perturbed input to the output runs through one fused attention whose q, k and v are
token-wise affine in the input. A row is then bounded as a whole, head by head and query by query, by
`attn_bounds.certify`, whose gap is O(r^2) or zero; the affine bound that is returned is that constant.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_bounds.certify import certify_many
from attn_bounds.head import AttentionHead
from attn_bounds.problem import HeadProblem
from attn_bounds.regions import TokenBall, TokenBox

from .compat import IS_03
from .regions import PerturbationTokenBall

_TOKENWISE = (
    "BoundMatMul",
    "BoundLinear",
    "BoundAdd",
    "BoundSub",
    "BoundMul",
    "BoundReshape",
    "BoundTranspose",
    "BoundIdentity",
)
DEFAULT = {"retry": False, "steps": 4}  # of attn_bounds' `lagrangian`; tighter and slower: {} or {"max_pieces": 64}
_BLOCKED = -1e8  # masks at least this low take a key out


class LocalHeads:
    """The heads of one fused attention as `AttentionHead`s, with the root node that holds their tokens."""

    def __init__(self, root, heads: list[AttentionHead], keys: Tensor | None, constants: list, options: dict):
        self.root, self.heads, self.keys, self.options = root, heads, keys, options
        self.constants = [(node, node.forward().detach().clone()) for node in constants]  # what the heads were read off

    @classmethod
    def find(cls, network, differences, mix, options: dict | None = None) -> LocalHeads | None:
        """The heads behind a fused attention, or None where the regime does not apply; options of the certificates."""
        if IS_03:
            return None
        roots = [node for node in network.roots() if type(node).__name__ == "BoundInput"]
        if len(roots) != 1 or not roots[0].perturbed or len(roots[0].output_shape) != 3:
            return None  # what another input holds may differ from call to call and between batch elements
        if roots[0].value.dtype != torch.float64:
            return None  # weights read off float32 values would carry their rounding into an exact certificate
        root, sources = roots[0], [*differences.inputs, mix.inputs[1]]
        nodes = {}
        if not all(_collect(source, root, nodes) for source in sources):
            return None
        if not _all_paths_through(network, root, mix, nodes):
            return None
        n, d = root.output_shape[1:]
        q, k, v = (_linear_maps(source, root, n, d, turned) for source, turned in zip(sources, (0, 1, 0), strict=True))
        if any(part is None for part in (q, k, v)):
            return None
        keys = _attended(differences.mask, n)
        if keys is None:
            return None
        heads = []
        for h in range(sources[0].output_shape[1]):
            weights = [part[0][h] for part in (q, k, v)]
            biases = [part[1][h] for part in (q, k, v)]
            heads.append(AttentionHead(*weights, None, *biases, scale=float(differences.scale)))
        return cls(root, heads, keys, constants_behind(nodes.values(), root), DEFAULT if options is None else options)

    def is_current(self) -> bool:
        """Whether the network's weights still are those that the heads were read off."""
        return all(torch.equal(node.forward(), value) for node, value in self.constants)

    def applies(self) -> bool:
        """Whether the root's present region is one that the certificates know: token balls, or a box."""
        region = self.root.perturbation
        return isinstance(region, PerturbationTokenBall) or getattr(region, "norm", None) == math.inf

    def upper(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Upper bound (s, b) of rows . output, rows (s, b, h, i, c), and an attained sum's distance below it."""
        groups = (rows != 0).any(-1).nonzero()
        problems = []
        for s, b, h, i in groups.tolist():
            problems.append(self._problem(b, h, i, rows[s, b, h, i].detach()))
        total, gap = rows.new_zeros(2, *rows.shape[:2], dtype=torch.float64)
        for (s, b, _, _), certificate in zip(
            groups.tolist(), certify_many(problems, "lagrangian", **self.options), strict=True
        ):
            total[s, b] += certificate.upper
            gap[s, b] += certificate.upper - certificate.lower
        return total, gap

    def _problem(self, batch: int, head: int, query: int, readout: Tensor) -> HeadProblem:
        tokens, region = self.root.center[batch].detach(), self.root.perturbation
        if isinstance(region, PerturbationTokenBall):
            place = TokenBall(region.radii(self.root.center)[batch].detach(), relative=False)
        else:
            place = TokenBox(self.root.lower[batch].detach(), self.root.upper[batch].detach())
            tokens = torch.minimum(torch.maximum(tokens, self.root.lower[batch]), self.root.upper[batch]).detach()
        return HeadProblem(self.heads[head], tokens, query, readout.double(), place, keys=self.keys[query])


def _collect(node, root, nodes: dict) -> bool:
    """Gather the nodes between `root` and `node`; False unless all of them act token by token and affinely."""
    if node is root:
        return True
    if node.name in nodes or not node.perturbed:
        return True
    if type(node).__name__ not in _TOKENWISE or sum(source.perturbed for source in node.inputs) > 1:
        return False
    nodes[node.name] = node
    return all(_collect(source, root, nodes) for source in node.inputs)


def constants_behind(nodes, root) -> list:
    """The parameters and buffers on which the operands of `nodes` rest."""
    found, todo, seen = [], [source for node in nodes for source in node.inputs], {root.name}
    while todo:
        node = todo.pop()
        if node.name in seen:
            continue
        seen.add(node.name)
        todo.extend(node.inputs)
        if type(node).__name__ in ("BoundParams", "BoundBuffers"):
            found.append(node)
    return found


def _all_paths_through(network, root, mix, nodes: dict) -> bool:
    """Whether the perturbed input reaches the output through `mix` only."""
    todo, seen = [network.final_node()], set()
    while todo:
        node = todo.pop()
        if node is root:
            return False
        if node.name in seen or node is mix or not node.perturbed:
            continue
        seen.add(node.name)
        todo.extend(node.inputs)
    return True


def _linear_maps(node, root, n: int, d: int, transposed: bool):
    """Weights (h, c, d) and biases (h, c) of a token-wise affine node (b, h, n, c), read off its values and checked.

    transposed: the node is (b, h, c, n).
    """
    one = root.value[:1].detach()

    def value(tokens: Tensor) -> Tensor:
        out = _evaluate(node, root, tokens.to(one))
        out = out.transpose(-1, -2) if transposed else out
        return out[0].detach().double()  # (h, n, c)

    start = value(torch.zeros(1, n, d))
    if start.shape[1] != n or not torch.allclose(start, start[:, :1].expand_as(start)):
        return None
    weight = start.new_zeros(start.shape[0], start.shape[2], d)
    for first in range(0, d, n):
        columns = list(range(first, min(first + n, d)))
        tokens = torch.zeros(1, n, d)
        tokens[0, range(len(columns)), columns] = 1
        weight[:, :, columns] = (value(tokens) - start)[:, : len(columns)].transpose(1, 2)
    bias = start[:, :1]
    expected = one[0].double() @ weight.transpose(1, 2) + bias
    close = torch.allclose(value(one), expected, rtol=1e-4, atol=1e-5 * (1 + float(expected.abs().max())))
    return (weight, bias[:, 0]) if close else None


def _evaluate(node, root, tokens: Tensor) -> Tensor:
    """The value of `node` when the input is `tokens`, computed beside the network's own state."""
    if node is root:
        return tokens
    value = node.forward(*[_evaluate(source, root, tokens) for source in node.inputs])
    return torch.tensor(value) if isinstance(value, (torch.Size, tuple)) else value


def _attended(mask: Tensor | None, n: int) -> Tensor | None:
    """Which keys each query reads, (n, n) of bool; None for a mask that does more than take keys out."""
    if mask is None:
        return torch.ones(n, n, dtype=torch.bool)
    rows = mask.reshape(-1, mask.shape[-2] if mask.ndim > 1 else 1, n)
    if rows.shape[0] != 1 or not ((rows == 0) | (rows <= _BLOCKED)).all():
        return None
    return (rows[0] == 0).expand(n, n)
