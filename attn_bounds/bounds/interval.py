"""The interval bound: attention weights and values each at the better end of their range."""

from __future__ import annotations

import torch

from ..reduced import Reduced
from ._ranges import price_bound, ranges, weight_ranges
from .result import BatchBound


def interval(reduced: Reduced) -> BatchBound:
    """Bound f <= t + sum_j max(p_low_j (v_high_j - t), p_high_j (v_high_j - t)) at t = f(centre), for sum_j p_j = 1."""
    r = ranges(reduced)
    t = (torch.softmax(reduced.s0, -1) * reduced.v0).sum(-1)
    upper = price_bound(r, *weight_ranges(r), t) + 2 * reduced.rounding
    return BatchBound(upper, 2 * reduced.rounding, {"t": t})
