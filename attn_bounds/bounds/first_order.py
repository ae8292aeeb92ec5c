"""The first-order certificate: a greedy linear programme over attention patterns."""

from __future__ import annotations

import torch

from ..reduced import Reduced
from ._ranges import price_bound, ranges, weight_ranges
from .result import BatchBound


def first_order(reduced: Reduced) -> BatchBound:
    """Bound f <= max {sum_j p_j v_high_j : p_low <= p <= p_high, sum_j p_j = 1}, a fractional knapsack.

    Its gap is O(radius). What is reported is the programme's dual value at the price t of sum_j p_j = 1 (the value of
    the last key that the greedy filling reaches): a bound whatever the rounding of the filling.
    """
    r = ranges(reduced)
    low, high = weight_ranges(r)
    v, order = r.v_high.sort(dim=1, descending=True)
    room = (high - low).gather(1, order)
    left = (1 - low.sum(1, keepdim=True)).clamp_min(0.0)
    reached = (room.cumsum(1) < left).sum(1, keepdim=True).clamp_max(reduced.n - 1)
    price = v.gather(1, reached).squeeze(1)
    # The interval bound's price is tried too, so that rounding never puts this bound above that one.
    centre = (torch.softmax(reduced.s0, -1) * reduced.v0).sum(-1)
    at_price, at_centre = price_bound(r, low, high, price), price_bound(r, low, high, centre)
    upper = torch.minimum(at_price, at_centre) + 2 * reduced.rounding
    return BatchBound(upper, 2 * reduced.rounding, {"t": torch.where(at_price <= at_centre, price, centre)})
