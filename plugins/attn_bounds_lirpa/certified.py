"""The library's certificates for rows that read heads: the largest value of each, and affine bounds of any slope.

A row is split into groups: what it reads of one head at one query is one `HeadProblem`. Groups alike go through the
library's engines in one batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_bounds.affine import affine_upper_bounds_of
from attn_bounds.bounds.lagrangian import lagrangian
from attn_bounds.bounds.vertex import vertex
from attn_bounds.exact import exact
from attn_bounds.problem import HeadProblem
from attn_bounds.reduced import group_key, reduce
from attn_bounds.regions import TokenBall, TokenBox

from .tokens import Place, TokenHeads

DEFAULT = {"retry": False, "steps": 4, "rounds": 16}  # of `lagrangian`; tighter and slower: {} or {"max_pieces": 64}
CHUNK = 96  # problems in one batch


class Certified:
    """The groups (s, b, h, i) of rows (s, b, h, i, c) that are not zero, as problems of the library."""

    def __init__(self, heads: TokenHeads, place: Place, rows: Tensor, keys: Tensor, options: dict | None = None):
        self.options = DEFAULT if options is None else options
        self.shape, self.place = rows.shape[:2], place
        self.groups = (rows != 0).any(-1).nonzero()
        z, regions = place.centre, _regions(place)
        self.problems = [
            HeadProblem(heads.single[h], z[b], i, rows[s, b, h, i].detach(), regions[b], keys=keys[i])
            for s, b, h, i in self.groups.tolist()
        ]
        buckets: dict[tuple, list[int]] = {}
        for index, problem in enumerate(self.problems):
            buckets.setdefault(group_key(problem), []).append(index)
        self.chunks = [
            members[start : start + CHUNK] for members in buckets.values() for start in range(0, len(members), CHUNK)
        ]

    @property
    def kinds(self) -> list[tuple]:
        """What each batch holds: multipliers mean nothing for problems of another kind, a box's where balls were."""
        return [(group_key(self.problems[chunk[0]]), len(chunk)) for chunk in self.chunks]

    @property
    def counts(self) -> Tensor:
        """Number (s, b) of groups of each row."""
        return self._sum(torch.ones(len(self.problems), dtype=torch.float64, device=self.place.centre.device))

    def largest(self) -> tuple[Tensor, Tensor]:
        """Sum (s, b) of the groups' upper bounds, and its distance to the sum of values attained one by one."""
        upper = self.place.centre.new_zeros(len(self.problems))
        gap = torch.zeros_like(upper)
        for chunk in self.chunks:
            alike = [self.problems[i] for i in chunk]
            reduced = reduce(alike)
            bounds = [exact(reduced) if alike[0].query_is_fixed else lagrangian(reduced, **self.options)]
            x, y = bounds[0].point
            attained = reduced.value(x[:, None], y[:, None])[:, 0]
            best = self._refuted(bounds[0].upper, attained, reduced.rounding)
            if not bool((best - attained <= 1e-9 * (1 + attained.abs())).all()):
                best = torch.minimum(best, self._refuted(vertex(reduced).upper, attained, reduced.rounding))
            upper[chunk], gap[chunk] = best, best - attained
        return self._sum(upper), self._sum(gap)

    @staticmethod
    def _refuted(upper: Tensor, attained: Tensor, rounding: Tensor) -> Tensor:
        """Infinity where `upper` is no bound: not a number, or below a value that is attained."""
        return torch.where(upper >= attained - rounding, upper, torch.full_like(upper, torch.inf))

    def affine(self, tilts: Tensor | None = None, kept: list | None = None) -> tuple[Tensor, Tensor, list]:
        """Affine upper bound of each row: slopes (s, b, n, d), constants (s, b), and the multipliers used.

        A group's slope is its gradient at the centre plus its share of tilts (s or 1, b or 1, n, d); gradients flow to
        them. kept: the multipliers of an earlier call.
        """
        s, b = self.groups[:, 0], self.groups[:, 1]
        shape = (*self.shape, *self.place.centre.shape[1:])
        shares = None
        if tilts is not None:
            shares = tilts.expand(shape)[s, b] / self.counts[s, b][:, None, None]
        slopes, constants, used = [], [], []
        for index, chunk in enumerate(self.chunks):
            at = None if shares is None else shares[chunk]
            alike = [self.problems[i] for i in chunk]
            found = affine_upper_bounds_of(alike, None, kept[index] if kept else None, at)
            if kept and not bool(torch.isfinite(found[1]).all()):
                found = affine_upper_bounds_of(alike, None, None, at)
            slopes.append(found[0])
            constants.append(found[1])
            used.append(found[2])
        order = torch.tensor([i for chunk in self.chunks for i in chunk], dtype=torch.long, device=s.device)
        back = order.argsort()
        slope = self.place.centre.new_zeros(shape)
        if not len(back):
            return slope, slope.new_zeros(self.shape), used
        slope = slope.index_put((s, b), torch.cat(slopes)[back], accumulate=True)
        return slope, self._sum(torch.cat(constants)[back]), used

    def tilt_unit(self, slope: Tensor, constant: Tensor) -> Tensor:
        """Size (s, b) of a tilt of every coordinate that moves the bound by its own remainder at the centre."""
        centre, place = self.place.centre, self.place
        nominal = [problem.nominal for problem in self.problems]
        here = constant + torch.einsum("sbnd,bnd->sb", slope, centre) - self._sum(centre.new_tensor(nominal))
        unit = here.clamp(min=0) / place.reach(torch.ones_like(centre)).clamp(min=1e-30)
        return torch.where(torch.isfinite(unit), unit, torch.zeros_like(unit))

    def _sum(self, values: Tensor) -> Tensor:
        total = self.place.centre.new_zeros(self.shape)
        return total.index_put((self.groups[:, 0], self.groups[:, 1]), values, accumulate=True)


def _regions(place: Place) -> list:
    if place.ends is None:
        return [TokenBall(radius, relative=False) for radius in place.spread]
    return [TokenBox(low, high) for low, high in zip(*place.ends, strict=True)]
