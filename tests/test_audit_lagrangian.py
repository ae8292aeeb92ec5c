"""The ball-arithmetic proof of Lagrangian certificates: passes on what was found, fails on what was altered."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flint import arb

from attn_bounds.audit.facts import set_precision
from attn_bounds.audit.lagrangian import _covers, prove
from attn_bounds.bounds.lagrangian import lagrangian
from attn_bounds.head import AttentionHead
from attn_bounds.problem import HeadProblem
from attn_bounds.reduced import reduce
from attn_bounds.regions import TokenBall, TokenBox
from attn_bounds.search import search


def problem_of(seed: int, radius: float, n: int = 4, d: int = 14, **more: object) -> HeadProblem:
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((3, 3, d)) / np.sqrt(d) * rng.uniform(0.5, 2)
    query = rng.standard_normal(d) if more.pop("outside", False) else 1
    region = TokenBall(radius, relative=False)
    head = AttentionHead(*W, b_Q=rng.standard_normal(3))
    return HeadProblem(head, rng.standard_normal((n, d)), query, rng.standard_normal(3), region, **more)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def precision() -> None:
    set_precision()


@pytest.mark.parametrize("more", [{}, {"outside": True}, {"query_moves": False}, {"keys": [True, False, True, True]}])
@pytest.mark.parametrize("radius", [0.003, 0.1])
def test_proves_what_was_found(more: dict, radius: float) -> None:
    problems = [problem_of(seed, radius, **dict(more)) for seed in range(3)]
    found = lagrangian(reduce(problems), max_pieces=4)
    for i, problem in enumerate(problems):
        upper = float(found.upper[i])
        proved = prove(problem, found.witness_of(i), upper)
        assert proved <= arb(upper)
        assert not proved < arb(search(problem).value)


def test_proves_with_rank_deficient_weights() -> None:
    rng = np.random.default_rng(0)
    W_Q, W_V = rng.standard_normal((2, 3, 14)) / 4
    for W_K in (W_Q, 0 * W_Q):
        head = AttentionHead(W_Q, W_K, W_V)
        problem = HeadProblem(head, rng.standard_normal((3, 14)), 0, rng.standard_normal(3), TokenBall(0.02))
        found = lagrangian(reduce([problem]))
        assert prove(problem, found.witness_of(0), float(found.upper[0])) <= arb(float(found.upper[0]))


def test_fails_on_altered_witnesses() -> None:
    problem = problem_of(3, 0.02)
    found = lagrangian(reduce([problem]))
    upper, witness = float(found.upper[0]), found.witness_of(0)
    assert prove(problem, witness, upper) <= arb(upper)
    value = search(problem).value
    altered = {
        "base": witness["base"] - 1e-6 * abs(value - problem.nominal) * 1e3,
        "centre": witness["centre"] * 0.5,
        "multipliers": witness["multipliers"] * 0.5,
        "low": torch.zeros(1, 3, dtype=torch.float64),
    }
    for name, wrong in altered.items():
        assert not prove(problem, {**witness, name: wrong}, upper) <= arb(upper), name


def test_no_witness_proves_less_than_an_attained_value() -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(4):
        problem = problem_of(seed, 0.05)
        found = lagrangian(reduce([problem]))
        witness, value = found.witness_of(0), search(problem).value
        for _ in range(3):
            noisy = {
                name: w * (1 + 0.1 * torch.randn(w.shape, generator=generator, dtype=w.dtype))
                for name, w in witness.items()
                if name in ("centre", "shift", "multipliers")
            }
            low_base = {"base": torch.tensor(value - 0.2 * abs(value - problem.nominal), dtype=torch.float64)}
            assert not prove(problem, {**witness, **noisy, **low_base}, value) < arb(value)


def test_coverage_of_the_query_ball() -> None:
    assert _covers([[-1.0, -1.0], [0.0, -1.0]], [[0.0, 1.0], [1.0, 1.0]])
    assert _covers([[-1.0, -1.0], [0.0, -1.0], [0.0, 0.25]], [[0.0, 1.0], [1.0, 0.25], [1.0, 1.0]])
    assert not _covers([[-1.0, -1.0], [0.1, -1.0]], [[0.0, 1.0], [1.0, 1.0]])
    assert not _covers([], [])


@pytest.mark.parametrize("more", [{}, {"outside": True}, {"keys": [True, False, True, True]}])
def test_boxes(more: dict) -> None:
    for seed in range(2):
        ball = problem_of(seed, 0.0, **dict(more))
        points = ball.tokens if ball.query_index is not None else torch.cat([ball.tokens, ball.query_point[None]])
        region = TokenBox.around(points, 0.004)
        problem = HeadProblem(ball.head, ball.tokens, ball.query, ball.readout, region, keys=ball.keys)
        found = lagrangian(reduce([problem]))
        upper, witness = float(found.upper[0]), found.witness_of(0)
        assert prove(problem, witness, upper) <= arb(upper)
        value = search(problem).value
        assert not prove(problem, witness, upper) < arb(value)
        for name in ("key_multipliers", "query_multipliers"):
            assert not prove(problem, {**witness, name: 0.3 * witness[name]}, upper) <= arb(upper), name
        lowered = {**witness, "base": witness["base"] - 0.1 * (value - problem.nominal)}
        assert not prove(problem, lowered, upper) <= arb(upper)
        assert not prove(problem, {**witness, "x": witness["x"][:1]}, upper) <= arb(upper)
