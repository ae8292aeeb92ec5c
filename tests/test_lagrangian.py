"""The Lagrangian certificate: sound on anything, exact where the radius is small."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from attn_bounds.bounds.lagrangian import lagrangian
from attn_bounds.errors import ArgumentError
from attn_bounds.head import AttentionHead
from attn_bounds.problem import HeadProblem
from attn_bounds.reduced import Reduced, reduce
from attn_bounds.regions import TokenBall, TokenBox
from attn_bounds.search import ascend
from comparisons.exactness import units
from comparisons.violations import random_batches


def small_problem(seed: int, radius: float, box: bool = False, n: int = 4, **more: object) -> HeadProblem:
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((3, 3, 8)) / np.sqrt(8)
    tokens = rng.standard_normal((n, 8))
    region = TokenBox(tokens - radius, tokens + radius) if box else TokenBall(radius)
    head = AttentionHead(W[0], W[1], W[2], b_Q=rng.standard_normal(3))
    return HeadProblem(head, tokens, 1, rng.standard_normal(3), region, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_no_bound_lies_below_an_attained_value(seed: int) -> None:
    bounded = 0
    for name, reduced in random_batches(np.random.default_rng(seed), 250):
        attained = ascend(reduced, starts=8, seed=seed)[2]
        upper = lagrangian(reduced).upper
        assert not (upper < attained).any(), name
        assert not torch.isnan(upper).any(), name
        bounded += int(torch.isfinite(upper).sum())
    assert bounded > 180  # an infinite bound is sound too: see that the test tests something


@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize("moves", [False, True])
def test_exact_at_small_radii(box: bool, moves: bool) -> None:
    problems = [small_problem(seed, 0.003, box, query_moves=moves) for seed in range(12)]
    reduced = reduce(problems)
    value = ascend(reduced, starts=4)[2]
    gap = (lagrangian(reduced).upper - value) / (value - reduced.nominal)
    assert (gap < 1e-9).double().mean() >= 0.9


def test_pieces_only_help() -> None:
    reduced = reduce([small_problem(seed, 0.3) for seed in range(10)])
    value = ascend(reduced, starts=8)[2]
    uppers = [lagrangian(reduced, max_pieces=pieces).upper for pieces in (1, 4, 16)]
    for looser, tighter in pairwise(uppers):
        assert (tighter <= looser + 1e-12).all()
        assert (tighter >= value).all()
    assert (uppers[2] < uppers[0]).any()


def test_alone_or_in_a_batch() -> None:
    problems = [small_problem(seed, 0.02) for seed in range(5)]
    together = lagrangian(reduce(problems))
    apart = torch.cat([lagrangian(reduce([problem])).upper for problem in problems])
    chunked = lagrangian(reduce(problems), chunk=2)
    assert torch.allclose(together.upper, apart, rtol=1e-10)
    assert torch.allclose(together.upper, chunked.upper, rtol=1e-10)
    assert {len(value) for value in chunked.witness.values()} == {5}


def test_order_of_keys_and_scale_of_the_readout() -> None:
    problem = small_problem(0, 0.03)
    upper = float(lagrangian(reduce([problem])).upper)
    order = [2, 1, 3, 0]
    permuted = HeadProblem(problem.head, problem.tokens[order], 1, problem.readout, problem.region)
    scaled = HeadProblem(problem.head, problem.tokens, 1, 7 * problem.readout, problem.region)
    assert float(lagrangian(reduce([permuted])).upper) == pytest.approx(upper, rel=1e-9)
    assert float(lagrangian(reduce([scaled])).upper) == pytest.approx(7 * upper, rel=1e-9)


def test_saturated_head_is_exact() -> None:
    problem = small_problem(0, 0.004)
    head = AttentionHead(200 * problem.head.W_Q, problem.head.W_K, problem.head.W_V)
    saturated = HeadProblem(head, problem.tokens, 1, problem.readout, TokenBall(0.0005))
    reduced = reduce([saturated])
    assert torch.softmax(reduced.s0, 1).max() > 0.999
    value = float(ascend(reduced, starts=8)[2])
    found = lagrangian(reduced)
    assert found.upper == found.witness["base"]  # nothing but the rounding margin above the attained value
    assert float(found.upper) - value <= 2 * float(found.inflation)


def test_needs_a_piece() -> None:
    with pytest.raises(ArgumentError, match="max_pieces"):
        lagrangian(reduce([small_problem(0, 0.01)]), max_pieces=0)


def test_multipliers_near_zero_cancel_without_harm() -> None:
    """Saturated to 1e-11 with large scores: terms of 1e-3 cancel to 1e-12, and rounding once put D below zero."""
    a = [210.75585274091893, 98.12131578596684, 103.41384504662332, -149.2667920240379, 89.9255641606193]
    u = [0.2453550904050037, 0.13975475265720338, 0.09394955129503324, 0.1938480240989303, 0.02944923242700976]
    half = [0.0, 0.006602717561763785, 0.009510321827975069, 0.004975741689848714, 0.007088391411996579]

    def row(values: list[float]) -> torch.Tensor:
        return torch.tensor([values], dtype=torch.float64)

    one, empty = row([0.0])[0], torch.zeros(1, 3, 0, dtype=torch.float64)
    reduced = Reduced(
        kind="box",
        own=False,
        s0=row([486.3200451460267, 460.82801946634595]),
        v0=row([0.4807646869261803, 0.2661634592018913]),
        a=row(a),
        u=row(u),
        b=empty[:, :2],
        fq=empty,
        fk=torch.zeros(1, 3, 5, dtype=torch.float64),
        key_radius=torch.stack([row([0.0] * 5), row(half)], 1),
        query_radius=empty[:, 0],
        norm=one,
        own_low=one,
        own_high=one,
        nominal=row([0.48076468692435814])[0],
        rounding=row([1.0178473646059318e-12])[0],
    )
    x = torch.zeros(1, 1, 2, 5, dtype=torch.float64)
    x[0, 0, 1] = torch.sign(row([-1.0, -1.0, -1.0, 1.0, -1.0])[0]) * row(half)[0]
    assert lagrangian(reduced).upper >= reduced.value(x, empty[:, :1])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "radius", "share"), [(5, 0.002, 1.0), (5, 0.005, 0.98), (5, 0.01, 0.96), (5, 0.02, 0.75),
                                                    (64, 0.005, 0.98), (64, 0.01, 0.96), (64, 0.02, 0.6)])  # fmt: skip
def test_share_of_exact_units_on_minilm(n: int, radius: float, share: float) -> None:
    reduced = reduce(units(n, radius, 1, 123))
    value = ascend(reduced, starts=4)[2]
    gap = (lagrangian(reduced).upper - value) / (value - reduced.nominal)
    assert (gap < 1e-9).double().mean() >= share


@pytest.mark.slow
def test_pieces_close_large_radii_on_minilm() -> None:
    reduced = reduce(units(5, 0.05, 1, 123))
    value = ascend(reduced, starts=8)[2]
    gap = (lagrangian(reduced, max_pieces=64).upper - value) / (value - reduced.nominal)
    assert gap.median() <= 0.02
