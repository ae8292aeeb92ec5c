"""LOCAL regime: attention in a converted graph whose q, k and v act token by token and affinely on the network's input.

Such a fused attention becomes one operator on the tokens. Its weights are read off the nodes before it, in float64, and
read again when a parameter of the network has changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_bounds.errors import UnsupportedModelError

from .heads_op import MAX_GROUPS, BoundTokenHeads
from .held import Constants
from .scaling import Scaling, constant_value
from .tokens import TokenHeads, normal_mask

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


class BoundReadHeads(BoundTokenHeads):
    """Heads whose weights are read off a graph: inputs tokens x (b, n, d), q, k turned, v; output (b, h, n, c).

    Behind these the operands of `scaling`, so that the graph knows what the operator rests on.
    """

    def __init__(
        self,
        attr=None,
        inputs=None,
        output_index=0,
        options=None,
        scaling: Scaling | None = None,
        certificate: dict | None = None,
        max_groups: int = MAX_GROUPS,
    ):
        super().__init__(attr, inputs, output_index, options, certificate, max_groups)
        self.scaling = scaling or Scaling()
        nodes: dict = {}
        for source in self.inputs[1:4]:
            _collect(source, self.inputs[0], nodes)
        self.sources = list(nodes.values())
        self.read: tuple[Constants, TokenHeads] | None = None

    def forward(self, x, q, k, v, *operands):
        return torch.softmax(self.scaling.of(q.matmul(k)), -1).matmul(v)

    def heads(self):
        if self.read is None or not self.read[0].unchanged():
            heads = read_heads(self.inputs[0], self.inputs[1:4], *self.scaling.values())
            if heads is None:
                raise UnsupportedModelError(
                    f"{self.name}: its parameters changed and q, k, v no longer act on every token alike; convert again"
                )
            self.read = Constants([*self.sources, *self.scaling.operands]), heads
        return self.read[1]

    def by_head(self, rows):
        return rows

    def laid_out(self, output):
        return output


def find_tokens(network, sources: list, scale: float, mask: Tensor | None):
    """The input node whose tokens q, k (turned) and v read, token by token and affinely; None where there is none."""
    roots = [node for node in network.roots() if type(node).__name__ == "BoundInput"]
    if len(roots) != 1 or not roots[0].perturbed or len(roots[0].output_shape) != 3:
        return None  # what another input holds may differ from call to call and between batch elements
    nodes: dict = {}
    if not all(_collect(source, roots[0], nodes) for source in sources):
        return None
    if mask is not None and mask.reshape(-1, *mask.shape[-2:]).shape[0] != 1:
        return None  # a mask for each head
    return roots[0] if read_heads(roots[0], sources, scale, mask) is not None else None


def read_heads(root, sources: list, scale: float, mask: Tensor | None) -> TokenHeads | None:
    """The weights behind q, k (turned) and v, or None where they are not one affine function of every token."""
    n, d = root.output_shape[1:]
    parts = [_linear_maps(source, root, n, d, turned) for source, turned in zip(sources, (0, 1, 0), strict=True)]
    if any(part is None for part in parts):
        return None
    rows = None if mask is None else mask.reshape(-1, n)
    return TokenHeads(*[value for part in parts for value in part], scale=float(scale), mask=normal_mask(rows))


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


def _linear_maps(node, root, n: int, d: int, transposed: bool):
    """Weights (h, c, d) and biases (h, c) of a token-wise affine node (b, h, n, c), read off its values and checked.

    transposed: the node is (b, h, c, n).
    """
    one = root.value[:1].detach().double()

    def value(tokens: Tensor) -> Tensor:
        out = _evaluate(node, root, tokens.to(one))
        out = out.transpose(-1, -2) if transposed else out
        return out[0].detach()  # (h, n, c)

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
    # the input at hand may be zero, or equal in all tokens, and then shows nothing of a map that tells tokens apart
    points = torch.randn(1, n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(one), one
    for point in points:
        expected = point[0] @ weight.transpose(1, 2) + bias
        if not torch.allclose(value(point), expected, rtol=1e-9, atol=1e-11 * (1 + float(expected.abs().max()))):
            return None
    return weight, bias[:, 0]


def _evaluate(node, root, tokens: Tensor) -> Tensor:
    """The value of `node` when the input is `tokens`, in float64, computed beside the network's own state."""
    if node is root:
        return tokens
    if not node.perturbed:
        value = constant_value(node)
        return value.double() if value.is_floating_point() else value
    return node.forward(*[_evaluate(source, root, tokens) for source in node.inputs])
