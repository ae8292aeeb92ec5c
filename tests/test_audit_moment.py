"""Moment bounds re-proved in ball arithmetic: every one passes, nothing below it does."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from attn_bounds.audit import audit
from attn_bounds.audit.facts import set_precision
from attn_bounds.audit.moment import concave_maximum, prove
from attn_bounds.bounds.moment import moment
from attn_bounds.certificate import seal_of
from attn_bounds.certify import certify
from attn_bounds.reduced import reduce
from attn_bounds.search import search
from comparisons.violations import random_problem
from tests.moment_cases import small_problem


@pytest.fixture(autouse=True)
def precision() -> None:
    set_precision()


def check_random(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    proved = 0
    for _ in range(count):
        kind = {name: bool(rng.integers(2)) for name in ("outside", "moves", "masked", "own", "box")}
        kind |= {"n": int(rng.integers(1, 5)), "d": int(rng.integers(1, 6)), "h": int(rng.integers(1, 4))}
        kind["masked"] &= kind["n"] > 1
        problem = random_problem(rng, kind)
        for order in (2, 3):
            bound = moment(reduce([problem]), order)
            if torch.isfinite(bound.upper).all():
                upper = float(bound.upper[0])
                assert prove(problem, bound.witness_of(0), upper) <= upper, (kind, order)
                proved += 1
    assert proved > count


def test_random_heads_are_proved() -> None:
    check_random(0, 12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_random_heads_are_proved(seed: int) -> None:
    check_random(seed, 100)


@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize("moves", [False, True])
def test_the_proof_is_no_looser_than_rounding_and_refuses_less(box: bool, moves: bool) -> None:
    problem = small_problem(1, 0.05, box=box, query_moves=moves)
    for order in (2, 3):
        bound = moment(reduce([problem]), order)
        upper, inflation, witness = float(bound.upper[0]), float(bound.inflation[0]), bound.witness_of(0)
        proved = prove(problem, witness, upper)
        assert proved <= upper
        assert proved > upper - 3 * inflation  # the margin is the inflation, no more


@pytest.mark.parametrize("name", ["t", "norm_k", "square", "ball_k", "ball_q", "exp", "secant", "x"])
def test_a_tampered_witness_proves_no_less_than_the_truth(name: str) -> None:
    """Any multipliers prove a bound: altered ones a larger one, never one below what is attained."""
    problem = small_problem(2, 0.05)
    bound = moment(reduce([problem]), 2)
    witness = bound.witness_of(0)
    moved = witness[name] - 0.01 * (1 + witness[name].abs())
    proved = prove(problem, witness | {name: moved}, float(bound.upper[0]))
    assert proved > search(problem).value
    assert not proved <= float(bound.upper[0]) - 3 * float(bound.inflation[0])


def test_concave_maximum_encloses_the_true_one() -> None:
    from flint import arb, arb_mat

    rng = np.random.default_rng(0)
    A = rng.standard_normal((6, 6))
    A, g = A @ A.T + 0.1 * np.eye(6), rng.standard_normal(6)
    true = float(g @ np.linalg.solve(A, g) / 4)
    top = concave_maximum(arb_mat(A.tolist()), [arb(x) for x in g])
    assert math.isclose(float(top), true, rel_tol=1e-12)
    assert not concave_maximum(arb_mat((A - 10 * np.eye(6)).tolist()), [arb(x) for x in g]).is_finite()


@pytest.mark.parametrize("method", ["moment2", "moment3"])
def test_a_certificate_verifies_and_a_lowered_one_does_not(method: str) -> None:
    certificate = certify(small_problem(1, 0.05), method)
    assert certificate.method == method and certificate.verify()
    lowered = dataclasses.replace(certificate, upper=certificate.upper - 3 * certificate.inflation)
    assert not lowered.verify()  # the seal
    assert not audit(dataclasses.replace(lowered, seal=seal_of(lowered))).passed  # and the proof
