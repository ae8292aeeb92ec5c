"""The audit: passes what is true, fails what was altered or is false."""

import dataclasses

import numpy as np
import pytest
import torch

import attn_bounds as ab
from attn_bounds.audit import audit
from attn_bounds.certificate import seal_of
from tests.conftest import KINDS, kind_name, random_problem

METHODS = ["exact", "interval", "first-order", "vertex"]
ALL = [*METHODS, "lagrangian", "moment2", "moment3"]


def certificates(rng, kind, count=6):
    for _ in range(count):
        problem = random_problem(rng, *kind, sharp=10 ** rng.uniform(-1, 0.7))
        for method in METHODS:
            if method != "exact" or problem.query_is_fixed:
                yield ab.certify(problem, method)


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_true_certificates_pass(kind, rng):
    for c in certificates(rng, kind):
        assert audit(c).passed, (c.method, audit(c).reason)


@pytest.mark.parametrize("kind", KINDS[::3], ids=kind_name)
def test_a_false_bound_fails_even_with_a_fresh_seal(kind, rng):
    """The proof does not lean on the seal: a bound below the attained value, or without its margin, is refused."""
    for c in certificates(rng, kind):
        if c.movement <= 1e-9:
            continue
        false = dataclasses.replace(c, upper=c.lower - 1e-3 * c.movement)
        assert not audit(dataclasses.replace(false, seal=seal_of(false))).passed
        if c.method == "exact":
            lower = c.nominal + 0.5 * c.movement
            moved = dataclasses.replace(c, upper=lower, lower=c.nominal, maximizer=c.problem.tokens)
            report = audit(dataclasses.replace(moved, seal=seal_of(moved)))
            assert not report.passed and "re-proved" in report.reason


def altered(value):
    if isinstance(value, (list, tuple)):
        return [altered(item) for item in value]
    if isinstance(value, dict):
        return {name: altered(item) for name, item in value.items()}
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "?"
    if isinstance(value, torch.Tensor):
        return value + 1
    if isinstance(value, bool):
        return not value
    return value + 1e-9 if isinstance(value, float) else value


@pytest.mark.parametrize("method", ALL)
def test_an_altered_field_fails(method, rng):
    c = ab.certify(random_problem(rng, "ball", method != "exact", n=3, d=3, radius=0.003), method)
    assert c.method == method and c.verify()
    for name in ("lower", "upper", "nominal", "maximizer", "spread"):
        assert not dataclasses.replace(c, **{name: altered(getattr(c, name))}).verify(), name
    assert c.witness
    for name, value in c.witness.items():
        assert not dataclasses.replace(c, witness=c.witness | {name: altered(value)}).verify(), name


def test_no_bound_does_not_pass(rng):
    c = ab.certify(random_problem(rng, "ball", True, n=3, d=3), "vertex")
    none = dataclasses.replace(c, upper=np.inf, reason="the solver failed")
    report = audit(dataclasses.replace(none, seal=seal_of(none)))
    assert not report.passed and report.reason == "the solver failed"


def test_real_heads(minilm):
    for moves, method in [(False, "exact"), (True, "first-order")]:
        problems = [
            minilm.problem("One head of each layer", layer, layer, 2, 0.01, query_moves=moves) for layer in (0, 5)
        ]
        assert all(c.verify() for c in ab.certify_many(problems, method))
