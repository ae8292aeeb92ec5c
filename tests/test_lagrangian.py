"""The Lagrangian certificate: sound on anything, exact where the radius is small."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attn_bounds.bounds.lagrangian import lagrangian
from attn_bounds.head import AttentionHead
from attn_bounds.problem import HeadProblem
from attn_bounds.reduced import reduce
from attn_bounds.regions import TokenBall, TokenBox
from attn_bounds.search import ascend
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
