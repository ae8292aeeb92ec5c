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
from attn_bounds.reduced import reduce
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
