"""What a graph does to scores between q k^T and the softmax: factors and added masks, each a constant of the graph."""

from __future__ import annotations

import torch
from torch import Tensor


class Scaling:
    """softmax(scale q k^T + mask) as a chain of steps (name of the graph's operator, its constant operand).

    Steps go from the softmax towards the scores. The operands are nodes; what they hold may be a parameter, and is read
    again at every use.
    """

    def __init__(self, steps=()):
        self.steps = list(steps)

    @property
    def operands(self) -> list:
        """The nodes that hold the factors and masks."""
        return [operand for _, operand in self.steps]

    def values(self) -> tuple[float, Tensor | None]:
        """The scale, and the mask where there is one."""
        scale, mask = 1.0, None
        for kind, operand in self.steps:
            value = constant_value(operand)
            if kind == "BoundMul":
                scale = scale * value.item()
            elif kind == "BoundDiv":
                scale = scale / value.item()
            else:
                mask = value * scale if mask is None else mask + value * scale
        return scale, mask

    def of(self, products: Tensor) -> Tensor:
        """The scores of products q k^T."""
        scale, mask = self.values()
        return scale * products if mask is None else scale * products + mask.to(products)


def constant_value(node) -> Tensor:
    """The value of a node that does not depend on the network's input."""
    value = node.forward(*[constant_value(source) for source in node.inputs])
    return (value if isinstance(value, Tensor) else torch.as_tensor(value)).detach()
