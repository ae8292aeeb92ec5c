"""The empirical NTK of any torch module, computed in chunks that fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from attn_bounds.errors import ArgumentError, ShapeError
from attn_bounds.ntk._arrays import choice

Function = Callable[[Mapping[str, Tensor], Tensor], Tensor]

_CONTRACTION = {"full": "naf,mbf->nmab", "trace": "naf,maf->nm", "diagonal": "naf,maf->nma"}
_STATEFUL = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


def module_function(module: nn.Module) -> tuple[Function, dict[str, Tensor]]:
    """Return (f, params) with f(params, x) = module(x), params the trainable parameters (detached).

    Raises ArgumentError for batch norm or dropout in training mode: their output is not a function of one example.
    """
    for part in module.modules():
        if isinstance(part, _STATEFUL) and part.training:
            raise ArgumentError(
                f"f: {type(part).__name__} in training mode mixes or drops examples; call f.eval() first"
            )
    params = {k: p.detach() for k, p in module.named_parameters() if p.requires_grad}
    if not params:
        raise ArgumentError("f: the module has no trainable parameter, so it has no tangent kernel")
    fixed = {k: p.detach() for k, p in module.named_parameters() if not p.requires_grad}
    fixed |= dict(module.named_buffers())

    def f(values: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, {**values, **fixed}, (x,))

    return f, params


def jacobian(f: Function, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Compute the per-example Jacobian with respect to the parameters, flattened: (n, outputs, parameters)."""

    def single(values: Mapping[str, Tensor], row: Tensor) -> Tensor:
        return f(values, row[None]).reshape(-1)

    parts = vmap(jacrev(single), (None, 0))(dict(params), x)
    return torch.cat([p.flatten(2) for p in parts.values()], dim=2)


def empirical_ntk(
    f: Function | nn.Module,
    params: Mapping[str, Tensor] | None,
    x1: Tensor,
    x2: Tensor | None = None,
    *,
    reduce: str = "trace",
    memory_mib: float = 256.0,
) -> Any:
    """Compute Theta(x1, x2) = J(x1) J(x2)^T, J the Jacobian of the outputs with respect to the parameters.

    Args:
        f: f(params, x) -> (n, outputs), or a module (then params may be None: its trainable parameters).
        params: names to tensors. x1 (n1, ...), x2 (n2, ...); None means x1. Used in the dtype given.
        reduce: "full" (n1, n2, outputs, outputs); "diagonal" (n1, n2, outputs); "trace" (n1, n2), the SUM over
            outputs as in the torch.func recipe. neural-tangents' trace_axes=(-1,) is this divided by the outputs.
        memory_mib: about how much memory the Jacobians may take; inputs are processed in chunks accordingly.
    Differentiable in x1 and x2 when they require gradients. Errors: ArgumentError, ShapeError.
    """
    choice("reduce", reduce, tuple(_CONTRACTION))
    if isinstance(f, nn.Module):
        f, own = module_function(f)
        params = own if params is None else params
    if params is None:
        raise ArgumentError("params: expected a mapping of parameters, got None with f a plain function")
    same = x2 is None
    second = x1 if x2 is None else x2
    if x1.shape[1:] != second.shape[1:]:
        raise ShapeError(f"x2: expected rows of shape {tuple(x1.shape[1:])}, got {tuple(second.shape[1:])}")
    if len(x1) == 0 or len(second) == 0:
        raise ShapeError("x1, x2: expected at least one row each")
    dtype = next(iter(params.values())).dtype
    for name, x in (("x1", x1), ("x2", second)):
        if x.is_floating_point() and x.dtype != dtype:  # integers may be token indices, which a module embeds
            raise ArgumentError(
                f"{name}: expected {dtype} like the parameters, got {x.dtype}; convert it or the module"
            )
    size = sum(p.numel() for p in params.values())
    with torch.no_grad():
        outputs = f(params, x1[:1]).numel()
    item = next(iter(params.values())).element_size()
    # Two Jacobian chunks live at once, and vmap needs about as much again for its intermediates.
    chunk = max(1, int(memory_mib * 2**20 / (4 * item * size * outputs)))
    starts1, starts2 = (range(0, len(x), chunk) for x in (x1, second))
    rows = []
    for i in starts1:
        J1 = jacobian(f, params, x1[i : i + chunk])
        row = []
        for j in starts2:
            J2 = J1 if same and i == j else jacobian(f, params, second[j : j + chunk])
            row.append(torch.einsum(_CONTRACTION[reduce], J1, J2))
        rows.append(torch.cat(row, dim=1))
    return torch.cat(rows, dim=0)
