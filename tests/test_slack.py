"""The secant slack: closed form against its definition, the bound of the gap, and the differentiable version."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attn_bounds.bounds.moment import moment
from attn_bounds.bounds.slack import _knapsack, gap_bound, secant_error, secant_slack, secant_slack_loss
from attn_bounds.errors import ArgumentError, MethodNotApplicableError
from attn_bounds.exact import exact
from attn_bounds.regions import TokenBall, TokenSubstitutions
from attn_bounds.search import ascend
from tests.moment_cases import batch, small_problem


def test_secant_error_is_the_largest_distance_of_the_chord() -> None:
    low = torch.tensor([-1e-5, -0.004, -0.3, -2.0, 0.5, 0.0], dtype=torch.float64)
    high = torch.tensor([2e-5, 0.004, 0.2, 3.0, 0.9, 0.0], dtype=torch.float64)
    s = low + (high - low) * torch.linspace(0, 1, 20001, dtype=torch.float64)[:, None]
    slope = torch.where(
        high > low, (torch.expm1(high) - torch.expm1(low)) / (high - low).clamp_min(1e-300), torch.exp(low)
    )
    gap = torch.expm1(low) + slope * (s - low) - torch.expm1(s)
    assert torch.allclose(secant_error(low, high), gap.amax(0), rtol=1e-6, atol=1e-16)


def test_knapsack_is_the_best_of_all_subsets() -> None:
    """A ratio of linear functions is largest at a corner, so at a subset."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        p = torch.softmax(torch.tensor(rng.standard_normal(5) * 2), -1)
        high = torch.tensor(rng.random(5))
        low, excess = -high, torch.tensor(rng.standard_normal(5))
        weight, Zmin = p * secant_error(low, high), (p * torch.exp(low)).sum()
        subsets = torch.tensor([[bit >> i & 1 for i in range(5)] for bit in range(32)], dtype=torch.float64)
        ratios = (subsets @ (weight * excess)) / (Zmin + subsets @ weight)
        assert float(_knapsack(p, low, high, excess)) == pytest.approx(float(ratios.max()), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("radius", [0.005, 0.05])
def test_gap_is_below_its_bound_and_third_order_below_the_secant_slack(radius: float) -> None:
    ratios = []
    for moves in (False, True):
        reduced = batch(radius, count=5, query_moves=moves)
        x, y, f = ascend(reduced)
        top = exact(reduced).upper if not moves else f
        parts = gap_bound(reduced, (x, y), top)
        scale = 1e-6 * (f - reduced.nominal)  # the solver's accuracy
        for order in (2, 3):
            gap = moment(reduced, order, point=(x, y)).upper - f
            assert (gap <= parts["total"] + scale).all()
            ratios.append((gap / parts["secant"]).max())
            if order == 3 and not moves:
                assert (gap <= parts["secant"] + scale).all()
    assert all(torch.isfinite(r) for r in ratios), ratios


def test_slack_falls_as_t_rises_and_with_the_square_of_the_radius() -> None:
    problem = small_problem(0, 0.01)
    assert (
        secant_slack(problem) < secant_slack(problem, t=problem.nominal) < secant_slack(problem, t=problem.nominal - 1)
    )
    assert secant_slack(small_problem(0, 0.0)) == 0.0
    ratio = secant_slack(small_problem(0, 0.02), t=problem.nominal) / secant_slack(problem, t=problem.nominal)
    assert 3.5 < ratio < 5.0


def test_substitutions_and_boxes_are_refused_where_the_slack_does_not_apply() -> None:
    problem = small_problem(0, 0.01)
    lists = TokenSubstitutions([problem.tokens[j : j + 1] for j in range(problem.n)])
    other = type(problem)(problem.head, problem.tokens, 1, problem.readout, lists)
    with pytest.raises(MethodNotApplicableError):
        secant_slack(other)
    with pytest.raises(MethodNotApplicableError, match="blocks='full'"):
        gap_bound(batch(0.01, count=1, box=True))


def arguments(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"tokens": (4, 5), "W_Q": (2, 5), "W_K": (2, 5), "W_V": (3, 5), "readout": (4,)}
    shapes |= {"W_O": (4, 3), "b_Q": (2,), "b_V": (3,)}
    return {name: torch.randn(*shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


@pytest.mark.parametrize("moves", [False, True])
def test_loss_equals_the_slack(moves: bool) -> None:
    from attn_bounds.head import AttentionHead
    from attn_bounds.problem import HeadProblem

    for seed in range(3):
        a = arguments(seed)
        head = AttentionHead(a["W_Q"], a["W_K"], a["W_V"], a["W_O"], a["b_Q"], None, a["b_V"])
        problem = HeadProblem(head, a["tokens"], 2, a["readout"], TokenBall(1e-4), query_moves=moves)
        loss = secant_slack_loss(**a, query=2, radius=1e-4, query_moves=moves)
        # The moving query's scores are recentred at the best point there, at the nominal tokens here.
        assert float(loss) == pytest.approx(secant_slack(problem, t=problem.nominal), rel=1e-2 if moves else 1e-8)


@pytest.mark.parametrize("moves", [False, True])
def test_loss_has_the_right_gradient(moves: bool) -> None:
    a = {name: value.requires_grad_() for name, value in arguments(1).items()}
    names = list(a)

    def loss(*values: torch.Tensor) -> torch.Tensor:
        return secant_slack_loss(**dict(zip(names, values, strict=True)), query=2, radius=0.02, query_moves=moves)

    assert torch.autograd.gradcheck(loss, tuple(a.values()), eps=1e-7, atol=1e-6)
    assert loss(*a.values()) > 0
    gradients = torch.autograd.grad(loss(*a.values()), list(a.values()))
    assert all(torch.isfinite(g).all() for g in gradients) and all(g.abs().max() > 0 for g in gradients[:5])


def test_loss_can_be_trained_down() -> None:
    a = {name: value.requires_grad_() for name, value in arguments(2).items()}
    optimiser = torch.optim.Adam([a["W_Q"], a["W_K"]], lr=0.05)
    first = last = float(secant_slack_loss(**a, query=0, radius=0.05))
    for _ in range(30):
        optimiser.zero_grad()
        loss = secant_slack_loss(**a, query=0, radius=0.05)
        loss.backward()
        optimiser.step()
        last = float(loss)
    assert last < 0.5 * first


def test_loss_names_a_bad_query() -> None:
    with pytest.raises(ArgumentError, match=r"query: expected an index in 0\.\.3, got 9"):
        secant_slack_loss(**arguments(0), query=9, radius=0.1)
