"""The decision: a certificate is intact, its value attained, its bound proved."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flint import arb

from ..certificate import Certificate, seal_of
from ..errors import MethodNotApplicableError
from ..regions import Lists
from .exact import key_terms, list_scores_and_values, list_terms
from .facts import Facts, is_inside, output_at, set_precision
from .lagrangian import prove
from .moment import prove as prove_moment
from .ranges import ProvedRanges, price_sum, vertex_sum


@dataclass(frozen=True)
class AuditReport:
    """Whether the certificate was re-proved, and if not why."""

    passed: bool
    reason: str | None = None


def audit(certificate: Certificate) -> AuditReport:
    """Prove that `lower` is attained at `maximizer`, inside the region, and that `upper` bounds f on the region.

    The seal notices a certificate whose fields were altered; the proof itself relies on none of the code that found
    the bound. Raises: MethodNotApplicableError for a method without a proof.
    """
    c = certificate
    if seal_of(c) != c.seal:
        return AuditReport(False, "a field was altered since the certificate was made")
    if not math.isfinite(c.upper):
        return AuditReport(False, c.reason or "there is no bound to prove")
    set_precision()
    try:
        return AuditReport(*_proved(c))
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        # A witness of the wrong form proves nothing; what it broke says where.
        return AuditReport(False, f"witness: malformed ({type(error).__name__}: {error})")


def _proved(c: Certificate) -> tuple[bool, str | None]:
    shape = tuple(c.maximizer.shape)
    if shape != tuple(c.problem.tokens.shape):
        return False, f"maximizer: expected {tuple(c.problem.tokens.shape)}, got {shape}"
    if not is_inside(c.problem, c.maximizer, c.maximizer_query):
        return False, "maximizer: lies outside the region"
    scores, values = _scores_and_values(c)
    size = max(abs(v).upper() for v in values)
    # The float64 figures may differ from the values by their rounding, and by nothing the certificate says itself.
    slack = arb(2.0**-46) * size * (1 + max(abs(s).upper() for s in scores))
    if not abs(output_at(c.problem, c.maximizer, c.maximizer_query) - arb(c.lower)) <= slack:
        return False, "lower: is not the value at maximizer"
    if not abs(output_at(c.problem, c.problem.tokens, None) - arb(c.nominal)) <= slack:
        return False, "nominal: is not the value at the tokens"
    spread = max(values, key=float) - min(values, key=float)
    if not abs(spread - arb(c.spread)) <= slack:
        return False, "spread: is not that of the values"
    if not c.lower <= c.upper:
        return False, "upper: lies below lower"
    if not _is_bound(c):
        return False, f"upper: {c.method} could not be re-proved in ball arithmetic"
    return True, None


def _scores_and_values(c: Certificate) -> tuple[list[arb], list[arb]]:
    """At the centre of the region; over lists, the scores and values of all candidates."""
    if isinstance(c.problem.placed, Lists):
        return list_scores_and_values(c.problem)
    facts = Facts(c.problem)
    return facts.s0, facts.v0


def _is_bound(c: Certificate) -> bool:
    t = arb(c.upper)
    if isinstance(c.problem.placed, Lists):
        return all(total <= 0 for total in list_terms(c.problem, t))
    facts = Facts(c.problem)
    if c.method == "exact":
        return bool(sum(key_terms(facts, t), arb(0)) <= 0)
    if c.method == "vertex":
        return bool(vertex_sum(ProvedRanges(facts), t) <= 0)
    if c.method in ("interval", "first-order"):
        return bool(price_sum(ProvedRanges(facts), arb(float(c.witness["t"]))) <= t)
    if c.method in ("lagrangian", "moment2", "moment3"):
        own = prove if c.method == "lagrangian" else prove_moment
        # A bound is a bound whatever proves it: one key, say, leaves the multipliers nothing to be positive about.
        return bool(own(c.problem, c.witness, c.upper) <= t) or bool(vertex_sum(ProvedRanges(facts), t) <= 0)
    raise MethodNotApplicableError(f"method: no proof in ball arithmetic for {c.method!r}")
