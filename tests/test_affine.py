"""Affine upper bounds: sound for any slope, second order at the gradient, differentiable."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attn_bounds.affine import affine_upper_bound, affine_upper_bounds, gradient_slope
from attn_bounds.head import AttentionHead
from attn_bounds.problem import HeadProblem
from attn_bounds.reduced import Reduced, reduce
from attn_bounds.regions import TokenBall, TokenBox


def problem_of(seed: int, radius: float, box: bool = False, d: int = 12, **more: object) -> HeadProblem:
    rng = np.random.default_rng(seed)
    tokens = rng.standard_normal((4, d))
    W = rng.standard_normal((3, 3, d)) / np.sqrt(d) * rng.uniform(0.5, 3)
    query = more.pop("query", 1)
    if query == "outside":
        query = rng.standard_normal(d)
    if box:
        points = np.concatenate([tokens, query[None]]) if isinstance(query, np.ndarray) else tokens
        region = TokenBox(points - radius, points + radius)
    else:
        region = TokenBall(radius, relative=False)
    return HeadProblem(AttentionHead(*W), tokens, query, rng.standard_normal(3), region, **more)  # type: ignore[arg-type]


def sampled(problem: HeadProblem, rng: np.random.Generator, count: int = 400) -> torch.Tensor:
    """Placed points (count, p, d) of the region, most of them on its boundary."""
    from attn_bounds.reduced import centre_and_spread

    centres, spread = centre_and_spread(problem)
    step = torch.as_tensor(rng.standard_normal((count, *centres.shape)))
    if spread.dim() == 1:
        return centres + step / step.norm(dim=-1, keepdim=True) * spread[:, None] * (1 - 1e-12)
    return centres + torch.sign(step) * spread * (1 - 1e-12)


@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"query_moves": False}, {"query": "outside"}, {"keys": [True, False, True, False]}]
)
def test_no_sample_lies_above(box: bool, more: dict) -> None:
    rng = np.random.default_rng(0)
    finite = 0
    for seed in range(12):
        problem = problem_of(seed, 10 ** rng.uniform(-2, 0.3), box, **dict(more))
        points = sampled(problem, rng)
        query = points[:, problem.n] if points.shape[1] > problem.n else None
        value = problem.value(points[:, : problem.n], query)
        for scale in (0.0, 1.0):
            given = None if scale == 0 else rng.standard_normal(tuple(points.shape[1:]))
            slope, offset, _ = affine_upper_bound(problem, given)
            assert (value <= (points * slope).sum((1, 2)) + offset).all()
            finite += int(np.isfinite(offset))
    assert finite > 12


def test_second_order_at_the_gradient() -> None:
    radii = (0.002, 0.02)
    offsets = []
    for radius in radii:
        reduced = reduce([problem_of(seed, radius) for seed in range(10)])
        offsets.append(affine_upper_bounds(reduced, *gradient_slope(reduced))[0] - reduced.nominal)
    order = torch.log(offsets[1] / offsets[0]) / np.log(radii[1] / radii[0])
    assert (order > 1.9).all()


def test_gradient_with_respect_to_the_slope() -> None:
    reduced = reduce([problem_of(seed, 0.05) for seed in range(3)])
    keys, query = (1.2 * g for g in gradient_slope(reduced))
    keys.requires_grad_()
    offsets, multipliers = affine_upper_bounds(reduced, keys, query)
    offsets.sum().backward()
    step = 1e-6 * torch.randn(keys.shape, dtype=keys.dtype, generator=torch.Generator().manual_seed(0))
    moved = [keys.detach() + sign * step for sign in (1, -1)]
    up, down = (affine_upper_bounds(reduced, at, query, multipliers=multipliers)[0] for at in moved)
    assert torch.allclose((keys.grad * step).flatten(1).sum(1), (up - down) / 2, rtol=1e-4, atol=1e-12)


def test_a_slope_outside_the_reduced_coordinates_costs_its_reach() -> None:
    problem = problem_of(0, 0.01, d=40)
    slope, offset, _ = affine_upper_bound(problem)
    reduced = reduce([problem])
    assert reduced.u.shape[1] < 40
    u = problem.head.value_direction(problem.readout)[0]
    span = torch.linalg.qr(torch.cat([problem.head.W_Q, problem.head.W_K, u[None]]).T)[0]
    outside = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    outside = outside - span @ (span.T @ outside)
    tilted = slope.clone()
    tilted[0] += outside
    offset_tilted = affine_upper_bound(problem, tilted)[1] + float(outside @ problem.tokens[0])
    assert 0 < offset_tilted - offset < 0.03 * float(outside.norm())


def test_a_slope_that_cancels_a_saturated_key_is_not_proved_by_rounding() -> None:
    """A slope near the saturated key's value gradient: curvatures of 0.05 cancel to 1e-7, and G lost five digits."""
    one, empty = torch.zeros(1, dtype=torch.float64), torch.zeros(1, 3, 0, dtype=torch.float64)

    def row(*values: float) -> torch.Tensor:
        return torch.tensor([values], dtype=torch.float64)

    reduced = Reduced(
        kind="box",
        own=False,
        s0=row(-2.2253184758046949, -27.237545383488992, 12.936618396413314),
        v0=row(1.4085596328260896, 17.240546619098115, -8.1884901674012926),
        a=row(11.566308281503934),
        u=row(-7.3211250988500733),
        b=empty,
        fq=empty[:, :1],
        fk=row(-10.292286709549058)[..., None],
        key_radius=row(0.01952857047565105, 0.0, 0.01727353426239975)[..., None],
        query_radius=empty[:, 0],
        norm=one,
        own_low=one,
        own_high=one,
        nominal=row(-8.1884876705532221)[0],
        rounding=row(3.5299494701441631e-12)[0],
    )
    slope = row(2.6974582369754315e-05, 1.0236694938338449e-15, -7.3211520734324518)[..., None]
    offset = affine_upper_bounds(reduced, slope, empty[:, 0])[0]
    steps = torch.linspace(-1, 1, 41, dtype=torch.float64)
    x = torch.cartesian_prod(steps, steps[:1], steps)[None, ..., None] * reduced.key_radius[:, None]  # (1, 1681, 3, 1)
    value = reduced.value(x, x.new_zeros(1, x.shape[1], 0)) - (x * slope[:, None]).sum((2, 3))
    assert (value <= offset[:, None]).all() and torch.isfinite(offset).all()
