"""Inputs that once broke something; each test names the kind of fault."""

import dataclasses
import itertools
import sys

import numpy as np
import pytest
import torch

import attn_bounds as ab
from attn_bounds.audit import audit
from attn_bounds.certificate import seal_of
from tests.conftest import random_head, random_problem


def test_a_step_that_rounds_to_nothing_is_not_the_root():
    """A key of huge weight whose value equals t: Newton's step vanishes far below the maximum."""
    head = ab.AttentionHead([[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]], scale=1.0)
    lists = [np.array([[1000.0, 0.0], [-1000.0, 0.0]]), np.array([[0.0, 1.0]])]
    tokens = np.array([[1000.0, 0.0], [0.0, 1.0]])
    problem = ab.HeadProblem(head, tokens, [1.0, 0.0], [1.0], ab.TokenSubstitutions(lists), query_moves=False)
    c = ab.certify(problem, "exact")
    assert c.upper >= 1.0 and c.lower == pytest.approx(1.0, abs=1e-12) and c.verify()


@pytest.mark.parametrize("sharp", [10.0, 100.0, 1000.0])
def test_sharp_lists_agree_with_enumeration(sharp, rng):
    for _ in range(60):
        problem = random_problem(rng, "lists", bool(rng.integers(2)), bool(rng.integers(2)), sharp=sharp, n=3, d=3)
        lists = problem.placed.candidates
        best = -np.inf
        for choice in itertools.product(*(range(len(c)) for c in lists)):
            points = torch.stack([c[i] for c, i in zip(lists, choice, strict=True)])
            query = points[problem.n] if len(lists) > problem.n else None
            best = max(best, float(problem.value(points[: problem.n], query)))
        c = ab.certify(problem, "exact")
        assert c.upper >= best and c.lower >= best - 1e-9 * (1 + abs(best) + c.spread)


def test_a_large_key_bias_costs_no_digits(rng):
    for moves in (True, False):
        p = random_problem(rng, "ball", moves, n=3, d=4, radius=0.01)
        h = p.head
        big = ab.AttentionHead(h.W_Q, h.W_K, h.W_V, h.W_O, h.b_Q, h.b_K + 1e7, h.b_V)
        plain, biased = (
            ab.certify(ab.HeadProblem(head, p.tokens, p.query, p.readout, p.region, moves)) for head in (h, big)
        )
        assert biased.upper == plain.upper and biased.verify()


def test_the_callers_arrays_are_copied(rng):
    buffer = rng.standard_normal((3, 4))
    head = random_head(rng, 4, 2)
    problems = []
    for _ in range(3):
        buffer[:] = rng.standard_normal((3, 4))
        problems.append(ab.HeadProblem(head, buffer, 0, np.ones(3), ab.TokenBall(0.1)))
    assert len({p.nominal for p in problems}) == 3
    tensor = torch.ones(3, 4, dtype=torch.float64)
    problem = ab.HeadProblem(head, tensor, 0, np.ones(3), ab.TokenBall(0.1))
    tensor += 1
    assert float(problem.tokens.max()) == 1.0


@pytest.mark.parametrize("same", ["W_K", "W_Q"])
def test_values_in_the_span_of_the_scores_keep_the_coordinates_orthogonal(same, rng):
    h = random_head(rng, 12, 2, 2)
    for _ in range(5):
        head = ab.AttentionHead(h.W_Q, h.W_K, getattr(h, same))
        problem = ab.HeadProblem(head, rng.standard_normal((3, 12)), 0, rng.standard_normal(2), ab.TokenBall(0.003))
        c = ab.certify(problem)
        assert c.is_exact and c.verify()


@pytest.mark.parametrize("method", ["exact", "vertex", "lagrangian", "moment2"])
def test_the_audit_trusts_no_figure_of_the_certificate(method, rng):
    c = ab.certify(random_problem(rng, "ball", method != "exact", n=3, d=3, radius=0.003), method)
    gap = c.upper + 1.0
    for changes in (
        {"lower": gap, "upper": gap, "witness": c.witness | {"inflation": 1e9}},
        {"lower": gap, "upper": gap, "spread": 1e20},
        {"spread": 1e20},
        {"nominal": -99.0},
        {"witness": {}},
        {"maximizer": c.maximizer[:1]},
    ):
        false = dataclasses.replace(c, **changes)
        report = audit(dataclasses.replace(false, seal=seal_of(false)))
        if changes == {"witness": {}} and method in ("exact", "vertex"):
            assert report.passed  # these proofs need no witness
        else:
            assert not report.passed and report.reason, changes


def test_one_key_has_an_affine_bound(rng):
    head = random_head(rng, 9, 2)
    problem = ab.HeadProblem(head, rng.standard_normal((1, 9)), 0, np.ones(3), ab.TokenBall(0.1))
    slope, offset, _ = ab.affine_upper_bound(problem)
    z = ab.search(problem).tokens
    assert float(problem.value(z)) <= float((slope * z).sum()) + offset


@pytest.mark.parametrize("radius", [1e100, 1e200])
@pytest.mark.parametrize("region", ["ball", "box"])
def test_absurd_radii_give_a_bound_or_none(region, radius, rng):
    p = random_problem(rng, region, True, n=2, d=2, radius=radius)
    for c in ab.certify_many([p, random_problem(rng, region, True, n=2, d=2, radius=0.01)]):
        assert c.upper >= c.lower and (np.isfinite(c.upper) or c.reason)


@pytest.mark.parametrize(
    "array", [np.ones((3, 8))[:, ::2], np.ones((3, 4))[::-1], np.ones((3, 4), ">f8"), np.ones((3, 4), np.longdouble)]
)
def test_any_real_array_will_do(array, rng):
    assert ab.HeadProblem(random_head(rng, 4, 2), array, 0, np.ones(3), ab.TokenBall(0.1)).tokens.shape == (3, 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query", float("nan")), ("query", 1.0), ("query", "0"), ("query", None), ("query", True),
        ("query", np.bool_(True)), ("query", 1j), ("query_moves", "no"), ("keys", "yes"), ("keys", {}),
        ("keys", [[True], [True, False]]), ("tokens", "words"), ("tokens", None), ("readout", object()),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(name, value, rng):
    good = {"tokens": np.ones((2, 4)), "query": 0, "readout": np.ones(3), "region": ab.TokenBall(0.1)}
    with pytest.raises(ab.errors.AttnBoundsError, match=name):
        ab.HeadProblem(random_head(rng, 4, 2), **(good | {name: value}))


@pytest.mark.parametrize(
    ("method", "options", "match"),
    [
        ("lagrangian", {"max_pieces": "a"}, "max_pieces: expected a whole number of at least 1, got 'a'"),
        ("lagrangian", {"max_pieces": 0}, "max_pieces"), ("lagrangian", {"max_pieces": 2.0}, "max_pieces"),
        ("lagrangian", {"max_pieces": True}, "max_pieces"), ("lagrangian", {"max_pieces": None}, "max_pieces"),
        ("lagrangian", {"starts": 0}, "starts"), ("lagrangian", {"seed": -1}, "seed: expected .* at least 0"),
        ("lagrangian", {"steps": -1}, "steps"), ("lagrangian", {"retry": "no"}, "retry: expected True or False"),
        ("lagrangian", {"chunk": -1}, "chunk: expected a whole number of at least 1, or None, got -1"),
        ("best", {"max_pieces": "a"}, "max_pieces"), ("best", {"solver": "clarabel"}, "'best' does not take solver"),
        ("moment2", {"order": 3}, "'moment2' does not take order"), ("moment3", {"pulls": ()}, "pulls: expected one"),
        ("moment2", {"pulls": (float("nan"),)}, "pulls"), ("moment2", {"pulls": 1.0}, "pulls"),
        ("moment2", {"pulls": "0"}, "pulls"), ("moment2", {"blocks": "half"}, "blocks: expected 'reduced' or 'full'"),
        ("moment2", {"products": 1}, "products"), ("moment2", {"solver": 3}, "solver: expected a string, or None"),
        ("moment2", {"solver": "simplex"}, "solver: expected one of"),
        ("lagrangian", {"point": None}, "does not take point"), ("lagrangian", {"reduced": 1}, "does not take reduced"),
        ("vertex", {"starts": 2}, "'vertex' does not take starts; it has no options"),
        ("exact", {"starts": 2}, "'exact' does not take starts"),
    ],
)  # fmt: skip
def test_bad_options_are_named_before_any_work(method, options, match, rng, monkeypatch):
    problem = random_problem(rng, "ball", method != "exact", n=2, d=2, radius=0.01)
    if options != {"solver": "simplex"}:  # names of solvers are the solvers' own business
        monkeypatch.setattr(sys.modules["attn_bounds.certify"], "_certify_alike", None)
    with pytest.raises(ab.errors.ArgumentError, match=match):
        ab.certify(problem, method, **options)


def test_options_that_a_method_takes_are_taken(rng):
    problem = random_problem(rng, "ball", True, n=2, d=2, radius=0.01)
    for method, options in (
        ("lagrangian", {"max_pieces": np.int64(2), "chunk": None, "seed": 0, "retry": np.bool_(False)}),
        ("best", {"starts": 3}),
        ("moment2", {"solver": "Clarabel", "pulls": [0, 0.5], "products": False, "blocks": "full"}),
    ):
        c = ab.certify(problem, method, **options)
        assert c.lower <= c.upper < np.inf
    for wrong in ({"starts": 0}, {"starts": "8"}, {"seed": 1.5}):
        with pytest.raises(ab.errors.ArgumentError, match=next(iter(wrong))):
            ab.search(problem, **wrong)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda p: ab.certify(None), "problem"),
        (lambda p: ab.certify_many(p), "problems"),
        (lambda p: ab.certify_many([p, 3]), r"problems\[1\]"),
        (lambda p: ab.affine_upper_bound(None), "problem"),
        (lambda p: ab.TokenSubstitutions(3), "candidates"),
        (lambda p: ab.TokenBall(0.1, norm="2"), "norm"),
        (lambda p: ab.AttentionHead(np.ones((1, 2)), np.ones((1, 2)), np.ones((1, 2)), scale="big"), "scale"),
        (lambda p: p.head.forward(p.tokens, 0, np.zeros(p.n, bool)), "keys"),
        (lambda p: p.to("abacus"), "device"),
        (lambda p: ab.certify(p, device="meta"), "device"),
        (lambda p: ab.HeadProblem(
            ab.AttentionHead(np.full((1, 2), 1e200), np.full((1, 2), 1e200), np.ones((1, 2))),
            np.ones((2, 2)), 0, [1.0], ab.TokenBall(0.1)).nominal, "tokens"),
    ],
)  # fmt: skip
def test_bad_calls_are_named(call, match, rng):
    with pytest.raises(ab.errors.AttnBoundsError, match=match):
        call(random_problem(rng, "ball", n=2, d=2))
