"""The vertex bound: the exact maximum over the box of scores, at its threshold vertices."""

from __future__ import annotations

import torch

from ..reduced import Reduced
from ._ranges import ranges
from .first_order import first_order
from .result import BatchBound


def vertex(reduced: Reduced) -> BatchBound:
    """Bound f <= max over s in [s_low, s_high] of softmax(s) . v_high; never above the first-order bound.

    The maximum raises the scores of the keys of largest value and lowers the rest: n + 1 thresholds, all evaluated.
    """
    r = ranges(reduced)
    v, order = r.v_high.sort(dim=1, descending=True)
    s_low, s_high = r.s_low.gather(1, order), r.s_high.gather(1, order)
    floor = v[:, -1:]
    excess = torch.log(v - floor)  # of numbers >= 0: sums stay in logarithms, however far the scores reach
    edge = v.new_full((v.shape[0], 1), -torch.inf)

    def thresholds(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        raised = torch.cat([edge, torch.logcumsumexp(up, 1)], 1)
        lowered = torch.cat([torch.logcumsumexp(down.flip(1), 1).flip(1), edge], 1)
        return torch.logaddexp(raised, lowered)

    log_values = thresholds(s_high + excess, s_low + excess) - thresholds(s_high, s_low)
    best, threshold = log_values.max(1)
    upper = floor.squeeze(1) + torch.exp(best)
    # Equal to the first-order bound where the score box is a point: rounding must not put it above.
    upper = torch.minimum(upper + 2 * reduced.rounding, first_order(reduced).upper)
    return BatchBound(upper, 2 * reduced.rounding, {"t": upper, "threshold": threshold})
