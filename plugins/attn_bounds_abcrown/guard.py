"""A guard around compute_bounds: what is not finite is unknown; no bound exceeds a value that a point attains."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def install_guard(network, points: int = 16, steps: int = 10) -> None:
    """Wrap `network.compute_bounds` and `network.init_alpha` so that their lower bounds cannot verify a false property.

    A lower bound that is NaN or infinite becomes the most negative finite number ("unknown"). A lower bound above the
    value of C . f at a sampled or attacked point of the same (sub)domain is lowered to that value, with a warning: the
    point belongs to a subdomain if it lies in its region and within all the intermediate bounds that define its splits.
    Regions are boxes and L2 balls; of others only the first check is made.
    """
    guard = _Guard(network, points, steps)
    for name in ("compute_bounds", "init_alpha"):
        setattr(network, name, guard.wrap(getattr(network, name)))


class _Guard:
    def __init__(self, network, points: int, steps: int):
        self.network, self.points, self.steps = network, points, steps
        self.region: tuple[Tensor, Tensor] | None = None
        self.radius: float | None = None
        self.samples: Tensor | None = None
        self.values: dict[str, Tensor] = {}
        self.warned = self.busy = False

    def wrap(self, function):
        def guarded(x=None, *args, **kwargs):
            if self.busy:  # a wrapped function that calls another one is checked once, at the outside
                return function(x, *args, **kwargs)
            self.busy = True
            try:
                C = kwargs.get("C", kwargs.get("c"))
                checked = C is not None and kwargs.get("final_node_name") in (None, self.network.final_name)
                box = box_of(x) if checked else None
                if box is not None:
                    self._sample(x, *box, C, radius_of(x))
                return self._check(
                    function(x, *args, **kwargs), box, C, kwargs.get("interm_bounds") or {}, radius_of(x)
                )
            finally:
                self.busy = False

        return guarded

    def _check(self, result, box, C, interm_bounds, radius):
        if not isinstance(result, (tuple, list)):  # init_alpha(skip_bound_compute=True): no bounds in it
            return result
        lower, upper = result[:2]
        if isinstance(lower, Tensor):
            lower = torch.where(torch.isfinite(lower), lower, torch.full_like(lower, torch.finfo(lower.dtype).min))
            if box is not None:
                lower = self._cap(lower, *box, C, interm_bounds, radius)
        if isinstance(upper, Tensor):
            upper = torch.where(torch.isnan(upper), torch.full_like(upper, torch.finfo(upper.dtype).max), upper)
        return type(result)([lower, upper, *result[2:]])

    def _cap(self, lower: Tensor, low: Tensor, high: Tensor, C: Tensor, interm_bounds: dict, radius) -> Tensor:
        bounds = [(self.values[name], *pair[:2]) for name, pair in interm_bounds.items() if name in self.values]
        for point, sample in enumerate(self.samples):
            inside = ((sample >= low) & (sample <= high)).flatten(1).all(1)
            if radius is not None:
                inside &= (sample - (low + high) / 2).flatten(1).norm(dim=1) <= radius * (1 + 1e-6)
            for value, lo, up in bounds:
                inside &= ((value[point] >= lo) & (value[point] <= up)).flatten(1).all(1)
            if not inside.any():
                continue
            output = self.values[self.network.final_name][point].flatten().to(lower)
            attained = torch.einsum("bso,o->bs", C.to(lower).flatten(2), output)
            too_high = inside.unsqueeze(1) & (lower > attained + 1e-5 * (1 + attained.abs()))
            if too_high.any():
                self._warn()
                lower = torch.where(too_high, attained, lower)
        return lower

    def _warn(self):
        if not self.warned:
            self.warned = True
            warnings.warn("a lower bound above an attained value was lowered: a relaxation is unsound", stacklevel=2)

    def _sample(self, x, low: Tensor, high: Tensor, C: Tensor, radius: float | None) -> None:
        """Points of a new root region and the values of every node there: centre, corners, and signed ascent."""
        if (
            radius == self.radius
            and self.region is not None
            and (low >= self.region[0]).all()
            and (high <= self.region[1]).all()
        ):
            return
        low, high = low.amin(0, keepdim=True).detach(), high.amax(0, keepdim=True).detach()
        self.region, self.radius = (low, high), radius
        generator = torch.Generator().manual_seed(0)
        corners = torch.rand(self.points, *low.shape[1:], generator=generator).to(low) < 0.5
        centre = (low + high) / 2
        start = _into_ball(torch.cat([centre, torch.where(corners, low, high)]), centre, radius)
        best = start.clone()
        rows = C.flatten(0, 1).flatten(1).to(best)
        with torch.enable_grad():
            for _ in range(self.steps):
                best.requires_grad_(True)
                (gradient,) = torch.autograd.grad((self.network(best).flatten(1) @ rows.T).amin(1).sum(), best)
                best = torch.clamp(best.detach() - 0.25 * (high - low) * gradient.sign(), low, high)
                best = _into_ball(best, centre, radius)
        self.samples = torch.cat([start, best.detach()])
        with torch.no_grad():
            self.network(self.samples)
            self.values = {
                node.name: node.forward_value.detach().clone()
                for node in self.network.nodes()
                if node.from_input and isinstance(getattr(node, "forward_value", None), Tensor)
            }
            self.network(*x)  # the nodes remember the shapes of the last input that they saw


def _into_ball(points: Tensor, centre: Tensor, radius: float | None) -> Tensor:
    if radius is None:
        return points
    away = (points - centre).flatten(1).norm(dim=1).clamp(min=1e-30)
    share = (radius / away).clamp(max=1).view(-1, *[1] * (points.ndim - 1))
    return centre + share * (points - centre)


def box_of(x):
    """(lower, upper) of the input box, or of the box around an L2 ball; None where the region is neither."""
    first = x[0] if isinstance(x, (tuple, list)) else x
    radius = radius_of(x)
    if radius is not None:
        return first.data - radius, first.data + radius
    ptb = getattr(first, "ptb", None)
    low, high = getattr(ptb, "x_L", None), getattr(ptb, "x_U", None)
    return None if low is None or high is None or ptb.norm != float("inf") else (low, high)


def radius_of(x) -> float | None:
    """Radius of an L2 ball around all inputs together, None for other regions."""
    ptb = getattr(x[0] if isinstance(x, (tuple, list)) else x, "ptb", None)
    return float(ptb.eps) if getattr(ptb, "norm", None) == 2 and float(ptb.eps) > 0 else None
