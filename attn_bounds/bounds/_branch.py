"""Branch and bound on the query's ball: cut it along the directions in which the keys' scores move most."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..reduced import Reduced
from ._elimination import QueryRegion, eliminated, key_maximisers
from ._majorant import Centre, centre_at, radii, reach
from ._trust_region import Quadratic, evaluate, minimise


@dataclass
class Pieces:
    """A list of P pieces: which problem each belongs to, its slabs, its bound, and what proves it."""

    owner: torch.Tensor  # (P,)
    low: torch.Tensor  # (P, L) in units of the radius
    high: torch.Tensor  # (P, L)
    centre: torch.Tensor  # (P, k)
    excess: torch.Tensor  # (P,) upper bound of f - t on the piece, proved on ...
    proof_low: torch.Tensor  # (P, L) ... these slabs, its own or those of a piece it was cut from
    proof_high: torch.Tensor  # (P, L)
    shift: torch.Tensor  # (P, k)
    mult: torch.Tensor  # (P, 1 + L)
    worst: torch.Tensor  # (P, k) where the majorant is largest
    need: torch.Tensor  # (P, L) how much each direction's width costs

    def cat(self, other: Pieces) -> Pieces:
        """Both lists together."""
        return Pieces(*(torch.cat([getattr(self, f), getattr(other, f)]) for f in self.__dataclass_fields__))

    def replace(self, rows: torch.Tensor, other: Pieces) -> None:
        """Take over, in these rows, what is better in `other`."""
        better = other.excess < self.excess[rows]
        for name in self.__dataclass_fields__:
            getattr(self, name)[rows[better]] = getattr(other, name)[better]

    def along(self, centre: Centre, directions: torch.Tensor) -> Pieces:
        """The same uncut pieces, one per problem, ready to be cut along directions (B, L, k)."""
        one = self.excess.new_ones(directions.shape[:2])
        mult = torch.cat([self.mult, torch.zeros_like(one)], 1)
        need = _need(centre, self.shift, directions, 2 * one, centre.reduced.query_radius[:, None])
        parts = {f: getattr(self, f) for f in self.__dataclass_fields__}
        parts |= {"low": -one, "high": one, "proof_low": -one, "proof_high": one.clone(), "mult": mult, "need": need}
        return Pieces(**parts)

    def __getitem__(self, rows: torch.Tensor) -> Pieces:
        return Pieces(*(getattr(self, f)[rows] for f in self.__dataclass_fields__))


def recentring(centre: Centre, tau: float) -> torch.Tensor:
    """Linear function (B, k) taken off all scores: the softmax average, plus a little of the query's own gradient."""
    shift = torch.einsum("bn,bnk->bk", centre.p, centre.beta)
    if centre.reduced.query_fixed or tau == 0:
        return shift
    rx, ry = radii(centre.reduced)
    g = centre.query_gradient
    pull = reach(g, ry)
    ratio = (pull / reach(centre.key_gradient, rx).sum(1).clamp_min(1e-300)).clamp(max=tau)
    unit = g / pull.clamp_min(1e-300)[:, None]
    return shift + torch.where(pull > 0, ratio, torch.zeros_like(ratio))[:, None] * unit


def cut_directions(centre: Centre, count: int) -> torch.Tensor:
    """Unit directions (B, L, k): the recentred score gradients of the keys that matter most."""
    beta = centre.beta - torch.einsum("bn,bnk->bk", centre.p, centre.beta)[:, None]
    size = torch.linalg.vector_norm(beta, dim=-1)
    weight = centre.p * centre.V.abs() * size**3
    chosen = weight.topk(min(count, weight.shape[1]), dim=1).indices
    picked = beta.gather(1, chosen[..., None].expand(-1, -1, beta.shape[2]))
    return picked / torch.linalg.vector_norm(picked, dim=-1, keepdim=True).clamp_min(1e-300)


def bound_pieces(
    reduced: Reduced,
    t: torch.Tensor,
    directions: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    y: torch.Tensor,
    owner: torch.Tensor,
    taus: tuple[float, ...],
    steps: int,
    start: torch.Tensor | None = None,
) -> Pieces:
    """Bound f - t on pieces centred at y (P, k): all arguments have one row per piece, `owner` included."""
    R = reduced.query_radius[:, None]
    region = QueryRegion(R, directions, low * R, high * R)
    x = key_maximisers(reduced, y, t)
    centre = centre_at(reduced, x, y, t)
    best: Pieces | None = None
    for tau in taus:
        shift = recentring(centre, tau)
        maj, good = eliminated(centre, shift, region)
        quad = Quadratic(maj.q0, maj.gq * R, maj.T * (R * R)[..., None], maj.at[1], directions, low, high)
        lam = torch.linalg.vector_norm(quad.g, dim=-1)
        floor = 1e-14 * (centre.p * centre.V.abs()).sum(1) + 1e-300
        mult = torch.cat([torch.maximum(lam, floor)[:, None], torch.zeros_like(low)], 1)
        found = evaluate(quad, mult)
        if steps:
            open_ = (found.value > 0).nonzero()[:, 0]
            if len(open_):
                first = mult[open_].clone()
                first[:, 1:] = first[:, :1] * 0.1
                if start is not None:
                    first = torch.maximum(start[open_], first * 1e-3)
                better, other = minimise(quad[open_], first, steps)
                gain = other.value < found.value[open_]
                rows = open_[gain]
                mult[rows] = better[gain]
                found.value[rows], found.w[rows] = other.value[gain], other.w[gain]
        value = torch.where(good, found.value, torch.full_like(found.value, torch.inf))
        over = value.clamp_min(0) * torch.exp(-log_z_low(centre, shift, region))
        excess = torch.where(value > 0, over, torch.zeros_like(over))
        excess = torch.where(torch.isnan(excess), torch.full_like(excess, torch.inf), excess)
        need = _need(centre, shift, directions, high - low, R)
        now = Pieces(owner, low, high, y, excess, low.clone(), high.clone(), shift, mult, found.w * R, need)
        if best is None:
            best = now
        else:
            best.replace(torch.arange(len(owner), device=owner.device), now)
    assert best is not None
    return best


def _need(
    centre: Centre, shift: torch.Tensor, directions: torch.Tensor, width: torch.Tensor, R: torch.Tensor
) -> torch.Tensor:
    """How much a direction's width costs: the third-order term of the keys whose scores move along it."""
    beta = centre.beta - shift[:, None]
    along = (beta @ directions.transpose(1, 2)) * R[..., None]  # (P, n, L)
    return ((centre.p * centre.V.abs())[..., None] * (along.abs() * width[:, None]) ** 3).sum(1)


def log_z_low(centre: Centre, shift: torch.Tensor, region: QueryRegion) -> torch.Tensor:
    """Lower bound of log sum_j p_j e^{x_j} by Jensen: sum_j p_j x_j, whose query part is taken together."""
    red, y = centre.reduced, centre.y
    K = red.n - red.own
    rx = radii(red)[0]
    mean = torch.einsum("bn,bnk->bk", centre.p, centre.beta) - shift
    low = region.around(mean[:, None], y)[0][:, 0]
    keys = -reach(centre.alpha[:, None], rx) - (centre.alpha[:, None] * centre.x).sum(-1)
    far = region.radius[:, 0] + torch.linalg.vector_norm(y, dim=-1)
    length = red.key_radius + torch.linalg.vector_norm(centre.x, dim=-1)
    bilinear = red.norm * far * (centre.p[:, :K] * length).sum(1)
    if red.own:
        bilinear = bilinear + centre.p[:, -1] * torch.maximum(red.own_high, -red.own_low) * far * far
    return low + (centre.p[:, :K] * keys).sum(1) - bilinear


def branch(
    reduced: Reduced,
    t: torch.Tensor,
    root: Pieces,
    directions: torch.Tensor,
    max_pieces: int,
    tolerance: torch.Tensor,
    steps: int = 12,
) -> Pieces:
    """Split the worst piece of every open problem in two until it is closed or has `max_pieces` pieces.

    A piece is closed when its excess is at most `tolerance` (B,).
    """
    pieces = root
    made = torch.ones(reduced.size, dtype=torch.long, device=t.device)
    done: list[Pieces] = []
    while len(pieces.owner):
        worst = torch.zeros_like(t).scatter_reduce(0, pieces.owner, pieces.excess, "amax")
        mine = pieces.owner
        chosen = (pieces.excess > tolerance[mine]) & (pieces.excess >= worst[mine]) & (made[mine] < max_pieces)
        # one piece per problem: the first of equals
        order = chosen.nonzero()[:, 0]
        seen: dict[int, int] = {}
        for index, owner in zip(order.tolist(), pieces.owner[order].tolist(), strict=True):
            seen.setdefault(owner, index)
        if not seen:
            break
        rows = torch.tensor(sorted(seen.values()), device=t.device)
        rest = torch.ones(len(pieces.owner), dtype=torch.bool, device=t.device)
        rest[rows] = False
        parent = pieces[rows]
        made[parent.owner] += 1
        children = _children(reduced, t, parent, directions, steps)
        closed = children.excess <= tolerance[children.owner]
        done.append(children[closed])
        pieces = pieces[rest].cat(children[~closed])
    for part in done:
        pieces = pieces.cat(part)
    return pieces


def _children(reduced: Reduced, t: torch.Tensor, parent: Pieces, directions: torch.Tensor, steps: int) -> Pieces:
    red, E = reduced[parent.owner], directions[parent.owner]
    R = red.query_radius[:, None]
    axis = parent.need.argmax(1)
    rows = torch.arange(len(axis), device=axis.device)
    low, high = parent.low[rows, axis], parent.high[rows, axis]
    middle = (low + high) / 2
    two = []
    for side in (0, 1):
        lo, hi = parent.low.clone(), parent.high.clone()
        (hi if side == 0 else lo)[rows, axis] = middle
        two.append((lo, hi))
    lo, hi = (torch.cat([two[0][i], two[1][i]]) for i in (0, 1))
    both = torch.cat([rows, rows])
    y = _into(parent.centre[both] / R[both].clamp_min(1e-300), E[both], lo, hi) * R[both]
    found = bound_pieces(
        red[both],
        t[parent.owner][both],
        E[both],
        lo,
        hi,
        y,
        parent.owner[both],
        (0.05,),
        steps,
        start=parent.mult[both],
    )
    worse = found.excess > parent.excess[both]  # what holds on the parent holds on its parts
    for name in ("centre", "excess", "proof_low", "proof_high", "shift", "mult", "worst"):
        getattr(found, name)[worse] = getattr(parent[both], name)[worse]
    return found


def _into(w: torch.Tensor, E: torch.Tensor, low: torch.Tensor, high: torch.Tensor, rounds: int = 20) -> torch.Tensor:
    """Move a point of the unit ball towards the slabs by cyclic projections; any result is a valid centre."""
    for _ in range(rounds):
        for i in range(E.shape[1]):
            at = (E[:, i] * w).sum(-1)
            w = w + (torch.minimum(torch.maximum(at, low[:, i]), high[:, i]) - at)[:, None] * E[:, i]
        w = w / torch.linalg.vector_norm(w, dim=-1, keepdim=True).clamp_min(1.0)
    return w
