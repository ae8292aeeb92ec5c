"""Feasible maxima: batched multi-start projected ascent (balls, boxes) and coordinate ascent (substitutions)."""

from __future__ import annotations

import torch

from ._options import checked
from .problem import HeadProblem, SearchResult
from .reduced import Reduced, lift, reduce
from .regions import Lists


@checked
def search(problem: HeadProblem, starts: int = 8, seed: int = 0) -> SearchResult:
    """Search for a large value of f on the region; `problem.flipped()` searches for a small one.

    The value is evaluated at the returned tokens by the head itself, so it is a lower bound of the maximum. The same
    seed gives the same result. Raises: ArgumentError.
    """
    if isinstance(problem.placed, Lists):
        return _search_lists(problem, starts, seed)
    x, y, _ = ascend(reduce([problem]), starts, seed)
    return attained(problem, x[0], y[0])


def attained(problem: HeadProblem, x: torch.Tensor, y: torch.Tensor) -> SearchResult:
    """Lift displacements to tokens and evaluate the head there; never worse than the nominal tokens."""
    tokens, query = lift(problem, x, y)
    value = float(problem.value(tokens, query))
    if value >= problem.nominal:
        return SearchResult(value, tokens, query)
    outside = problem.query_point if query is not None else None
    return SearchResult(problem.nominal, problem.tokens, outside)


def value_and_gradient(
    reduced: Reduced, x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute f (B, S) and its gradients at displacements x (B, S, n - own, m), y (B, S, k)."""
    qy = y @ reduced.fq.transpose(1, 2)  # (B, S, h)
    direction = reduced.a[:, None] + qy @ reduced.fk  # (B, S, m): gradient of every key's score
    s = reduced.s0[:, None] + y @ reduced.b.transpose(1, 2)
    moved = (x @ direction.unsqueeze(-1)).squeeze(-1)
    shift = (x @ reduced.u[:, None, :, None]).squeeze(-1)
    if reduced.own:
        ky = y @ reduced.fk.transpose(1, 2)
        moved = torch.cat([moved, (qy * ky).sum(-1, keepdim=True)], -1)
        shift = torch.cat([shift, (y @ reduced.own_u[:, :, None])], -1)
    v = reduced.v0[:, None] + shift
    p = torch.softmax(s + moved, -1)
    f = (p * v).sum(-1)
    weight = p * (v - f.unsqueeze(-1))  # df/ds
    others = slice(0, reduced.n - 1) if reduced.own else slice(None)
    gx = weight[..., others, None] * direction.unsqueeze(-2) + p[..., others, None] * reduced.u[:, None, None]
    gy = weight @ reduced.b
    if not reduced.query_fixed:
        kx = (weight[..., others, None] * x).sum(-2) @ reduced.fk.transpose(1, 2)
        gy = gy + kx @ reduced.fq
        if reduced.own:
            last = weight[..., -1:]
            gy = gy + last * (qy @ reduced.fk + ky @ reduced.fq) + p[..., -1:] * reduced.own_u[:, None]
    return f, gx, gy


def ascend(
    reduced: Reduced, starts: int = 8, seed: int = 0, steps: int = 300, tolerance: float = 1e-13
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maximise f by projected gradient ascent from several starts, each with its own step length.

    Returns the best x (B, n - own, m), y (B, k) and value (B,). Starts: the centre; every key's value as large as it
    gets; random points of the region's boundary. Problems that have converged leave the batch.
    """
    x, y = _starting_points(reduced, starts, seed)
    best_x, best_y, best_f = x[:, 0].clone(), y[:, 0].clone(), reduced.s0.new_full((reduced.size,), -torch.inf)
    rows = torch.arange(reduced.size, device=x.device)  # where the problems of the shrinking batch come from
    f, gx, gy = value_and_gradient(reduced, x, y)
    step, calm = _first_step(reduced, gx, gy), torch.zeros_like(f, dtype=torch.int64)
    for count in range(1, steps + 1):
        tried_x, tried_y = _project(reduced, x + step[..., None, None] * gx, y + step[..., None] * gy)
        f_new, gx_new, gy_new = value_and_gradient(reduced, tried_x, tried_y)
        better = f_new > f
        gain = torch.where(better, f_new - f, 0.0)
        calm = torch.where(gain > tolerance * (f - reduced.nominal[:, None]).abs(), 0, calm + 1)
        keep = better[..., None]
        x, gx = torch.where(keep[..., None], tried_x, x), torch.where(keep[..., None], gx_new, gx)
        y, gy = torch.where(keep, tried_y, y), torch.where(keep, gy_new, gy)
        f = torch.where(better, f_new, f)
        step = torch.where(better, step * 2.0, step * 0.25).clamp(max=1e150)
        if count % 8 and count != steps:
            continue
        active = (calm < 12).any(1)
        if count == steps or int(active.sum()) <= 0.7 * len(rows):
            active &= count != steps
            top = f.argmax(1, keepdim=True)
            at = torch.arange(len(rows), device=x.device), top[:, 0]
            best_x[rows], best_y[rows], best_f[rows] = x[at], y[at], f[at]
            if not bool(active.any()):
                break
            rows, reduced = rows[active], reduced[active]
            x, y, f, gx, gy, step, calm = (g[active] for g in (x, y, f, gx, gy, step, calm))
    return best_x, best_y, best_f


def _radii(reduced: Reduced) -> tuple[torch.Tensor, torch.Tensor]:
    """Radii or half-widths shaped to multiply x (B, S, n - own, m) and y (B, S, k)."""
    if reduced.kind == "ball":
        return reduced.key_radius[:, None, :, None], reduced.query_radius[:, None, None]
    return reduced.key_radius[:, None], reduced.query_radius[:, None]


def _project(reduced: Reduced, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rx, ry = _radii(reduced)
    if reduced.kind == "box":
        return torch.minimum(torch.maximum(x, -rx), rx), torch.minimum(torch.maximum(y, -ry), ry)
    return _shrink(x, rx), _shrink(y, ry)


def _shrink(x: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.where(size > radius, radius / size.clamp_min(1e-300), torch.ones_like(size))


def _starting_points(reduced: Reduced, starts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    B, keys, m, k = reduced.size, reduced.n - reduced.own, reduced.u.shape[1], reduced.b.shape[2]
    rx, ry = _radii(reduced)
    draw = torch.Generator().manual_seed(seed)  # on the CPU, so that every device gets the same starts
    x = torch.randn(1, starts, keys, m, generator=draw, dtype=torch.float64).to(reduced.u.device).expand(B, -1, -1, -1)
    y = (
        torch.randn(1, starts, 1, k, generator=draw, dtype=torch.float64)[:, :, 0]
        .to(reduced.u.device)
        .expand(B, -1, -1)
    )
    if reduced.kind == "ball":
        x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-300) * rx
        y = y / torch.linalg.vector_norm(y, dim=-1, keepdim=True).clamp_min(1e-300) * ry
    else:
        x, y = torch.sign(x) * rx, torch.sign(y) * ry
    x, y = x.clone(), y.clone()
    x[:, 0], y[:, 0] = 0.0, 0.0
    if starts > 1:  # every key's value as large as it gets
        x[:, 1], y[:, 1] = 0.0, 0.0
        push = reduced.u[:, None, None].expand(B, 1, keys, m)
        size = torch.linalg.vector_norm(push, dim=-1, keepdim=True).clamp_min(1e-300)
        x[:, 1:2] = push / size * rx if reduced.kind == "ball" else torch.sign(push) * rx
    return x, y


def _first_step(reduced: Reduced, gx: torch.Tensor, gy: torch.Tensor) -> torch.Tensor:
    """A step that takes the largest block to its boundary; it only has to have the right order of magnitude."""
    rx, ry = _radii(reduced)
    reach = rx.flatten(1).amax(1) if rx[0].numel() else rx.new_zeros(rx.shape[0])
    if ry[0].numel():
        reach = torch.maximum(reach, ry.flatten(1).amax(1))
    size = gx.flatten(2).abs().amax(2) if gx[0, 0].numel() else gx.new_zeros(gx.shape[:2])
    if gy.shape[2]:
        size = torch.maximum(size, gy.abs().amax(2))
    return (10 * reach[:, None] / size.clamp_min(1e-300)).clamp(max=1e150)


def _search_lists(problem: HeadProblem, starts: int, seed: int) -> SearchResult:
    """Coordinate ascent over the candidates of one position at a time."""
    lists = problem.placed.candidates  # type: ignore[union-attr]
    draw = torch.Generator().manual_seed(seed)
    best: tuple[float, list[int]] = (-float("inf"), [])
    for start in range(starts):
        choice = [0 if start == 0 else int(torch.randint(c.shape[0], (1,), generator=draw)) for c in lists]
        value, improved = -float("inf"), True
        while improved:
            improved = False
            for j, candidates in enumerate(lists):
                points = torch.stack([c[i] for c, i in zip(lists, choice, strict=True)])
                tried = points.expand(candidates.shape[0], -1, -1).clone()
                tried[:, j] = candidates
                values = problem.value(tried[:, : problem.n], tried[:, problem.n] if len(lists) > problem.n else None)
                top = int(values.argmax())
                if float(values[top]) > value:
                    value, choice[j], improved = float(values[top]), top, True
        if value > best[0]:
            best = value, choice
    points = torch.stack([c[i] for c, i in zip(lists, best[1], strict=True)])
    query = points[problem.n] if len(lists) > problem.n else None
    return SearchResult(float(problem.value(points[: problem.n], query)), points[: problem.n], query)
