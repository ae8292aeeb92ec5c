"""Ranges of values in the propagated directions, over the network's input region.

Three ways, each valid by itself: extra backward rows (`rows.bound_rows`, the tightest), composed affine forms
(`forms.ValueForms`), and what is known already: for rows that an optimiser or a branch moved a little away from r0,
r . v = r0 . v + (r - r0) . v, the first of the range found for r0 and the second of the values' enclosure. It costs a
hundredth of the others and loses in proportion to the move.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from .forms import Held, ValueForms
from .rows import bound_rows, nonzero_groups, value_rows

_MOST_KNOWN = 64  # rows of one start node that are worth remembering


class ValueRanges:
    """Ranges of rows . v for a value node v (b, h, j, c); max_rows: of how many extra backward rows at most."""

    def __init__(self, network, max_rows: int):
        self.network = weakref.ref(network) if network is not None else lambda: None
        self.max_rows = max_rows
        self.max_work = 4 * 10**9  # multiplications of one exact composition; beyond it, enclosing ellipsoids
        self.forms = None
        self.known: dict = {}

    def forget(self) -> None:
        """Drop what is known."""
        self.forms, self.known = None, {}

    def of(self, node, rows: Tensor, start, optimising: bool) -> tuple[Tensor, Tensor]:
        """Interval of rows_i . v_j, (s, b, h, i, j), for rows (s, b, h, i, c).

        start: names the pass that asks (its start node and side); a later one with the same name may use what this one
        found, while it holds.
        """
        lower, upper = interval(node, rows)
        network = self.network()
        if network is None:
            return lower, upper
        known = self.known.get(start)
        if known is not None and not known.held.still(network):
            known = None
            del self.known[start]
        if known is not None and (optimising or rows.shape[1] > known.lower.shape[1]):
            low, high = known.of(node, rows, self._forms_that_hold())
            return torch.maximum(lower, low), torch.minimum(upper, high)
        groups = nonzero_groups(rows)
        if not len(groups):
            return lower, upper
        s, h, i = groups.unbind(-1)
        exact = len(groups) * node.lower.shape[2] <= self.max_rows
        directions = rows[s, :, h, i].to(node.lower.dtype)
        low, high = (end.to(rows.dtype) for end in (self._by_rows if exact else self._by_forms)(node, directions, h))
        lower, upper = _put(lower, s, h, i, low, torch.maximum), _put(upper, s, h, i, high, torch.minimum)
        if start[0] is not None and rows.shape[0] <= _MOST_KNOWN:
            self.known[start] = _Known(Held(network, node), rows, lower, upper)
        return lower, upper

    def _forms_that_hold(self) -> ValueForms | None:
        """The forms, unless what they rest on has changed."""
        if self.forms is not None and not self.forms.held.still(self.network()):
            self.forms = None
        return self.forms

    def _by_rows(self, node, directions, heads):
        n_heads, n_keys = node.lower.shape[1:3]
        low, high = bound_rows(self.network(), node, value_rows(directions, heads, n_heads, n_keys))
        return (t.reshape(len(heads), n_keys, -1).transpose(1, 2) for t in (low, high))

    def _by_forms(self, node, directions, heads):
        if self._forms_that_hold() is None:
            self.forms = ValueForms(self.network(), node)
        n_heads, n_keys = node.lower.shape[1:3]
        low = directions.new_zeros(*directions.shape[:2], n_keys)
        high = torch.zeros_like(low)
        cheap = self.forms.work(len(heads)) * directions.shape[1] <= self.max_work
        for head in range(n_heads):
            chosen = heads == head
            if not chosen.any():
                continue
            quick = None if cheap else self.forms.quick_range(directions[chosen], head)
            if quick is not None:
                low[chosen], high[chosen] = quick
            else:
                for key in range(n_keys):
                    low[chosen, :, key], high[chosen, :, key] = self.forms.range(directions[chosen], head, key)
        return low, high


class _Known:
    """The ranges (s, b, h, i, j) of rows (s, b, h, i, c) on values, and what they say of rows nearby."""

    def __init__(self, held: Held, rows: Tensor, lower: Tensor, upper: Tensor):
        self.held, self.rows, self.lower, self.upper = held, rows.detach(), lower.detach(), upper.detach()

    def of(self, node, rows: Tensor, forms: ValueForms | None) -> tuple[Tensor, Tensor]:
        """Interval of rows . v, (s, b, h, i, j), from the nearest known row of the same head and query."""
        radius = (node.upper - node.lower).mean(2, keepdim=True).to(rows) / 2  # (b, h, 1, c)
        moves = ((rows.detach().unsqueeze(1) - self.rows).abs() * radius).sum(-1)  # (s, a, b, h, i)
        nearest = moves.argmin(1)  # (s, b, h, i)
        b, h, i = (torch.arange(n, device=rows.device) for n in rows.shape[1:4])
        at = nearest, b[:, None, None] if self.rows.shape[1] > 1 else 0 * b[:, None, None], h[:, None], i
        move = rows - self.rows[at]
        least, most = interval(node, move)
        quick = _by_ellipsoids(forms, move)
        if quick is not None:
            least, most = torch.maximum(least, quick[0]), torch.minimum(most, quick[1])
        # what the network's own arithmetic may lose between the two ways of writing one range
        last = 64 * torch.finfo(node.lower.dtype).eps * (self.lower[at].abs() + self.upper[at].abs())
        return self.lower[at] - last + least, self.upper[at] + last + most


def _by_ellipsoids(forms: ValueForms | None, rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """Interval of rows . v (s, b, h, i, j) from the forms' ellipsoids; None where there are none."""
    if forms is None:
        return None
    flat = rows.permute(2, 0, 3, 1, 4).flatten(1, 2).to(forms.bias[0].dtype)  # (h, s i, b, c)
    ends = [forms.quick_range(directions, head) for head, directions in enumerate(flat)]
    if any(pair is None for pair in ends):
        return None
    low, high = (
        torch.stack(end).unflatten(1, (rows.shape[0], -1)) for end in zip(*ends, strict=True)
    )  # (h, s, i, b, j)
    return tuple(end.permute(1, 3, 0, 2, 4).to(rows.dtype) for end in (low, high))


def interval(node, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Interval of rows_i . v_j, (s, b, h, i, j), from the values' own bounds."""
    lower, upper = node.lower.to(rows.dtype), node.upper.to(rows.dtype)
    middle, radius = (lower + upper) / 2, (upper - lower) / 2
    centre = rows.matmul(middle.transpose(-1, -2))
    spread = rows.abs().matmul(radius.transpose(-1, -2))
    return centre - spread, centre + spread


def _put(target: Tensor, s, h, i, values: Tensor, better) -> Tensor:
    """target[s, :, h, i] = better(target[s, :, h, i], values) without changing `target` in place."""
    new = target.clone()
    new[s, :, h, i] = better(target[s, :, h, i], values)
    return new
