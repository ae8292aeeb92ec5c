"""The better of several bounded networks, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_bounds.errors import ArgumentError


def best_bounds(networks: Sequence, **arguments: Any) -> tuple[Tensor | None, Tensor | None]:
    """Lower and upper bounds of every row, the best of networks that convert one model; arguments of compute_bounds.

    With the fused network and the one that only has its softmax repaired, no row is looser than either's: which
    relaxation of an operator is the better one shows at the network's input only, not at the operator.
    """
    if not networks:
        raise ArgumentError("networks: expected at least one BoundedModule, got none")
    found = [network.compute_bounds(**arguments)[:2] for network in networks]
    lower, upper = zip(*found, strict=True)
    return (
        None if lower[0] is None else torch.stack([_known(low, -torch.inf) for low in lower]).amax(0),
        None if upper[0] is None else torch.stack([_known(high, torch.inf) for high in upper]).amin(0),
    )


def _known(bound: Tensor, nothing: float) -> Tensor:
    """The bound, with `nothing` where it is not a number."""
    return torch.where(torch.isnan(bound), torch.full_like(bound, nothing), bound)
