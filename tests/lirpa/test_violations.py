"""A few groups of the violation hunt, and that the hunt finds a bound that is too narrow."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from attn_bounds_lirpa.compat import IS_03

pytestmark = [pytest.mark.lirpa, pytest.mark.skipif(IS_03, reason="weights as inputs need auto_LiRPA 0.7")]


@pytest.fixture
def hunt(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "comparisons"))
    return importlib.import_module("lirpa_violations")


@pytest.mark.parametrize("number", [0, 1, 3, 7])
def test_no_attained_value_lies_outside(hunt, number):
    for name, excess in hunt.check(hunt.random_group(5, number), optimise=False):
        assert (excess <= hunt.TOLERANCE).all(), name


def test_a_bound_that_is_too_narrow_is_found(hunt, monkeypatch):
    bounds = hunt.bounds

    def narrow(*args):
        lower, upper = bounds(*args)
        return lower, lower + 0.3 * (upper - lower)

    monkeypatch.setattr(hunt, "bounds", narrow)
    assert any((excess > hunt.TOLERANCE).any() for _, excess in hunt.check(hunt.random_group(5, 0), optimise=False))
