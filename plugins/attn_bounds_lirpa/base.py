"""What every operator of this package shares: one-sided bounds by a sign flip, free parameters, a finite guard."""

from __future__ import annotations

import math
import warnings

import torch
from auto_LiRPA.bound_ops import BoundOptimizableActivation
from auto_LiRPA.linear_bound import LinearBound
from auto_LiRPA.operators.base import Interval
from torch import Tensor

FORWARD_ROWS = 256  # outputs bounded together in forward mode


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
        self.asked = None, 1  # the start node and side of the pass that is running

    def parameter_shape(self) -> tuple[int, ...]:
        """Shape of the parameters of one row and batch element."""
        raise NotImplementedError

    def default_parameters(self, like: Tensor) -> Tensor:
        """Default values, broadcastable to (batch, *parameter_shape)."""
        raise NotImplementedError

    def upper_rows(self, rows: Tensor, parameters: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Affine upper bound of rows . output, rows (s, b, ...): a slope for each input and a constant (s, b)."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop what is kept of earlier passes: bounds got tighter on the same region, and the next may be better."""

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

    def bound_forward(self, dim_in, *x):
        """Affine bounds of every output, composed with those that the inputs have in the network's input."""
        shape = self.output_shape[1:]
        size, batch = math.prod(shape), self.inputs[0].lower.shape[0]
        eye = torch.eye(size, dtype=self.inputs[0].lower.dtype, device=self.inputs[0].lower.device)
        weights: list[list[Tensor]] = [[], []]
        biases: list[list[Tensor]] = [[], []]
        for block in eye.split(FORWARD_ROWS):
            rows = block.view(-1, 1, *shape).expand(-1, batch, *shape)
            for side in (0, 1):
                slopes, bias = self._side(rows, side, None, None)
                weight = bias.new_zeros(batch, dim_in, len(block))
                for slope, bound in zip(slopes, x, strict=True):
                    if slope is None:
                        continue
                    first, second = (bound.uw, bound.lw) if side else (bound.lw, bound.uw)
                    up, down = slope.flatten(2).clamp(min=0), slope.flatten(2).clamp(max=0)
                    if first is not None:
                        weight = weight + torch.einsum("sbp,bmp->bms", up, first.flatten(2))
                        weight = weight + torch.einsum("sbp,bmp->bms", down, second.flatten(2))
                    ends = (bound.ub, bound.lb) if side else (bound.lb, bound.ub)
                    for part, end in zip((up, down), ends, strict=True):
                        bias = bias + torch.einsum("sbp,bp->sb", part, end.expand(batch, *end.shape[1:]).flatten(1))
                weights[side].append(weight)
                biases[side].append(bias.transpose(0, 1))
        lw, uw = (torch.cat(part, 2).view(batch, dim_in, *shape) for part in weights)
        lb, ub = (torch.cat(part, 1).view(batch, *shape) for part in biases)
        return LinearBound(lw, lb, uw, ub)

    def _side(self, last, side: int, start_node, unstable_idx):
        """Slopes and constants of one side: worked out in float64, then rounded outward to the network's dtype."""
        if last is None:
            return [None] * len(self.inputs), 0
        sign = 1 if side else -1
        rows = sign * dense_rows(last)
        self.asked = start_node, side
        parameters = self._values_of_parameters(rows, side, start_node, unstable_idx).double()
        slopes, bias = self.upper_rows(rows.double(), parameters)
        slopes, bias = self._rounded(*self._finite(rows.double(), slopes, bias), rows.dtype)
        return [None if slope is None else sign * slope for slope in slopes], sign * bias

    def box(self, index: int) -> tuple[Tensor, Tensor]:
        """Bounds of an input, in float64."""
        return self.inputs[index].lower.double(), self.inputs[index].upper.double()

    def most(self, index: int, rows: Tensor) -> Tensor:
        """Largest rows . input, rows (s, b, ...) -> (s, b)."""
        low, high = self.box(index)
        return (rows.clamp(min=0) * high + rows.clamp(max=0) * low).flatten(2).sum(-1)

    def output_interval(self) -> tuple[Tensor, Tensor]:
        """Interval of the output, from the present bounds of the inputs."""
        return self.interval_propagate(*[self.box(index) for index in range(len(self.inputs))])

    def _rounded(self, slopes, bias: Tensor, dtype: torch.dtype):
        """The same bound in another dtype, what rounding the slopes may cost added to the constants."""
        if bias.dtype == dtype:
            return slopes, bias
        narrow = [None if slope is None else slope.to(dtype) for slope in slopes]
        for index, (old, new) in enumerate(zip(slopes, narrow, strict=True)):
            if old is not None:
                bias = bias + self.most(index, (old - new.double()).detach())
        return narrow, round_up(bias, dtype)

    def _values_of_parameters(self, rows: Tensor, side: int, start_node, unstable_idx) -> Tensor:
        name = getattr(start_node, "name", None)
        if self.opt_stage not in ("opt", "reuse") or name not in self.alpha:
            return self.default_parameters(self.inputs[0].lower).unsqueeze(0)
        parameters = self.alpha[name][side]
        if unstable_idx is not None and parameters.shape[0] not in (1, rows.shape[0]):  # 1: shared by all rows
            parameters = parameters[unstable_idx]
        return parameters

    def _finite(self, rows: Tensor, slopes, bias: Tensor):
        """Replace the bound of every row that is not finite by the interval bound, and say so once."""
        good = torch.isfinite(bias)
        for slope in (slope for slope in slopes if slope is not None):
            good = good & torch.isfinite(slope).flatten(2).all(-1)
        if good.all():
            return slopes, bias
        if not self.warned:
            self.warned = True
            warnings.warn(f"{self.name}: a relaxation was not finite; the interval bound takes its place", stacklevel=2)
        low, high = self.output_interval()
        products = torch.where(rows > 0, rows * high, torch.where(rows < 0, rows * low, torch.zeros_like(rows)))
        return [_kept(slope, good) for slope in slopes], torch.where(good, bias, products.flatten(2).sum(-1))


def _kept(slope: Tensor | None, good: Tensor) -> Tensor | None:
    """The slope (s, b, ...) where `good` (s, b), zero elsewhere."""
    if slope is None:
        return None
    return torch.where(good.view(*good.shape, *[1] * (slope.ndim - 2)), slope, torch.zeros_like(slope))


def interval_ends(interval) -> tuple[Tensor, Tensor]:
    """The ends of an interval that auto_LiRPA passes on; of a ball of finite norm, a point with its radius, the box."""
    norm, eps = Interval.get_perturbation(interval)[:2]
    lower, upper = interval[0], interval[1]
    return (lower, upper) if norm in (0, math.inf) else (lower - eps, upper + eps)


def round_up(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` in another dtype, never below it; gradients flow."""
    rounded = value.to(dtype)
    above = torch.nextafter(rounded.detach(), torch.full_like(rounded, math.inf))
    return torch.where(rounded.double() < value, rounded + (above - rounded.detach()), rounded)


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
