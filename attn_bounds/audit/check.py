"""The decision: a certificate is intact, its value attained, its bound proved."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flint import arb

from ..certificate import Certificate, seal_of
from ..errors import MethodNotApplicableError
from ..regions import Lists
from .exact import key_terms, list_terms
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
    if not is_inside(c.problem, c.maximizer, c.maximizer_query):
        return AuditReport(False, "maximizer: lies outside the region")
    # `lower` is a float64 evaluation: it may differ from the value by its rounding, which `inflation` covers.
    slack = arb(max(c.inflation, 1e-12 * (abs(c.lower) + c.spread)))
    if not abs(output_at(c.problem, c.maximizer, c.maximizer_query) - arb(c.lower)) <= slack:
        return AuditReport(False, "lower: is not the value at maximizer")
    if not c.lower <= c.upper:
        return AuditReport(False, "upper: lies below lower")
    if not _is_bound(c):
        return AuditReport(False, f"upper: {c.method} could not be re-proved in ball arithmetic")
    return AuditReport(True)


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
    if c.method == "lagrangian":
        return bool(prove(c.problem, c.witness, c.upper) <= t)
    if c.method in ("moment2", "moment3"):
        return bool(prove_moment(c.problem, c.witness, c.upper) <= t)
    raise MethodNotApplicableError(f"method: no proof in ball arithmetic for {c.method!r}")
