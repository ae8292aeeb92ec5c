"""Extra backward rows: bounds of chosen linear functions of a node, computed in the middle of another backward pass."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor

from .compat import backward

_SAVED = ("lA", "uA", "zero_lA_mtx", "zero_uA_mtx", "zero_backward_coeffs_l", "zero_backward_coeffs_u", "_start")


def bound_rows(network, node, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds of rows . node over the network's input region.

    rows: (s, b, *shape of the node without its batch dimension). Returns two tensors (s, b).
    Every bound that lies before `node` must be known already; slopes of optimised nodes are at their defaults.
    """
    with paused(network):
        flat = rows.transpose(0, 1)
        lower, upper = backward(network, node, flat)
    return lower.reshape(rows.shape[1], -1).transpose(0, 1), upper.reshape(rows.shape[1], -1).transpose(0, 1)


def upper_bound_rows(network, node, rows: Tensor) -> Tensor:
    """The upper half of `bound_rows` alone (auto_LiRPA 0.7)."""
    with paused(network):
        _, upper = network.backward_general(node, rows.transpose(0, 1), bound_lower=False)
    return upper.reshape(rows.shape[1], -1).transpose(0, 1)


@contextmanager
def paused(network):
    """Put aside what a running backward pass keeps on the nodes, and restore it."""
    # plain attributes: reading and writing them around Module.__setattr__ is many times faster
    saved = [
        (vars(node), {name: vars(node)[name] for name in _SAVED if name in vars(node)}) for node in network.nodes()
    ]
    stages = [(node, node.opt_stage) for node in network.nodes() if hasattr(node, "opt_stage")]
    visited = {name: list(starts) for name, starts in getattr(network, "backward_from", {}).items()}
    return_a = getattr(network, "return_A", False)
    network.return_A = False
    for node, _ in stages:
        node.opt_stage = None
    try:
        yield
    finally:
        network.return_A = return_a
        network.backward_from = visited
        for node, stage in stages:
            node.opt_stage = stage
        for now, before in saved:
            for name in _SAVED:
                now.pop(name, None)
            now.update(before)


def nonzero_groups(rows: Tensor) -> Tensor:
    """Indices (s, h, i) of the rows (s, b, h, i, c) that are not zero for some batch element; (m, 3)."""
    return (rows != 0).any(-1).any(1).nonzero()


def value_rows(directions: Tensor, heads: Tensor, n_heads: int, n_keys: int) -> Tensor:
    """Rows c on key j of head h of a value node (b, h, j, c), for each direction and key.

    directions: (m, b, c); heads: (m,). Returns (m * n_keys, b, n_heads, n_keys, c).
    """
    m, batch, width = directions.shape
    rows = directions.new_zeros(m, n_keys, batch, n_heads, n_keys, width)
    first = torch.arange(m, device=directions.device)
    for key in range(n_keys):
        rows[first, key, :, heads, key] = directions
    return rows.flatten(0, 1)
