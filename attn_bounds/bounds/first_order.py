"""The first-order certificate: a greedy linear programme over attention patterns."""

from __future__ import annotations

import torch

from ..reduced import Reduced
from ._ranges import ranges, weight_ranges
from .result import BatchBound


def first_order(reduced: Reduced) -> BatchBound:
    """Bound f <= max {sum_j p_j v_high_j : p_low <= p <= p_high, sum_j p_j = 1}, a fractional knapsack.

    Its gap is O(radius). The multiplier of sum_j p_j = 1 is kept as witness: with any t,
    f <= t + sum_j max(p_low_j (v_high_j - t), p_high_j (v_high_j - t)), least at the last key that is filled.
    """
    r = ranges(reduced)
    low, high = weight_ranges(r)
    v, order = r.v_high.sort(dim=1, descending=True)
    low, high = low.gather(1, order), high.gather(1, order)
    left = (1 - low.sum(1)).clamp_min(0.0)
    room = high - low
    filled = torch.minimum(room, (left[:, None] - (room.cumsum(1) - room)).clamp_min(0.0))
    last = (filled > 0).double().cumsum(1).argmax(1, keepdim=True)  # the last key with a share: the programme's price
    t = v.gather(1, last).squeeze(1)
    excess = v - t[:, None]
    # The dual value at t: equal to the greedy value, and a bound whatever the rounding of the greedy filling.
    upper = t + torch.maximum(low * excess, high * excess).sum(1)
    return BatchBound(upper + 2 * reduced.rounding, 2 * reduced.rounding, {"t": t})
