"""Search: attained, deterministic, good; and the known values on real heads."""

import numpy as np
import pytest

import attn_bounds as ab
from tests.conftest import random_problem


def test_the_value_is_attained_and_a_seed_repeats_it(rng):
    for region in ("ball", "box", "lists"):
        p = random_problem(rng, region, True, n=4, d=4)
        first, second = ab.search(p, seed=3), ab.search(p, seed=3)
        assert first.value == second.value and bool((first.tokens == second.tokens).all())
        assert p.contains(first.tokens) and float(p.value(first.tokens)) == first.value


def test_the_exact_value_is_reached_where_it_is_known(rng):
    for _ in range(20):
        p = random_problem(rng, "ball", False, radius=0.1)
        c = ab.certify(p, "exact")
        assert ab.search(p).value >= c.lower - 1e-7 * (c.movement + 1e-9)


def test_starts_must_be_positive(rng):
    with pytest.raises(ab.errors.ArgumentError, match="starts: expected a whole number of at least 1, got 0"):
        ab.search(random_problem(rng, "ball"), starts=0)


def test_known_values_on_real_heads(cases, minilm):
    problems, units = [], cases["units"]
    for unit in units:
        problems.append(minilm.problem(
            cases["text"], unit["layer"], unit["head"], cases["query"], unit["radius"], readout=unit["readout_seed"],
            tokens=cases["tokens"],
        ))  # fmt: skip
    assert len(units) == 288
    found = ab.certify_many(problems, "vertex")
    for unit, problem, c in zip(units, problems, found, strict=True):
        movement = unit["attained"] - unit["nominal"]
        assert problem.nominal == pytest.approx(unit["nominal"], abs=1e-12)
        assert ab.search(problem, starts=2).value >= unit["attained"] - 1e-9 * movement
        assert c.upper >= unit["attained"]
    for method in ("interval", "first-order", "best"):
        uppers = np.array([c.upper for c in ab.certify_many(problems, method)])
        assert (uppers >= np.array([unit["attained"] for unit in units])).all(), method
