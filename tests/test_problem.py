"""Regions and problems: what is legal, what is refused, and the reduced form against the head itself."""

import numpy as np
import pytest
import torch

import attn_bounds as ab
from attn_bounds.reduced import lift, reduce
from attn_bounds.search import value_and_gradient
from tests.conftest import KINDS, kind_name, random_head, random_problem


@pytest.fixture
def head(rng):
    return random_head(rng, 4, 2)


def make(head, **changes):
    good = {
        "tokens": np.ones((3, 4)), "query": 1, "readout": np.ones(3), "region": ab.TokenBall(0.1),
        "query_moves": True, "keys": None,
    }  # fmt: skip
    return ab.HeadProblem(head, **(good | changes))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"tokens": np.ones((5, 7))}, "ShapeError", r"tokens: expected \(n, 4\), got \(5, 7\)"),
        ({"tokens": np.full((3, 4), np.inf)}, "NotFiniteError", "tokens: expected finite"),
        ({"tokens": np.ones((0, 4))}, "ArgumentError", "tokens: expected at least one"),
        ({"query": 3}, "ArgumentError", r"query: expected an index in 0\.\.2, got 3"),
        ({"query": -1}, "ArgumentError", r"query: expected an index in 0\.\.2, got -1"),
        ({"query": 1.5}, "ArgumentError", "query"),
        ({"query": np.ones(3)}, "ShapeError", r"query: expected \(4,\), got \(3,\)"),
        ({"readout": np.ones(4)}, "ShapeError", r"readout: expected \(3,\), got \(4,\)"),
        ({"readout": [1.0, np.nan, 0.0]}, "NotFiniteError", "readout"),
        ({"keys": np.zeros(3, bool)}, "ArgumentError", "all-false"),
        ({"keys": np.ones(2, bool)}, "ShapeError", r"keys: expected \(3,\), got \(2,\)"),
        ({"keys": np.ones(3)}, "ArgumentError", "keys: expected a bool mask"),
        ({"region": 0.1}, "RegionError", "region: expected TokenBall"),
        ({"region": ab.TokenBall([0.1, 0.2])}, "ShapeError", "radius: expected a number or 3"),
        ({"region": ab.TokenBox(np.zeros((2, 4)), np.ones((2, 4)))}, "ShapeError", "region: expected a box"),
        ({"region": ab.TokenBox(np.zeros((3, 4)), np.full((3, 4), 0.5))}, "RegionError", "holds the tokens"),
        ({"region": ab.TokenSubstitutions([np.ones((1, 4))])}, "ShapeError", "candidates: expected 3 lists, got 1"),
        ({"region": ab.TokenSubstitutions([np.ones((1, 3))] * 3)}, "ShapeError", r"candidates\[0\]"),
    ],
)
def test_bad_problems_are_named(head, changes, error, match):
    with pytest.raises(getattr(ab.errors, error), match=match):
        make(head, **changes)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: ab.TokenBall(-0.1), "radius: expected at least 0, got -0.1"),
        (lambda: ab.TokenBall(float("nan")), "radius: expected finite"),
        (lambda: ab.TokenBall(0.1, norm=3), "norm: expected 2 or inf"),
        (lambda: ab.TokenBox(np.ones((1, 2)), np.zeros((1, 2))), "lower: expected at most upper"),
        (lambda: ab.TokenBox.around(np.ones((1, 2)), -1), "radius: expected at least 0"),
        (lambda: ab.TokenSubstitutions([]), "candidates: expected one list per token"),
        (lambda: ab.TokenSubstitutions([np.ones((0, 2))]), r"candidates\[0\]: expected at least one"),
    ],
)
def test_bad_regions_are_named(build, match):
    with pytest.raises(ab.errors.ArgumentError, match=match):
        build()


def test_an_outside_query_needs_a_row_of_its_own_in_a_box(head):
    z, q = np.ones((3, 4)), np.zeros(4)
    box = ab.TokenBox(z - 1, z + 1)
    with pytest.raises(ab.errors.ShapeError, match="one row more for the outside query"):
        make(head, query=q, region=box)
    assert make(head, query=q, region=box, query_moves=False).query_is_fixed
    assert not make(head, query=q, region=ab.TokenBox.around(z, 1.0)).query_is_fixed


def test_zero_radius_at_the_query_holds_it_still(head):
    assert make(head, region=ab.TokenBall([0.1, 0.0, 0.1])).query_is_fixed
    assert not make(head).query_is_fixed


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_reduced_problem_is_the_head_itself(kind, rng):
    for _ in range(10):
        problem = random_problem(rng, *kind)
        r = reduce([problem])
        x = torch.as_tensor(rng.uniform(-1, 1, (r.n - r.own, r.u.shape[1])))
        y = torch.as_tensor(rng.uniform(-1, 1, r.b.shape[2]))
        if r.kind == "ball":
            x = x / x.norm(dim=-1, keepdim=True) * r.key_radius[0][:, None]
            y = y / y.norm() * r.query_radius[0] if len(y) else y
        else:
            x, y = x * r.key_radius[0], y * r.query_radius[0]
        tokens, query = lift(problem, x, y)
        assert problem.contains(tokens, query)
        value = r.value(x[None, None], y[None, None])[0, 0]
        scale = 1 + float(r.v0.abs().max())
        if r.u[0].norm() > 1e-9:
            assert abs(float(problem.value(tokens, query)) - float(value)) <= 1e-11 * scale


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_gradient_is_the_derivative(kind, rng):
    r = reduce([random_problem(rng, *kind)])
    x = torch.as_tensor(rng.standard_normal((1, 2, r.n - r.own, r.u.shape[1]))).requires_grad_()
    y = torch.as_tensor(rng.standard_normal((1, 2, r.b.shape[2]))).requires_grad_()
    f, gx, gy = value_and_gradient(r, x, y)
    assert torch.allclose(f, r.value(x, y), atol=1e-12)
    inputs = [g for g in (x, y) if g.numel()]
    found = torch.autograd.grad(r.value(x, y).sum(), inputs, allow_unused=True)
    for have, want in zip([g for g in (gx, gy) if g.numel()], found, strict=True):
        assert torch.allclose(have, torch.zeros_like(have) if want is None else want, atol=1e-9)


def test_reduction_loses_nothing_where_tokens_are_wide(rng):
    # d = 40 against 2 * 3 + 1 coordinates: the maximum over the full space must be reached in the reduced one.
    head = random_head(rng, 40, 3)
    z = rng.standard_normal((3, 40))
    problem = ab.HeadProblem(head, z, 0, rng.standard_normal(3), ab.TokenBall(0.05))
    reached = ab.search(problem).value
    full = torch.as_tensor(z).clone().requires_grad_()
    radius = torch.as_tensor(z).norm(dim=-1, keepdim=True) * 0.05
    for _ in range(400):
        scores = head.scores(full, full[0])
        values = (full @ head.W_V.T + head.b_V) @ (head.W_O.T @ problem.readout)
        (g,) = torch.autograd.grad((torch.softmax(scores, -1) * values).sum(), full)
        with torch.no_grad():
            step = full + 10 * radius * g / g.norm(dim=-1, keepdim=True) - torch.as_tensor(z)
            full = torch.as_tensor(z) + step / step.norm(dim=-1, keepdim=True) * radius
        full.requires_grad_()
    assert reached >= float(problem.value(full.detach())) - 1e-9
