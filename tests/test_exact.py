"""Exact worst cases against independent evaluations: fine grids, vertices and edges, enumeration."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

import attn_bounds as ab
from tests.conftest import random_head, random_problem


def fine_grid_maximum(problem: ab.HeadProblem, points: int = 40_000) -> float:
    """max f by the scalar equation, each key's inner maximum on a fine grid of its circle (a lower bound)."""
    head, placed = problem.head, problem.placed
    u, const = (g.numpy() for g in head.value_direction(problem.readout))
    q = (head.W_Q @ problem.query_point + head.b_Q).numpy() * head.scale
    a = head.W_K.numpy().T @ q
    e1 = a / max(np.linalg.norm(a), 1e-300)
    e2 = u - e1 * (u @ e1)
    e2 = e2 / max(np.linalg.norm(e2), 1e-300)
    theta = np.linspace(0, 2 * np.pi, points)
    circle = np.cos(theta)[:, None] * e1 + np.sin(theta)[:, None] * e2
    tables = []
    for j in problem.key_order:
        z = placed.centre[j].numpy() + float(placed.radius[j]) * circle
        tables.append((z @ a, z @ u + float(const)))
    top = max(s.max() for s, _ in tables)

    def total(t: float) -> float:
        return sum((np.exp(s - top) * (v - t)).max() for s, v in tables)

    return brentq(total, min(v.min() for _, v in tables) - 1, max(v.max() for _, v in tables) + 1, xtol=1e-14)


def test_ball_agrees_with_a_fine_grid(rng):
    for _ in range(40):
        problem = random_problem(
            rng, "ball", False, sharp=10 ** rng.uniform(-1, 0.7), radius=10 ** rng.uniform(-3, 0.3)
        )
        c = ab.certify(problem, "exact")
        grid = fine_grid_maximum(problem)
        assert grid <= c.upper
        assert grid == pytest.approx(c.upper, abs=1e-6 * (c.movement + c.spread) + 1e-9)


def test_interval_is_narrower_than_1e_10_of_the_spread(minilm):
    text = "The certificate holds for every token that stays inside its ball, and not one token further than that."
    for count in (5, 16):
        for radius in (0.001, 0.01, 0.05, 0.2):
            problems = [
                minilm.problem(text, layer, head, 3, radius, readout=7, query_moves=False, tokens=count)
                for layer in range(6) for head in range(0, 12, 3)
            ]  # fmt: skip
            for c in ab.certify_many(problems, "exact"):
                assert c.upper - c.lower <= 1e-10 * c.spread and c.upper >= c.lower


def zonotope_maximum(problem: ab.HeadProblem) -> float:
    """max f by trying every vertex and every edge (finely) of every key's box."""
    lower, upper = (g.numpy() for g in (problem.placed.lower, problem.placed.upper))
    d = lower.shape[1]
    head = problem.head
    u, const = (g.numpy() for g in head.value_direction(problem.readout))
    a = head.W_K.numpy().T @ ((head.W_Q @ problem.query_point + head.b_Q).numpy() * head.scale)
    corners = np.array(list(itertools.product([0.0, 1.0], repeat=d)))
    edges = []
    for k in range(d):
        for share in np.linspace(0, 1, 201):
            part = corners.copy()
            part[:, k] = share
            edges.append(part)
    shares = np.unique(np.concatenate(edges), axis=0)
    tables = []
    for j in problem.key_order:
        z = lower[j] + shares * (upper[j] - lower[j])
        tables.append((z @ a, z @ u + float(const)))
    top = max(s.max() for s, _ in tables)
    bracket = min(v.min() for _, v in tables) - 1, max(v.max() for _, v in tables) + 1
    return brentq(lambda t: sum((np.exp(s - top) * (v - t)).max() for s, v in tables), *bracket, xtol=1e-14)


def test_box_agrees_with_vertices_and_edges(rng):
    for _ in range(25):
        problem = random_problem(
            rng,
            "box",
            False,
            d=int(rng.integers(1, 5)),
            sharp=10 ** rng.uniform(-1, 0.7),
            radius=10 ** rng.uniform(-2, 0.3),
        )
        c = ab.certify(problem, "exact")
        tried = zonotope_maximum(problem)
        assert tried <= c.upper
        assert tried == pytest.approx(c.upper, abs=1e-4 * c.movement + 1e-9)


def enumerated_maximum(problem: ab.HeadProblem) -> float:
    lists = problem.placed.candidates
    best = -np.inf
    for choice in itertools.product(*(range(c.shape[0]) for c in lists)):
        points = torch.stack([c[i] for c, i in zip(lists, choice, strict=True)])
        query = points[problem.n] if len(lists) > problem.n else None
        best = max(best, float(problem.value(points[: problem.n], query)))
    return best


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_substitutions_agree_with_enumeration(moves, cross, masked, rng):
    for _ in range(25):
        problem = random_problem(rng, "lists", moves, cross, masked, sharp=10 ** rng.uniform(-1, 1.5))
        c = ab.certify(problem, "exact")
        best = enumerated_maximum(problem)
        assert best <= c.upper <= best + 1e-9 * (1 + c.spread + abs(best))
        assert c.lower == pytest.approx(best, abs=1e-9 * (1 + c.spread))
        assert c.verify()
        assert ab.search(problem).value <= c.upper


def test_substitutions_cost_the_sum_of_the_lists(rng):
    head = random_head(rng, 16, 8)
    z = rng.standard_normal((50, 16))
    lists = [z[j] + 0.3 * rng.standard_normal((30, 16)) for j in range(50)]
    problem = ab.HeadProblem(head, z, 7, rng.standard_normal(3), ab.TokenSubstitutions(lists))
    c = ab.certify(problem, "exact")
    assert c.is_exact and c.upper >= ab.search(problem, starts=2).value


def test_saturated_softmax_is_solved(rng):
    """Scores of +-1000 and more: Newton alone would need thousands of steps."""
    for _ in range(6):
        problem = random_problem(rng, "ball", False, sharp=300.0, radius=3.0, n=4, d=4)
        c = ab.certify(problem, "exact")
        assert np.isfinite(c.upper) and c.gap <= 1e-7 * (c.spread + c.movement)
