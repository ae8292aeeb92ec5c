"""Optimise the free parameters of every relaxation row by row: first of intermediate bounds, then of the outputs."""

from __future__ import annotations

import contextlib
import io
import time

import torch
from torch import Tensor

from .attention import BoundAttentionMix, BoundScoreDifferences


def optimised_lower_bound(
    network,
    x,
    C: Tensor,
    rows_iterations: int = 15,
    iterations: int = 30,
    lr: float = 0.1,
    deadline: float | None = None,
    stop_above: float | None = None,
    interm_bounds: dict | None = None,
):
    """Lower bounds (b, s) of C . output after one pass, then with intermediate rows and final rows optimised.

    C: (b, s, outputs). Stops early once every row is above `stop_above`, or after `deadline` (time.monotonic()).
    Returns (lower, intermediate bounds {node name: (lower, upper)}, lower after the first pass).
    """
    with torch.no_grad():
        first, _ = network.compute_bounds(x=x, C=C, method="CROWN", bound_upper=False, interm_bounds=interm_bounds)
        first = first.detach().clone()
    bounds = _known_bounds(network)
    best = first

    def done():
        over = deadline is not None and time.monotonic() > deadline
        return over or (stop_above is not None and bool((best > stop_above).all()))

    for name in _rows_worth_optimising(network):
        if done():
            return best, bounds, first
        _tighten(network, x, name, bounds, rows_iterations, lr)
    if not done():
        with torch.no_grad():
            again, _ = network.compute_bounds(x=x, C=C, method="CROWN", bound_upper=False, interm_bounds=bounds)
        best = torch.maximum(best, again.detach())
    if not done():
        final = _optimise(network, x, None, C, bounds, iterations, lr, "lower", stop_above)
        best = torch.maximum(best, final)
    return best, bounds, first


def _known_bounds(network) -> dict:
    return {
        node.name: (node.lower.detach().clone(), node.upper.detach().clone())
        for node in network.layers_requiring_bounds
        if isinstance(node.lower, Tensor) and isinstance(node.upper, Tensor)
    }


def _rows_worth_optimising(network) -> list[str]:
    """Score differences and inputs of ReLUs whose bounds rest on at least one relaxation."""
    names = []
    for node in _topological(network):
        if isinstance(node, BoundAttentionMix):
            names.append(node.inputs[0].name)
        elif type(node).__name__ == "BoundRelu":
            names.append(node.inputs[0].name)
    return [name for name in dict.fromkeys(names) if _has_relaxation_before(network, name)]


def _topological(network) -> list:
    """The perturbed nodes that the last pass used, each after its inputs."""
    order, seen = [], set()
    todo = [(network.final_node(), False)]
    while todo:
        node, inputs_done = todo.pop()
        if inputs_done:
            order.append(node)
        elif node.name not in seen and node.perturbed:
            seen.add(node.name)
            todo.append((node, True))
            todo.extend((source, False) for source in node.inputs)
    return order


def _has_relaxation_before(network, name: str) -> bool:
    todo, seen = list(network[name].inputs), set()
    while todo:
        node = todo.pop()
        if node.name in seen or not node.perturbed:
            continue
        seen.add(node.name)
        if node.requires_input_bounds and not isinstance(node, BoundScoreDifferences):
            return True
        todo.extend(node.inputs)
    return False


def _tighten(network, x, name, bounds, iterations, lr):
    lower, upper = (t.flatten(1) for t in bounds[name])
    is_relu = not isinstance(network[name], BoundScoreDifferences)
    worth = ((lower < 0) & (upper > 0)).any(0) if is_relu else (upper > lower).any(0)
    index = worth.nonzero().squeeze(-1)
    if not len(index):
        return
    C = torch.zeros(lower.shape[0], len(index), lower.shape[1], dtype=lower.dtype, device=lower.device)
    C[:, torch.arange(len(index)), index] = 1
    before = {key: value for key, value in bounds.items() if key != name and _comes_before(network, key, name)}
    low = _optimise(network, x, name, C, before, iterations, lr, "lower")
    high = _optimise(network, x, name, C, before, iterations, lr, "upper")
    new_lower, new_upper = lower.clone(), upper.clone()
    new_lower[:, index] = torch.maximum(lower[:, index], low)
    new_upper[:, index] = torch.minimum(upper[:, index], high)
    shape = bounds[name][0].shape
    bounds[name] = new_lower.view(shape), new_upper.view(shape)


def _comes_before(network, key: str, name: str) -> bool:
    todo, seen = list(network[name].inputs), set()
    while todo:
        node = todo.pop()
        if node.name == key:
            return True
        if node.name not in seen and node.perturbed:
            seen.add(node.name)
            todo.extend(node.inputs)
    return False


def _optimise(network, x, name, C, interm_bounds, iterations, lr, side, stop_above=None) -> Tensor:
    """CROWN-Optimized bounds of C . node with the given bounds of everything before it kept fixed."""
    for node in network.nodes():
        node.used = False
        if hasattr(node, "alpha"):
            node.alpha = type(node.alpha)()
    network.last_final_node_name = None
    args = network.bound_opts["optimize_bound_args"]
    saved = dict(args)
    args.update(
        iteration=iterations, lr_alpha=lr, fix_interm_bounds=True, keep_best=True, early_stop_patience=iterations
    )
    if stop_above is not None:
        args["stop_criterion_func"] = lambda bound: (bound > stop_above).all(1, keepdim=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            lower, upper = network.compute_bounds(
                x=x,
                C=C,
                method="CROWN-Optimized",
                final_node_name=name,
                interm_bounds=interm_bounds,
                bound_lower=side == "lower",
                bound_upper=side == "upper",
            )
    finally:
        args.clear()
        args.update(saved)
    return (lower if side == "lower" else upper).detach().flatten(1)
