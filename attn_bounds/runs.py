"""Runs of heads: many units, several methods, one row each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import pandas as pd

from .bounds.slack import secant_slack
from .certificate import Certificate
from .certify import METHODS, certify_many, search_many, why_not
from .errors import ArgumentError, MissingDependencyError
from .models import LoadedModel, load_model
from .problem import HeadProblem
from .tables import Row

CHUNK = 96  # units a batch
COLUMNS = [
    "model", "prompt", "layer", "head", "query", "query_moves", "region", "radius", "readout", "method", "nominal",
    "lower", "upper", "relative_gap", "is_exact", "given_by", "seconds", "reason", "gap_over_slack",
]  # fmt: skip


@dataclass(frozen=True)
class Unit:
    """One problem of a run; `prompt` is its number."""

    prompt: int
    layer: int
    head: int
    query: int
    query_moves: bool
    region: str
    radius: float
    readout: int


# A method answers a list of problems; `certify_many` is the one every method of the library goes through.
Runner = Callable[[Sequence[HeadProblem]], list[Certificate]]

PLUGIN = "attn_bounds_lirpa.heads"  # gives the runners of a verifier's methods
VERIFIER_METHODS = ("ibp", "crown", "alpha-crown")  # and their variants: crown:stock, ...
SLACK_METHODS = ("moment2", "moment3")  # whose gap is put beside the value-weighted secant slack
RUN_METHODS = ("search", *METHODS, *VERIFIER_METHODS)


def runner(method: str, **options: Any) -> Runner:
    """The runner of a method: the library's, `search`, or a verifier's, which a plug-in gives.

    Raises: ArgumentError for an unknown method, MissingDependencyError where the plug-in or its verifier is absent.
    """
    name = method.partition(":")[0]
    if name in VERIFIER_METHODS:
        try:
            plugin = import_module(PLUGIN)
        except ImportError as error:
            raise MissingDependencyError(
                f"method: {method!r} needs auto_LiRPA and the plug-in {PLUGIN.split('.')[0]}, see README ({error})"
            ) from None
        return plugin.runner(method, **options)
    if method == "search":
        return search_many
    if method not in METHODS:
        raise ArgumentError(f"methods: expected some of {', '.join(RUN_METHODS)}, got {method!r}")
    return lambda problems: certify_many(problems, method, **options)


@lru_cache(maxsize=1)
def shared_model(name: str, dtype: str = "float64", device: str | None = None) -> LoadedModel:
    """The model of a run, loaded once in a process."""
    return load_model(name, dtype, device)


@dataclass(frozen=True)
class HeadsJob:
    """Every method on each unit of a chunk."""

    model: str
    prompts: tuple[Any, ...]  # texts, image files or tuples of token ids
    methods: tuple[str, ...]
    tokens: int | None = None  # keep the prompt's first ones
    device: str | None = None
    dtype: str = "float64"

    @property
    def chunk(self) -> int:
        """Units a chunk."""
        return CHUNK

    @property
    def per_unit(self) -> int:
        """Rows a unit."""
        return len(self.methods)

    def __call__(self, units: Sequence[Unit]) -> list[Row]:
        """The rows of a chunk: every method on the same problems, beside the best value that any of them attained."""
        model = shared_model(self.model, self.dtype, self.device)
        problems = [
            model.problem(
                self.prompts[u.prompt],
                u.layer,
                u.head,
                u.query,
                u.radius,
                u.region,
                u.readout,
                u.query_moves,
                self.tokens,
            )
            for u in units
        ]
        # `search` goes first, whatever the order asked for: its time must not be another method's.
        order = sorted(self.methods, key=lambda name: name != "search")
        answers = {name: _answers(problems, name, runner(name)) for name in order}
        return [row for name in self.methods for row in _rows(model.name, units, problems, name, answers[name])]


def _rows(
    model: str,
    units: Sequence[Unit],
    problems: Sequence[HeadProblem],
    name: str,
    answers: Sequence[Certificate | str],
) -> Iterator[Row]:
    for unit, problem, answer in zip(units, problems, answers, strict=True):
        row: Row = {"model": model, **asdict(unit), "method": name}
        if isinstance(answer, Certificate):
            best = beside_best(answer, problem)
            row |= best.to_dict() | {"method": name, "given_by": answer.method}
            if name in SLACK_METHODS and row["upper"] is not None:
                slack = secant_slack(problem, best.lower)
                row["gap_over_slack"] = best.gap / slack if slack > 0 else None
        else:
            row |= {"nominal": problem.nominal, "reason": answer}
        yield row


def beside_best(certificate: Certificate, problem: HeadProblem) -> Certificate:
    """The certificate with the best value that any method attained, so that all gaps have one foot."""
    found = problem.found
    if found is None or found.value <= certificate.lower:
        return certificate
    if certificate.upper < found.value:
        below = found.value - certificate.upper
        reason = f"{certificate.method} fell below an attained value by {below:.3g}; it is thrown away"
        return replace(certificate, lower=found.value, upper=math.inf, reason=reason)
    return replace(certificate, lower=found.value)


def _answers(problems: Sequence[HeadProblem], name: str, run: Runner) -> list[Certificate | str]:
    """The certificates, or where the method does not apply why."""
    answers: list[Certificate | str] = [why_not(problem, name) or "" for problem in problems]
    fit = [i for i, reason in enumerate(answers) if not reason]
    for i, certificate in zip(fit, run([problems[i] for i in fit]) if fit else [], strict=True):
        answers[i] = certificate
    return answers


def summarise(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Median and quartiles of the relative gap and the share exact, by method, query_moves and radius."""
    out, names = [], ("q25", "median", "q75")
    for (method, moves, radius), part in table.groupby(["method", "query_moves", "radius"], sort=True):
        gaps = part["relative_gap"].dropna()
        quartiles = gaps.quantile([0.25, 0.5, 0.75]).tolist() if len(gaps) else [math.nan] * 3
        out.append({
            "method": method, "query_moves": bool(moves), "radius": float(radius), "units": len(part),
            "bounded": int(part["upper"].notna().sum()), "exact": int((part["is_exact"] == True).sum()),  # noqa: E712
            "relative_gap": {k: None if math.isnan(q) else q for k, q in zip(names, quartiles, strict=True)},
            "median_seconds": None if part["seconds"].isna().all() else float(part["seconds"].median()),
        })  # fmt: skip
    return out
