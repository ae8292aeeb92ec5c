"""Optimise the free parameters of every relaxation row by row: first of intermediate bounds, then of the outputs."""

from __future__ import annotations

import contextlib
import io
import math
import time

import torch
from torch import Tensor

from attn_bounds.errors import MethodNotApplicableError

from .attention import BoundAttentionMix, BoundScoreDifferences
from .base import RelaxedOp
from .compat import IS_03

_SETTINGS = {  # a verifier may have set these for its own passes
    "enable_alpha_crown": True,
    "enable_beta_crown": False,
    "init_alpha": False,
    "use_shared_alpha": False,
    "fix_interm_bounds": True,
    "keep_best": True,
    "pruning_in_iteration": False,
    "loss_reduction_func": lambda bound: bound.flatten(1).sum(1, keepdim=True),
    "stop_criterion_func": lambda bound: False,
}


_PARAMETERS = 10**7


def optimised_lower_bound(
    network,
    x,
    C: Tensor,  # (b, s, outputs)
    rows_iterations: int = 15,
    iterations: int = 30,
    lr: float = 0.2,
    deadline: float = math.inf,
    stop_above: Tensor | float | None = None,
    interm_bounds: dict | None = None,
):
    """Lower bounds (b, s) of C . output: one pass, then intermediate rows and the final rows with optimised parameters.

    Rows above `stop_above` (a number, or broadcastable to (b, s)) are done and not optimised further; nothing new is
    started after `deadline` (time.monotonic()). Returns the lower bounds, the intermediate bounds they rest on as
    {node name: (lower, upper)}, and the lower bounds after the first pass. No iterations: that part is left out.
    """
    if IS_03:
        raise MethodNotApplicableError("optimised_lower_bound: needs auto_LiRPA 0.7; use method='CROWN-Optimized'")
    with torch.no_grad():
        first, _ = network.compute_bounds(x=x, C=C, method="CROWN", bound_upper=False, interm_bounds=interm_bounds)
    first = first.detach().flatten(1).clone()  # as many rows as outputs come back in the output's shape
    bounds, best = _known_bounds(network), first

    def left() -> Tensor:
        """Indices of the rows that still need work for some batch element."""
        if time.monotonic() > deadline:
            return torch.zeros(0, dtype=torch.long)
        open_rows = torch.ones_like(best, dtype=torch.bool) if stop_above is None else ~(best > stop_above)
        return open_rows.any(0).nonzero().squeeze(-1)

    for name in _rows_worth_optimising(network) if rows_iterations else ():
        if not len(left()):
            return best, bounds, first
        _tighten(network, x, name, bounds, rows_iterations, lr, deadline)
        for node in network.nodes():
            if isinstance(node, RelaxedOp):
                node.forget()
        with torch.no_grad():
            again, _ = network.compute_bounds(
                x=x, C=C, method="CROWN", bound_upper=False, interm_bounds=_without_bounds_after(network, bounds, name)
            )
        bounds = _intersect(bounds, _known_bounds(network))
        best = torch.maximum(best, again.detach().flatten(1))
    rows = left()
    if len(rows) and iterations:
        stop = None if stop_above is None else _columns(stop_above, best, rows)
        final = optimisation(network, x, None, C[:, rows], bounds, iterations, lr, "lower", deadline, stop)
        best = best.index_copy(1, rows, torch.maximum(best[:, rows], final))
    return best, bounds, first


def _intersect(old: dict, new: dict) -> dict:
    """The tighter of two sets of bounds, node by node and unit by unit."""
    both = {**old, **new}
    for name in old.keys() & new.keys():
        both[name] = torch.maximum(old[name][0], new[name][0]), torch.minimum(old[name][1], new[name][1])
    return both


def _columns(stop_above, best: Tensor, rows: Tensor) -> Tensor:
    return torch.as_tensor(stop_above, dtype=best.dtype, device=best.device).expand_as(best)[:, rows]


def _without_bounds_after(network, bounds: dict, name: str) -> dict:
    """The bounds that stay valid inputs when those of `name` are new: all but the ones computed from it."""
    return {key: value for key, value in bounds.items() if not _comes_before(network, name, key)}


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


def _tighten(network, x, name, bounds, iterations, lr, deadline):
    lower, upper = (t.flatten(1) for t in bounds[name])
    is_relu = not isinstance(network[name], BoundScoreDifferences)
    worth = ((lower < 0) & (upper > 0)).any(0) if is_relu else (upper > lower).any(0)
    index = worth.nonzero().squeeze(-1)
    if not len(index):
        return
    before = {key: value for key, value in bounds.items() if key != name and _comes_before(network, key, name)}
    new_lower, new_upper = lower.clone(), upper.clone()
    for part in index.split(_rows_at_once(network)):
        if time.monotonic() > deadline:
            break
        C = torch.zeros(lower.shape[0], len(part), lower.shape[1], dtype=lower.dtype, device=lower.device)
        C[:, torch.arange(len(part)), part] = 1
        low = optimisation(network, x, name, C, before, iterations, lr, "lower", deadline)
        high = optimisation(network, x, name, C, before, iterations, lr, "upper", deadline)
        new_lower[:, part] = torch.maximum(lower[:, part], low)
        new_upper[:, part] = torch.minimum(upper[:, part], high)
    shape = bounds[name][0].shape
    bounds[name] = new_lower.view(shape), new_upper.view(shape)


def _rows_at_once(network) -> int:
    """As many rows as keep each node's parameters, one set a row, within some tens of megabytes."""
    known = [node for node in network.nodes() if isinstance(node, RelaxedOp)]
    known = [node for node in known if all(isinstance(source.lower, Tensor) for source in node.inputs)]
    return max(1, _PARAMETERS // max([1, *(math.prod(node.parameter_shape()) for node in known)]))


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


def optimisation(
    network, x, name, C, interm_bounds, iterations, lr, side, deadline,
    stop_above=None, alphas: dict[str, Tensor] | None = None, multipliers: bool = False,
) -> Tensor:  # fmt: skip
    """CROWN-Optimized bounds of C . node, one side, with the given bounds of everything before it kept fixed.

    alphas: parameters to start from, {node name: tensor}, instead of the defaults. multipliers: the ReLU inputs carry
    multipliers of signs (`sparse_betas`), to be optimised too.
    """
    network.last_final_node_name = None
    args = network.bound_opts["optimize_bound_args"]
    saved = dict(args)
    args.update(_SETTINGS, iteration=iterations, lr_alpha=lr, early_stop_patience=iterations)
    args.update(enable_beta_crown=multipliers, lr_beta=lr)
    args["max_time"] = max(0.0, deadline - time.monotonic())
    if stop_above is not None:
        args["stop_criterion_func"] = lambda bound: (bound.flatten(1) > stop_above).all(1, keepdim=True)
    sides = {"bound_lower": side == "lower", "bound_upper": side == "upper"}
    try:
        _set_parameters(network, x, name, C, interm_bounds, sides, alphas)
        with contextlib.redirect_stdout(io.StringIO()):
            lower, upper = network.compute_bounds(
                x=x, C=C, method="CROWN-Optimized", final_node_name=name, interm_bounds=interm_bounds, **sides
            )
    finally:
        args.clear()
        args.update(saved)
    return (lower if side == "lower" else upper).detach().flatten(1)


def _set_parameters(network, x, name, C, interm_bounds, sides: dict, alphas: dict[str, Tensor] | None) -> None:
    """Give the nodes default parameters, by a pass with the known bounds, or the given ones."""
    for node in network.nodes():
        node.used = False
        if hasattr(node, "alpha"):
            node.alpha = type(node.alpha)()
    if alphas is None:
        with contextlib.redirect_stdout(io.StringIO()):
            network.init_alpha(x, c=C, final_node_name=name, interm_bounds=interm_bounds, **sides)
        return
    for node in network.get_enabled_opt_act():
        node.opt_init()
    for key, value in alphas.items():
        network[key].alpha[name or network.final_name] = value.clone().requires_grad_()
