"""What every operator of this package shares: one-sided bounds by a sign flip, free parameters, a finite guard."""

from __future__ import annotations

import math
import warnings

import torch
from auto_LiRPA.bound_ops import BoundOptimizableActivation
from torch import Tensor


class RelaxedOp(BoundOptimizableActivation):
    """An operator that bounds rows . output from above by an affine function of its inputs.

    A subclass gives `upper_rows(rows, parameters)` and `interval_propagate`; the lower bound of a row is minus the
    upper bound of minus the row. Parameters live in [0, 1] (unless `clip` says otherwise), one set for each start node,
    side, row and batch element; any value of them is sound. Rows whose bound is not finite get the interval bound.
    """

    def __init__(self, attr=None, inputs=None, output_index=0, options=None):
        super().__init__(attr, inputs, output_index, options)
        self.requires_input_bounds = list(range(len(self.inputs)))
        self.splittable = False
        self.alpha_batch_dim = 2
        self.warned = False

    def parameter_shape(self) -> tuple[int, ...]:
        """Shape of the parameters of one row and batch element."""
        raise NotImplementedError

    def default_parameters(self, like: Tensor) -> Tensor:
        """Default values, broadcastable to (batch, *parameter_shape)."""
        raise NotImplementedError

    def upper_rows(self, rows: Tensor, parameters: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Affine upper bound of rows . output, rows (s, b, ...): a slope for each input and a constant (s, b)."""
        raise NotImplementedError

    def clip(self, parameters: Tensor) -> None:
        parameters.clamp_(0, 1)

    def clip_alpha(self):
        for parameters in self.alpha.values():
            parameters.data.nan_to_num_(nan=0.5)  # after the gradient of a bound that overflowed
            self.clip(parameters.data)

    clip_alpha_ = clip_alpha  # its name in auto_LiRPA 0.3

    def init_opt_parameters(self, start_nodes):
        self.alpha = type(self.alpha)()
        for name, size, *_ in start_nodes:
            self.alpha[name] = self._init_opt_parameters_impl(size, name_start=name)

    def _init_opt_parameters_impl(self, size_spec, name_start=None, **kwargs):
        like = self.inputs[0].lower
        size = math.prod(size_spec) if isinstance(size_spec, (tuple, list, torch.Size)) else int(size_spec)
        return self.default_parameters(like).expand(2, size, like.shape[0], *self.parameter_shape()).clone()

    def bound_backward(self, last_lA, last_uA, *x, start_node=None, unstable_idx=None, **kwargs):
        lower, lbias = self._side(last_lA, 0, start_node, unstable_idx)
        upper, ubias = self._side(last_uA, 1, start_node, unstable_idx)
        return list(zip(lower, upper, strict=True)), lbias, ubias

    def _side(self, last, side: int, start_node, unstable_idx):
        if last is None:
            return [None] * len(self.inputs), 0
        sign = 1 if side else -1
        rows = sign * dense_rows(last)
        slopes, bias = self.upper_rows(rows, self._values_of_parameters(rows, side, start_node, unstable_idx))
        slopes, bias = self._finite(rows, slopes, bias)
        return [sign * slope for slope in slopes], sign * bias

    def _values_of_parameters(self, rows: Tensor, side: int, start_node, unstable_idx) -> Tensor:
        name = getattr(start_node, "name", None)
        if self.opt_stage not in ("opt", "reuse") or name not in self.alpha:
            return self.default_parameters(self.inputs[0].lower).unsqueeze(0)
        parameters = self.alpha[name][side]
        if unstable_idx is not None and parameters.shape[0] != rows.shape[0]:
            parameters = parameters[unstable_idx]
        return parameters

    def _finite(self, rows: Tensor, slopes, bias: Tensor):
        """Replace the bound of every row that is not finite by the interval bound, and say so once."""
        good = torch.isfinite(bias)
        for slope in slopes:
            good = good & torch.isfinite(slope).flatten(2).all(-1)
        if good.all():
            return slopes, bias
        if not self.warned:
            self.warned = True
            warnings.warn(f"{self.name}: a relaxation was not finite; the interval bound takes its place", stacklevel=2)
        low, high = self.interval_propagate(*[(node.lower, node.upper) for node in self.inputs])
        products = torch.where(rows > 0, rows * high, torch.where(rows < 0, rows * low, torch.zeros_like(rows)))
        slopes = [torch.where(good.view(*good.shape, *[1] * (t.ndim - 2)), t, torch.zeros_like(t)) for t in slopes]
        return slopes, torch.where(good, bias, products.flatten(2).sum(-1))


def dense_rows(last) -> Tensor:
    """The coefficient tensor (s, b, ...) of a backward pass, also where auto_LiRPA passes an identity object."""
    if isinstance(last, Tensor):
        return last
    kind = type(last).__name__
    if kind == "eyeC":
        spec = last.shape[0]
        return torch.eye(spec, device=last.device).view(spec, 1, *last.shape[2:]).expand(*last.shape)
    if kind == "OneHotC":
        spec, batch = last.shape[:2]
        rows = torch.zeros(spec, batch, math.prod(last.shape[2:]), device=last.device)
        index = last.index if last.index.ndim == 2 else last.index.unsqueeze(1).expand(spec, batch)
        ones = torch.ones(spec, batch, 1, device=last.device)
        rows.scatter_(2, index.unsqueeze(-1), ones if last.coeffs is None else last.coeffs.unsqueeze(-1))
        return rows.view(*last.shape)
    raise NotImplementedError(f"attention operators need dense coefficients (conv_mode='matrix'), got {kind}")
