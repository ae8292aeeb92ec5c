"""The moment relaxations: sound on anything (corrupted duals included), ordered, and as tight as they should be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from attn_bounds.bounds import moment as module
from attn_bounds.bounds._centred import Centred, centre
from attn_bounds.bounds._recovery import evaluate, project, recover
from attn_bounds.bounds.moment import moment
from attn_bounds.errors import ArgumentError
from attn_bounds.exact import exact
from attn_bounds.head import AttentionHead
from attn_bounds.problem import HeadProblem
from attn_bounds.reduced import Reduced, reduce
from attn_bounds.search import ascend
from attn_bounds.solvers import Solution
from comparisons.violations import random_batches
from tests.moment_cases import batch, small_problem


def relative_gap(reduced: Reduced, **options: object) -> torch.Tensor:
    x, y, f = ascend(reduced)
    return (moment(reduced, point=(x, y), **options).upper - f) / (f - reduced.nominal)


def check_sound(seed: int, count: int) -> None:
    bounded = 0
    for name, reduced in random_batches(np.random.default_rng(seed), count):
        x, y, f = ascend(reduced, starts=8, seed=seed)
        second, third = (moment(reduced, order, point=(x, y)) for order in (2, 3))
        attained = torch.maximum(f, exact(reduced).upper - 3 * reduced.rounding) if reduced.query_fixed else f
        attained = torch.where(torch.isfinite(attained), attained, f)
        for bound in (second, third):
            assert not torch.isnan(bound.upper).any(), name
            assert not (bound.upper < attained).any(), name
            assert all(
                (why is None) == math.isfinite(u) for why, u in zip(bound.reason, bound.upper.tolist(), strict=True)
            )
        assert (third.upper <= second.upper).all(), name
        bounded += int(torch.isfinite(third.upper).sum())
    assert bounded > 0.6 * count  # an infinite bound is sound too: see that the test tests something


@pytest.mark.parametrize("seed", range(2))
def test_never_below_an_attained_or_exact_value(seed: int) -> None:
    check_sound(seed, 90)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_never_below_an_attained_or_exact_value_on_many_heads(seed: int) -> None:
    check_sound(seed, 500)


def multipliers(c: Centred, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    n, K, m, k = c.n, c.keys, c.wk.shape[2], c.wq.shape[1]
    shapes = {
        "ball_k": (K, m), "ball_q": (k,), "norm_k": (K, m), "norm_q": (n, k), "over_k": (K, m), "under_k": (K, m),
        "over_q": (n, k), "under_q": (n, k), "ratio": (n,), "exp": (n,), "exp_at": (n,), "secant": (n,), "square": (n,),
        "entropy": (n,), "entropy_at": (n,),
    }  # fmt: skip
    given = {name: torch.randn(c.size, *shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
    for name, floor in (
        ("ball_k", 60.0),
        ("ball_q", 200.0),
        ("square", 600.0),
    ):  # so that nothing has to be raised much
        given[name] = given[name].abs() + floor
    given["ratio"] = given["ratio"].abs() + 0.1
    given["t"] = c.f + 0.1 * torch.rand(c.size, generator=draw, dtype=torch.float64)
    return given


def certificate(
    c: Centred, y: dict[str, torch.Tensor], dq: torch.Tensor, d: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """P of `_recovery` for problem 0, term by term as its docstring has it, at any real d_q (k,), d (K, m), x (n,)."""
    K, total = c.keys, torch.zeros((), dtype=torch.float64)
    wq = c.wq[0] + dq

    def size(g: torch.Tensor) -> torch.Tensor:
        return g.abs().sum() if c.box else torch.linalg.vector_norm(g)

    def region(lam: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (lam * (1 - w**2)).sum() if c.box else (lam[0] if len(lam) else 0.0) * (1 - w @ w)

    for j in range(c.n):
        low, high, e = c.low[0, j], c.high[0, j], 1 + x[j]
        own = j >= K
        linear = c.beta[0, j] @ dq + (0.0 if own else c.alpha[0, j] @ d[j])
        image = c.fo[0] @ dq if own else c.fk[0, j] @ d[j]
        bilinear = (c.fq[0] @ dq) @ image
        mass_q = (c.weight_q[0] * dq**2).sum()
        r = y["ratio"][0, j]
        third = c.bend[0, j] * (mass_q if own else (r * mass_q + (c.weight_k[0, j] * d[j] ** 2).sum() / r) / 2)
        s = linear + bilinear
        value = c.v[0, j] + (c.own_u[0] @ dq if own else c.u[0, j] @ d[j])
        slope = (torch.exp(high) - torch.exp(low)) / (high - low) if high > low else torch.exp(low)
        mu, c0 = y["exp"][0, j], y["exp_at"][0, j]
        eta, at = y["entropy"][0, j], y["entropy_at"][0, j]
        middle, half = (torch.exp(low) + torch.exp(high)) / 2, (torch.exp(high) - torch.exp(low)) / 2
        total = total + c.p[0, j] * e * (value - y["t"][0])
        total = total + mu * (e - torch.exp(c0) * (1 + s - c0))
        total = total + y["secant"][0, j] * (torch.exp(low) + slope * (s - low) - e)
        total = total + y["square"][0, j] * (e - torch.exp(low)) * (torch.exp(high) - e)
        total = total + y["edge_high"][0, j] * (torch.exp(high) - e) + y["edge_low"][0, j] * (e - torch.exp(low))
        total = total + eta * (e * linear + middle * bilinear + half * third - (1 + at) * e + torch.exp(at))
        for side, w in (("q", wq),) if own else (("k", c.wk[0, j] + d[j]), ("q", wq)):
            g = y[f"norm_{side}"][0, j]
            total = total + e * (size(g) - g @ w)
            g, h = y[f"over_{side}"][0, j], y[f"under_{side}"][0, j]
            total = total + (size(g) - g @ w) * (e - 1 - linear) + size(g) * (third - bilinear)
            chord = torch.exp(low) + slope * (linear - low)
            total = total + (size(h) - h @ w) * (chord - e) + slope * size(h) * (bilinear + third)
        if not own:
            total = total + region(y["ball_k"][0, j], c.wk[0, j] + d[j])
    return total + region(y["ball_q"][0], wq)


@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("query", [1, None])
def test_recovery_is_the_maximum_of_the_certificate(box: bool, moves: bool, query: int | None) -> None:
    """Against the certificate written out: its maximum over all reals is eps, and at true points it majorises Phi_t."""
    rng = np.random.default_rng(5)
    for seed in range(3):
        outside = rng.standard_normal(4) if query is None else query
        region = {} if not (box and query is None and moves) else {"box": False}
        problem = small_problem(seed, 0.1, **{"box": box, **region}, n=3, d=4, query=outside, query_moves=moves)
        c = centre(reduce([problem]), *ascend(reduce([problem]), starts=2)[:2], floor=1.0)
        upper, _, y = evaluate(c, project(c, multipliers(c, seed), 1e-4))
        shapes = [c.wq.shape[1:], c.wk.shape[1:], c.p.shape[1:]]
        sizes = [math.prod(shape) for shape in shapes]

        def at(point: torch.Tensor) -> torch.Tensor:
            return certificate(c, y, *(p.reshape(s) for p, s in zip(point.split(sizes), shapes, strict=True)))  # noqa: B023

        zero = torch.zeros(sum(sizes), dtype=torch.float64)
        gradient = torch.autograd.functional.jacobian(at, zero)
        hessian = torch.autograd.functional.hessian(at, zero)
        assert torch.linalg.eigvalsh(hessian).max() < 0
        best = at(torch.linalg.solve(-hessian, gradient))
        assert float(y["eps"][0]) == pytest.approx(float(best), rel=1e-8)
        draw = torch.Generator().manual_seed(seed)
        for _ in range(20):
            wq, w = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes[:2])
            if c.box:
                wq, w = wq.clamp(-1, 1), w.clamp(-1, 1)
            else:
                wq, w = (p / torch.linalg.vector_norm(p, dim=-1, keepdim=True).clamp_min(1.0) for p in (wq, w))
            dq, d = wq - c.wq[0], w - c.wk[0]
            s = c.beta[0] @ dq
            s[: c.keys] += (c.alpha[0] * d).sum(-1) + torch.einsum("h,nhm,nm->n", c.fq[0] @ dq, c.fk[0], d)
            v = c.v[0].clone()
            v[: c.keys] += (c.u[0] * d).sum(-1)
            if c.own:
                s[-1] += (c.fq[0] @ dq) @ (c.fo[0] @ dq)
                v[-1] += c.own_u[0] @ dq
            assert (s >= c.low[0]).all() and (s <= c.high[0]).all()
            phi = (c.p[0] * torch.exp(s) * (v - y["t"][0])).sum()
            assert float(certificate(c, y, dq, d, torch.expm1(s))) >= float(phi) - 1e-9
        assert float(upper[0]) >= float(c.f[0])


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("order", [2, 3])
def test_corrupted_duals_still_give_valid_bounds(monkeypatch: pytest.MonkeyPatch, order: int, moves: bool) -> None:
    reduced = batch(0.05, count=2, query_moves=moves)
    x, y, f = ascend(reduced)
    clean = moment(reduced, order, point=(x, y))
    solve = module.solve
    rng = np.random.default_rng(0)
    for kind in ("noise", "flip", "zero", "huge", "shuffle", "shift"):

        def corrupt(*arguments: object, kind: str = kind) -> Solution:
            found = solve(*arguments)
            z = found.z
            z = {
                "noise": z + 0.1 * np.abs(z).max() * rng.standard_normal(z.size), "flip": -z, "zero": 0 * z, "huge":
                1e6 * z, "shuffle": rng.permutation(z), "shift": z + 1e-3,
            }[kind]  # fmt: skip
            return Solution(found.x, z, -1e9, found.status, found.solver, found.seconds)

        monkeypatch.setattr(module, "solve", corrupt)
        bound = moment(reduced, order, point=(x, y))
        assert (bound.upper >= f).all(), kind
        assert not torch.isnan(bound.upper).any(), kind
        assert (bound.upper > clean.upper).any(), kind  # the corruption did something


def test_a_failed_solve_is_no_bound_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced = batch(0.05, count=2)

    def fail(conic: object, solver: object) -> Solution:
        return Solution(
            np.full(conic.q.size, np.nan), np.full(conic.b.size, np.nan), np.nan, "NumericalError", "none", 0.0
        )

    monkeypatch.setattr(module, "solve", fail)
    bound = moment(reduced, 2)
    assert torch.isinf(bound.upper).all()
    assert all("NumericalError" in why for why in bound.reason)


def test_too_wide_scores_are_no_bound_and_say_why() -> None:
    bound = moment(batch(300.0, count=1), 2)
    assert torch.isinf(bound.upper).all() and "200" in bound.reason[0]


@pytest.mark.parametrize("moves", [False, True])
def test_gap_orders_without_products(moves: bool) -> None:
    """Gaps relative to the movement: first order in the radius for order 2, second for order 3."""
    batches = [batch(radius, query_moves=moves) for radius in (0.004, 0.04)]
    gaps = {o: [relative_gap(one, order=o, products=False).median() for one in batches] for o in (2, 3)}
    slopes = {order: math.log10(two / one) for order, (one, two) in gaps.items()}
    assert slopes[2] > 0.8 and slopes[3] > 1.7, (gaps, slopes)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("box", [False, True])
def test_order_3_is_exact_at_small_radii(moves: bool, box: bool) -> None:
    gap = relative_gap(batch(0.002, box=box, query_moves=moves), order=3)
    assert gap.median() < 1e-6 and gap.max() < 1e-4, gap


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("box", [False, True])
def test_full_blocks_are_the_reference_of_reduced_ones(moves: bool, box: bool) -> None:
    for products in (False, True):
        reduced = batch(0.1, count=2, box=box, query_moves=moves)
        few, all_ = (relative_gap(reduced, order=2, blocks=b, products=products) for b in ("reduced", "full"))
        assert (few >= all_ - 2e-3).all(), (few, all_)  # up to what an inaccurate dual costs


def test_reduced_equals_full_where_nothing_is_cut() -> None:
    """A fixed query in balls: the plane of scores and values is all there is."""
    reduced = batch(0.1, query_moves=False)
    few, all_ = (relative_gap(reduced, order=3, blocks=b) for b in ("reduced", "full"))
    assert torch.allclose(few, all_, atol=1e-6)


@pytest.mark.parametrize("order", [2, 3])
def test_invariances(order: int) -> None:
    problem = small_problem(3, 0.05)
    head = problem.head
    base = float(moment(reduce([problem]), order).upper[0])
    swap = [0, 1, 3, 2]
    biased = AttentionHead(head.W_Q, head.W_K, head.W_V, b_Q=head.b_Q, b_K=[3.0, -1.0])
    same = {
        "permuted keys": HeadProblem(head, problem.tokens[swap], 1, problem.readout, problem.region),
        "key bias": HeadProblem(biased, problem.tokens, 1, problem.readout, problem.region),
    }
    for name, other in same.items():
        assert float(moment(reduce([other]), order).upper[0]) == pytest.approx(base, abs=1e-6), name
    double = HeadProblem(head, problem.tokens, 1, 2 * problem.readout, problem.region)
    assert float(moment(reduce([double]), order).upper[0]) == pytest.approx(2 * base, rel=1e-6)


def test_batch_and_single_agree() -> None:
    reduced = batch(0.05)
    whole = moment(reduced, 2).upper
    single = torch.cat([moment(reduced[i : i + 1], 2).upper for i in range(reduced.size)])
    assert torch.allclose(whole, single, rtol=0, atol=1e-7)


def test_zero_radius_is_the_nominal_value() -> None:
    problem = small_problem(0, 0.0)
    bound = moment(reduce([problem]), 3)
    assert float(bound.upper[0]) == pytest.approx(problem.nominal, abs=1e-8)
    assert float(bound.upper[0]) >= problem.nominal


def test_recovery_beats_no_solver_value_by_much() -> None:
    """What rigour costs, in units of the movement."""
    for moves in (False, True):
        reduced = batch(0.02, query_moves=moves)
        x, y, f = ascend(reduced)
        for order in (2, 3):
            bound = moment(reduced, order, point=(x, y))
            cost = (bound.upper - bound.witness["solver_value"]) / (f - reduced.nominal)
            assert cost.median() < 1e-5 and cost.max() < 1e-3, cost


def test_recover_takes_non_finite_multipliers_as_no_proof() -> None:
    reduced = batch(0.05, count=2)
    c = centre(reduced, *ascend(reduced)[:2])
    given = {name: torch.full_like(value, math.nan) for name, value in multipliers(c, 0).items()}
    assert torch.isinf(recover(c, given)[0]).all()


def test_arguments_are_checked() -> None:
    reduced = batch(0.05, count=1)
    with pytest.raises(ArgumentError, match="order: expected 2 or 3, got 4"):
        moment(reduced, 4)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="blocks: expected"):
        moment(reduced, 2, blocks="some")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="solver: expected"):
        moment(reduced, 2, solver="cplex")
