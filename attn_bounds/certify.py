"""The one door: certify(problem, method) and certify_many(problems, method)."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ._arrays import checked_device
from ._options import check_options
from .bounds.first_order import first_order
from .bounds.interval import interval
from .bounds.lagrangian import lagrangian
from .bounds.moment import moment
from .bounds.result import BatchBound
from .bounds.vertex import vertex
from .certificate import EXACT_GAP, Certificate, seal_of
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
    "lagrangian": lagrangian,
    "moment2": partial(moment, order=2),
    "moment3": partial(moment, order=3),
}
METHODS = (*BOUNDS, "best")
CLOSED_FORM = ("interval", "first-order", "vertex")  # they never fail, and nothing cheaper is tighter
BEST_OPTIONS = "lagrangian"  # whose options those given to `best` are
# What `best` tries after `vertex`, cheapest first, while a gap is left.
LADDER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("lagrangian", {}),
    ("lagrangian", {"max_pieces": 64}),
    ("moment3", {}),
)
MOMENT_KEYS = 32  # `best` leaves the moment relaxations out where there are more keys: seconds a problem
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
    if not isinstance(problem, HeadProblem):
        raise ArgumentError(f"problem: expected a HeadProblem, got {type(problem).__name__}")
    return certify_many([problem], method, **options)[0]


def certify_many(
    problems: Sequence[HeadProblem], method: str = "best", device: Any = None, progress: bool = False, **options: Any
) -> list[Certificate]:
    """Certify many problems, batched over those alike in shape (much faster than one by one); order is kept.

    Args: device to compute on (None: where each head lives); progress shows a bar; options go to the method.
    """
    if method not in METHODS:
        raise ArgumentError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    try:
        problems = list(problems)
    except TypeError:
        raise ArgumentError(f"problems: expected a list of HeadProblem, got {type(problems).__name__}") from None
    for i, problem in enumerate(problems):
        if not isinstance(problem, HeadProblem):
            raise ArgumentError(f"problems[{i}]: expected a HeadProblem, got {type(problem).__name__}")
    check_options(method, BOUNDS[BEST_OPTIONS if method == "best" else method], options)
    if device is not None:
        where = checked_device(device)
        problems = [problem.to(where) for problem in problems]
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


def certificates(
    problems: Sequence[HeadProblem],
    method: str,
    uppers: Sequence[float],
    seconds: Sequence[float],
    reasons: Sequence[str | None] | None = None,
) -> list[Certificate]:
    """Put upper bounds that come from elsewhere (a verifier's; infinity: none) beside the best attained values.

    A problem without an attained value is searched first. A bound that an attained value refutes is thrown away, and
    `reason` says so.
    """
    _search_where_missing(problems)
    out = []
    for i, problem in enumerate(problems):
        values = problem.tokens[problem.key_order] @ problem.head.value_direction(problem.readout)[0]
        upper = torch.tensor([uppers[i]], dtype=torch.float64)
        bound = BatchBound(upper, torch.zeros(1), {}, None, [reasons[i]] if reasons else None)
        rung = _Rung(method, bound, [i])
        out.append(_assemble(problem, [rung], i, seconds[i], float(values.max() - values.min())))
    return out


def _search_where_missing(problems: Sequence[HeadProblem], starts: int = 4) -> None:
    groups: dict[tuple, list[HeadProblem]] = {}
    for problem in problems:
        if problem.found is None:
            groups.setdefault(group_key(problem), []).append(problem)
    for members in groups.values():
        for start in range(0, len(members), CHUNK):
            chunk = members[start : start + CHUNK]
            _note(chunk, range(len(chunk)), ascend(reduce(chunk), starts)[:2])


def search_many(problems: Sequence[HeadProblem], starts: int = 8) -> list[Certificate]:
    """Search many problems, batched: certificates with an attained value and no upper bound."""
    started = time.perf_counter()
    for problem in problems:
        problem.found = None
    _search_where_missing(problems, starts)
    each = (time.perf_counter() - started) / max(len(problems), 1)
    count = len(problems)
    reasons = ["search attains values and proves no bound"] * count
    return certificates(problems, "search", [math.inf] * count, [each] * count, reasons)


@dataclasses.dataclass
class _Rung:
    """A bound of some of the problems of a batch: row r of `bound` is problem rows[r]."""

    method: str
    bound: BatchBound
    rows: list[int]


def _certify_alike(problems: list[HeadProblem], method: str, options: dict[str, Any]) -> list[Certificate]:
    if isinstance(problems[0].placed, Lists):
        return [_certify_lists(problem) for problem in problems]
    started = time.perf_counter()
    reduced = reduce(problems)
    rungs = _ladder(problems, reduced, options) if method == "best" else _rungs(problems, reduced, method, options)
    if not any(rung.bound.point is not None for rung in rungs) and any(p.found is None for p in problems):
        _note(problems, range(len(problems)), ascend(reduced, starts=4)[:2])
    seconds = (time.perf_counter() - started) / len(problems)
    spread = (reduced.v0.amax(1) - reduced.v0.amin(1)).tolist()
    return [_assemble(problem, rungs, i, seconds, spread[i]) for i, problem in enumerate(problems)]


def _rungs(problems: list[HeadProblem], reduced: Reduced, method: str, options: dict[str, Any]) -> list[_Rung]:
    """One method, and beside the ones that may come out loose or fail the cheap bound that never does."""
    rungs = _rung(problems, reduced, range(len(problems)), method, options)
    if method not in CLOSED_FORM:
        rungs += _rung(problems, reduced, range(len(problems)), "vertex", {})
    return rungs


def _ladder(problems: list[HeadProblem], reduced: Reduced, options: dict[str, Any]) -> list[_Rung]:
    """Cheapest first; each further rung only for the problems that are not exact yet."""
    everything = list(range(len(problems)))
    if reduced.query_fixed:
        return _rungs(problems, reduced, "exact", {})
    rungs = _rung(problems, reduced, everything, "vertex", {})
    for method, more in LADDER:
        todo = _open(problems, reduced, rungs)
        if not todo or (method == "moment3" and reduced.n > MOMENT_KEYS):
            break
        given = more | options if method == "lagrangian" else more
        rungs += _rung(problems, reduced[torch.tensor(todo)], todo, method, given)
    return rungs


def _rung(
    problems: list[HeadProblem], reduced: Reduced, rows: Sequence[int], method: str, options: dict[str, Any]
) -> list[_Rung]:
    """The bound of a method; where linear algebra breaks down on a batch (numbers near 1e300), problem by problem."""
    try:
        bound = BOUNDS[method](reduced, **options)
    except (torch.linalg.LinAlgError, np.linalg.LinAlgError) as error:
        if len(rows) > 1:
            return [
                rung
                for r, i in enumerate(rows)
                for rung in _rung(problems, reduced[torch.tensor([r])], [i], method, options)
            ]
        none = torch.full((1,), math.inf, dtype=torch.float64)
        bound = BatchBound(none, torch.zeros(1), {}, None, [f"{method}: {str(error).splitlines()[0]}"])
    if bound.point is not None:
        _note(problems, rows, bound.point)
    return [_Rung(method, bound, list(rows))]


def _note(problems: list[HeadProblem], rows: Sequence[int], point: tuple[torch.Tensor, torch.Tensor]) -> None:
    for r, i in enumerate(rows):
        problems[i].note(attained(problems[i], point[0][r], point[1][r]))


def _open(problems: list[HeadProblem], reduced: Reduced, rungs: list[_Rung]) -> list[int]:
    """The problems whose gap is not closed yet."""
    least = torch.full((len(problems),), math.inf, dtype=torch.float64)
    for rung in rungs:
        upper = torch.nan_to_num(rung.bound.upper.cpu(), nan=math.inf)
        least[rung.rows] = torch.minimum(least[rung.rows], upper)
    return [
        i
        for i, problem in enumerate(problems)
        if problem.found is None or least[i] - problem.found.value > EXACT_GAP * (problem.found.value - problem.nominal)
    ]


def _assemble(problem: HeadProblem, rungs: list[_Rung], index: int, seconds: float, spread: float) -> Certificate:
    """Choose the least sound bound and put it beside the best attained value."""
    found = problem.found
    assert found is not None  # every path to here has searched
    best: tuple[float, str, dict[str, Any]] | None = None
    reasons = []
    for rung in rungs:
        if index not in rung.rows:
            continue
        row = rung.rows.index(index)
        upper = float(rung.bound.upper[row])
        if not math.isfinite(upper):
            reasons.append(rung.bound.reason_of(row) or f"{rung.method} gave no finite bound")
        elif upper < found.value:
            # Soundness first: a bound that an attained value refutes is not a bound.
            message = f"{rung.method} fell below an attained value by {found.value - upper:.3g}; it is thrown away"
            warnings.warn(message, UnsoundBoundWarning, stacklevel=4)
            reasons.append(message)
        elif best is None or upper < best[0]:
            best = upper, rung.method, rung.bound.witness_of(row)
    upper, name, witness = best or (math.inf, rungs[0].method, {})
    return _sealed(problem, found, name, upper, seconds, spread, witness, None if best else "; ".join(reasons))


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


def _certify_lists(problem: HeadProblem) -> Certificate:
    started = time.perf_counter()
    answer = exact_lists(problem)
    value = float(problem.value(answer.tokens, answer.query))
    used = torch.cat([c for j, c in enumerate(problem.placed.candidates) if j in problem.key_order])  # type: ignore[union-attr]
    values = used @ problem.head.value_direction(problem.readout)[0]
    found = SearchResult(value, answer.tokens, answer.query)
    witness = {"t": answer.upper, "inflation": answer.inflation}
    seconds = time.perf_counter() - started
    known = math.isfinite(answer.upper)
    reason = None if known else "exact: the scalar equation was not solved to rounding"
    spread = float(values.max() - values.min())
    return _sealed(problem, found, "exact", answer.upper, seconds, spread, witness if known else {}, reason)
