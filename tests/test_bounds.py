"""One shared case for every bound: soundness against search and samples, order, and the invariances of attention."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_bounds as ab
from tests.conftest import KINDS, kind_name, random_head, random_problem, sample_values

LADDER = ["interval", "first-order", "vertex"]


def methods_for(problem: ab.HeadProblem) -> list[str]:
    return [*LADDER, "lagrangian", "best", *(["exact"] if problem.query_is_fixed else [])]


def tolerance(certificate: ab.Certificate) -> float:
    """What two float64 evaluations of the same bound may differ by."""
    return 1e-9 * (1 + abs(certificate.upper) + certificate.spread)


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_no_bound_lies_below_an_attained_value(kind, rng):
    for _ in range(5):
        problem = random_problem(rng, *kind, sharp=10 ** rng.uniform(-1, 1))
        reached = max(ab.search(problem).value, float(sample_values(problem, rng, 500).max()))
        for method in methods_for(problem):
            c = ab.certify(problem, method)
            assert c.upper >= reached, method
            assert c.upper >= c.lower >= c.nominal
            assert problem.contains(c.maximizer, c.maximizer_query)
            assert float(problem.value(c.maximizer, c.maximizer_query)) == pytest.approx(c.lower, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
    sharp=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1000.0]),
    radius=st.sampled_from([0.0, 1e-6, 0.01, 1.0, 30.0]),
    n=st.integers(1, 6),
    d=st.integers(1, 6),
)
def test_soundness_at_the_edges(seed, kind, sharp, radius, n, d):
    """Saturated and constant softmax, one key, one coordinate, zero and huge radius."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, *kind, sharp=sharp, radius=radius, n=n, d=d)
    reached = max(ab.search(problem, starts=4).value, float(sample_values(problem, rng, 200).max()))
    for method in methods_for(problem):
        c = ab.certify(problem, method)
        assert c.upper >= reached or not np.isfinite(c.upper), method


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_the_ladder_is_ordered(kind, rng):
    for _ in range(10):
        problem = random_problem(rng, *kind)
        interval, first, vertex = (ab.certify(problem, m).upper for m in LADDER)
        assert vertex <= first <= interval
        if problem.query_is_fixed:
            assert ab.certify(problem, "exact").upper <= vertex + 1e-12


@pytest.mark.parametrize("method", [*LADDER, "exact"])
@pytest.mark.parametrize("region", ["ball", "box"])
def test_invariances(method, region, rng):
    moves = method != "exact"
    for _ in range(6):
        p = random_problem(rng, region, moves, n=4, d=3, radius=0.1)
        c = ab.certify(p, method)

        def again(problem, method=method):
            return ab.certify(problem, method).upper

        # Scaling the readout scales the bound.
        assert again(ab.HeadProblem(p.head, p.tokens, p.query, 3 * p.readout, p.region, moves)) == pytest.approx(
            3 * c.upper, abs=tolerance(c)
        )
        # Permuting the tokens changes nothing.
        order = torch.as_tensor(rng.permutation(4))
        where = p.region if region == "ball" else ab.TokenBox(p.region.lower[order], p.region.upper[order])
        query = int((order == p.query).nonzero()[0])
        permuted = ab.HeadProblem(p.head, p.tokens[order], query, p.readout, where, moves)
        assert again(permuted) == pytest.approx(c.upper, abs=tolerance(c))
        # The key bias adds one number to every score.
        h = p.head
        biased = ab.AttentionHead(h.W_Q, h.W_K, h.W_V, h.W_O, h.b_Q, h.b_K + 5, h.b_V)
        assert again(ab.HeadProblem(biased, p.tokens, p.query, p.readout, p.region, moves)) == pytest.approx(
            c.upper, abs=tolerance(c)
        )
        # A mask that hides a key is the problem without it.
        hidden = next(j for j in range(4) if j != p.query)
        keep = torch.arange(4) != hidden
        where = p.region if region == "ball" else ab.TokenBox(p.region.lower[keep], p.region.upper[keep])
        shorter = ab.HeadProblem(p.head, p.tokens[keep], p.query - (hidden < p.query), p.readout, where, moves)
        masked = ab.HeadProblem(p.head, p.tokens, p.query, p.readout, p.region, moves, keys=keep)
        assert again(masked) == pytest.approx(again(shorter), abs=tolerance(c))


@pytest.mark.parametrize("method", [*LADDER, "exact"])
def test_rotating_the_token_space_changes_nothing(method, rng):
    moves = method != "exact"
    for _ in range(5):
        p = random_problem(rng, "ball", moves, n=3, d=4, radius=0.2)
        turn = torch.linalg.qr(torch.as_tensor(rng.standard_normal((4, 4))))[0]
        h = p.head
        head = ab.AttentionHead(h.W_Q @ turn.T, h.W_K @ turn.T, h.W_V @ turn.T, h.W_O, h.b_Q, h.b_K, h.b_V)
        c = ab.certify(p, method)
        rotated = ab.HeadProblem(head, p.tokens @ turn.T, p.query, p.readout, p.region, moves)
        assert ab.certify(rotated, method).upper == pytest.approx(c.upper, abs=tolerance(c))


@pytest.mark.parametrize("method", [*LADDER, "exact", "best"])
def test_many_at_once_are_the_same_as_one_by_one(method, rng):
    kinds = [k for k in KINDS if method != "exact" or not k[1]]
    problems = [random_problem(rng, *kinds[i % len(kinds)]) for i in range(16)]
    for problem, c in zip(problems, ab.certify_many(problems, method), strict=True):
        p = problem
        same = ab.HeadProblem(p.head, p.tokens, p.query, p.readout, p.region, p.query_moves, p.keys)
        fresh = ab.certify(same, method)
        assert c.problem is problem
        assert c.upper == pytest.approx(fresh.upper, abs=1e-10 * (1 + abs(c.upper)))


@pytest.mark.parametrize("method", [*LADDER, "exact", "best"])
def test_zero_radius_is_the_nominal_value(method, rng):
    for region in ("ball", "box"):
        p = random_problem(rng, region, True, radius=0.0)
        c = ab.certify(p, method)
        assert c.lower == pytest.approx(p.nominal, abs=1e-12) and c.upper == pytest.approx(p.nominal, abs=1e-9)
        assert c.relative_gap == 0.0 and c.is_exact


def test_flipped_is_the_minimum(rng):
    p = random_problem(rng, "ball", True, n=3, d=3, radius=0.1)
    low = -ab.certify(p.flipped()).upper
    assert low <= float(sample_values(p, rng).min())


def test_legal_corner_cases(rng):
    one = ab.AttentionHead(np.ones((1, 3)), np.ones((1, 3)), np.eye(3))
    z = np.ones((2, 3))
    for head, tokens, readout in [
        (one, z, [1.0, 0, 0]),  # equal scores, identical tokens, d_head = 1
        (one, z, [0.0, 0, 0]),  # zero readout
        (ab.AttentionHead(np.zeros((1, 3)), np.zeros((1, 3)), np.eye(3)), z, [1.0, 2, 3]),  # zero weights
        (
            ab.AttentionHead(np.full((1, 3), 500.0), np.eye(1, 3), np.eye(3)),
            np.array([[1.0, 0, 0], [-1, 0, 0]]),
            [1, 0, 0],
        ),
    ]:
        for region in (ab.TokenBall(0.1), ab.TokenBox.around(tokens, 0.1)):
            for moves in (True, False):
                p = ab.HeadProblem(head, tokens, 0, readout, region, moves)
                for method in methods_for(p):
                    c = ab.certify(p, method)
                    assert np.isfinite(c.upper) and c.upper >= float(sample_values(p, rng).max()), method


def test_identical_keys_weigh_twice(rng):
    """Two copies of a frozen key are one key with its score raised by log 2."""
    head = random_head(rng, 3, 2)
    z = rng.standard_normal((2, 3))
    q = torch.as_tensor(rng.standard_normal(3))
    c = ab.certify(ab.HeadProblem(head, z[[0, 1, 1]], q, np.ones(3), ab.TokenBall([0.1, 0.0, 0.0]), False), "exact")
    s = head.scores(torch.as_tensor(z), q)
    direction = head.W_O.T @ torch.ones(3, dtype=torch.float64)
    best = -np.inf
    for w in rng.standard_normal((4000, 3)):
        moved = torch.as_tensor(z[0] + 0.1 * np.linalg.norm(z[0]) * w / np.linalg.norm(w))
        scores = torch.stack([head.scores(moved[None], q)[0], s[1] + np.log(2)])
        values = (torch.stack([moved, torch.as_tensor(z[1])]) @ head.W_V.T + head.b_V) @ direction
        best = max(best, float((torch.softmax(scores, -1) * values).sum()))
    assert best <= c.upper and best == pytest.approx(c.upper, abs=1e-2 * c.movement)


def test_unknown_methods_and_options_are_named(rng):
    p = random_problem(rng, "ball", True)
    with pytest.raises(ab.errors.ArgumentError, match=r"method: expected one of exact, .*, got 'exac'"):
        ab.certify(p, "exac")
    with pytest.raises(ab.errors.ArgumentError, match=r"does not take wings; it has no options"):
        ab.certify(p, "vertex", wings=2)
    with pytest.raises(ab.errors.MethodNotApplicableError, match=r"query_moves=False.*'lagrangian'"):
        ab.certify(random_problem(rng, "ball", True, radius=0.1), "exact")
    with pytest.raises(ab.errors.MethodNotApplicableError, match="use method='exact'"):
        ab.certify(random_problem(rng, "lists", True), "vertex")
