"""The one door: certify(problem, method) and certify_many(problems, method)."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm import tqdm

from .bounds.first_order import first_order
from .bounds.interval import interval
from .bounds.result import BatchBound
from .bounds.vertex import vertex
from .certificate import Certificate, seal_of
from .errors import ArgumentError, MethodNotApplicableError
from .exact import EXACT_NEEDS, exact, exact_lists
from .problem import HeadProblem
from .reduced import Reduced, group_key, reduce
from .regions import Lists
from .search import SearchResult, ascend, attained

# Every bound reads the reduced problem and answers a BatchBound.
BOUNDS: dict[str, Callable[..., BatchBound]] = {
    "exact": exact,
    "interval": interval,
    "first-order": first_order,
    "vertex": vertex,
}
METHODS = (*BOUNDS, "best")
CHUNK = 96  # problems a batch; more only costs memory


class UnsoundBoundWarning(RuntimeWarning):
    """A bound fell below an attained value: it is thrown away, and a report of the problem is welcome."""


def why_not(problem: HeadProblem, method: str) -> str | None:
    """Why `method` does not apply to `problem`, and which would; None where it does."""
    if isinstance(problem.placed, Lists):
        if method not in ("exact", "best"):
            return f"method: {method!r} bounds balls and boxes; for TokenSubstitutions use method='exact'"
    elif method == "exact" and not problem.query_is_fixed:
        return EXACT_NEEDS
    return None


def certify(problem: HeadProblem, method: str = "best", **options: Any) -> Certificate:
    """Bound max f over the region from both sides.

    Args: method one of METHODS ("best" runs the ladder, cheapest first, and stops when exact); options go to it.
    Raises: ArgumentError for an unknown method, MethodNotApplicableError where it does not apply.
    """
    return certify_many([problem], method, **options)[0]


def certify_many(
    problems: Sequence[HeadProblem], method: str = "best", device: Any = None, progress: bool = False, **options: Any
) -> list[Certificate]:
    """Certify many problems, batched over those alike in shape (much faster than one by one); order is kept.

    Args: device to compute on (None: where each head lives); progress shows a bar; options go to the method.
    """
    if method not in METHODS:
        raise ArgumentError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if device is not None:
        problems = [problem.to(device) for problem in problems]
    for problem in problems:
        if (reason := why_not(problem, method)) is not None:
            raise MethodNotApplicableError(reason)
    groups: dict[tuple, list[int]] = {}
    for index, problem in enumerate(problems):
        groups.setdefault(group_key(problem), []).append(index)
    answers: dict[int, Certificate] = {}
    with tqdm(total=len(problems), disable=not progress, unit="unit", desc=method) as bar:
        for members in groups.values():
            for start in range(0, len(members), CHUNK):
                chunk = members[start : start + CHUNK]
                found = _certify_alike([problems[i] for i in chunk], method, options)
                answers.update(zip(chunk, found, strict=True))
                bar.update(len(chunk))
    return [answers[i] for i in range(len(problems))]


def _certify_alike(problems: list[HeadProblem], method: str, options: dict[str, Any]) -> list[Certificate]:
    if isinstance(problems[0].placed, Lists):
        return [_certify_lists(problem, method, options) for problem in problems]
    started = time.perf_counter()
    reduced = reduce(problems)
    if method == "best":
        bounds = _ladder(reduced, options)
    else:
        bounds = [(method, _run(method, reduced, options))]
    point = next((bound.point for _, bound in bounds if bound.point is not None), None)
    if point is None and any(problem.found is None for problem in problems):
        point = ascend(reduced, starts=4)[:2]
    if point is not None:
        for i, problem in enumerate(problems):
            problem.note(attained(problem, point[0][i], point[1][i]))
    seconds = (time.perf_counter() - started) / len(problems)
    spread = (reduced.v0.amax(1) - reduced.v0.amin(1)).tolist()
    return [
        _assemble(problem, problem.found, bounds, i, seconds, spread[i])  # type: ignore[arg-type]
        for i, problem in enumerate(problems)
    ]


def _run(method: str, reduced: Reduced, options: dict[str, Any]) -> BatchBound:
    try:
        return BOUNDS[method](reduced, **options)
    except TypeError as error:
        if options and "unexpected keyword" in str(error):
            raise ArgumentError(f"options: {method!r} does not take {', '.join(options)}") from None
        raise


def _ladder(reduced: Reduced, options: dict[str, Any]) -> list[tuple[str, BatchBound]]:
    """The bounds that `best` chooses from, cheapest first."""
    if reduced.query_fixed:
        return [("exact", _run("exact", reduced, options)), ("vertex", vertex(reduced))]
    return [("vertex", vertex(reduced))]


def _assemble(
    problem: HeadProblem,
    found: SearchResult,
    bounds: list[tuple[str, BatchBound]],
    index: int,
    seconds: float,
    spread: float,
) -> Certificate:
    """Choose the least sound bound and put it beside the attained value."""
    best: tuple[float, str, BatchBound] | None = None
    reasons = []
    for name, bound in bounds:
        upper = float(bound.upper[index])
        if not math.isfinite(upper):
            reasons.append(bound.reason_of(index) or f"{name} gave no finite bound")
        elif upper < found.value:
            # Soundness first: a bound that an attained value refutes is not a bound.
            message = f"{name} fell below an attained value by {found.value - upper:.3g}; no bound is reported"
            warnings.warn(message, UnsoundBoundWarning, stacklevel=4)
            reasons.append(message)
        elif best is None or upper < best[0]:
            best = upper, name, bound
    if best is None:
        upper, name, witness = math.inf, bounds[0][0], {}
    else:
        upper, name, witness = best[0], best[1], best[2].witness_of(index)
    return _sealed(
        problem, found, name, upper, seconds, spread, witness, None if best else "; ".join(reasons)
    )


def _sealed(
    problem: HeadProblem,
    found: SearchResult,
    method: str,
    upper: float,
    seconds: float,
    spread: float,
    witness: dict[str, Any],
    reason: str | None,
) -> Certificate:
    certificate = Certificate(
        problem=problem,
        method=method,
        lower=found.value,
        upper=upper,
        nominal=problem.nominal,
        maximizer=found.tokens,
        maximizer_query=found.query,
        seconds=seconds,
        spread=spread,
        witness=witness,
        reason=reason,
    )
    return dataclasses.replace(certificate, seal=seal_of(certificate))


def _certify_lists(problem: HeadProblem, method: str, options: dict[str, Any]) -> Certificate:
    if options:
        raise ArgumentError(f"options: 'exact' does not take {', '.join(options)}")
    started = time.perf_counter()
    answer = exact_lists(problem)
    value = float(problem.value(answer.tokens, answer.query))
    used = torch.cat([c for j, c in enumerate(problem.placed.candidates) if j in problem.key_order])  # type: ignore[union-attr]
    values = used @ problem.head.value_direction(problem.readout)[0]
    found = SearchResult(value, answer.tokens, answer.query)
    witness = {"t": answer.upper, "inflation": answer.inflation}
    seconds = time.perf_counter() - started
    return _sealed(problem, found, "exact", answer.upper, seconds, float(values.max() - values.min()), witness, None)
