"""Runs: many units, several methods, one row each, written as they come; a killed run resumes and loses nothing."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from .bounds.slack import secant_slack
from .certificate import Certificate
from .certify import METHODS, certify_many, search_many, why_not
from .engines import run_on
from .errors import ArgumentError, MissingDependencyError, ModelLoadError
from .models import LoadedModel, load_model
from .problem import HeadProblem

CHUNK = 96  # units a batch; fixed, since a resumed run must batch as an undisturbed one does
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
class Job:
    """What a process needs to compute a chunk of units; it pickles."""

    model: str
    prompts: tuple[Any, ...]  # texts, image files or tuples of token ids
    methods: tuple[str, ...]
    tokens: int | None = None  # keep the prompt's first ones
    device: str | None = None
    dtype: str = "float64"

    def __call__(self, units: Sequence[Unit]) -> list[list[Any]]:
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


class Run:
    """A table of units x methods in a folder: settings.json, results.csv (one row a unit and method), summary.json.

    Rows are written a chunk at a time, in a fixed order; `resume` continues at the first chunk that is not whole.
    Raises: ModelLoadError where the folder cannot be written, ArgumentError where it holds another run.
    """

    def __init__(self, out: str | Path, settings: dict[str, Any], resume: bool = False) -> None:
        self.out = Path(out)
        self.table = self.out / "results.csv"
        self.settings = json.loads(json.dumps(settings))
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            noted = self.out / "settings.json"
            if noted.exists():
                self._check(json.loads(noted.read_text()), resume)
            elif self.table.exists():
                raise ArgumentError(f"out: {self.out} holds a results.csv of another kind; choose an empty folder")
            noted.write_text(json.dumps(self.settings, indent=1) + "\n")
        except (OSError, json.JSONDecodeError) as error:
            raise ModelLoadError(f"out: expected a folder that can be written, got {self.out} ({error})") from None

    def _check(self, before: dict[str, Any], resume: bool) -> None:
        if not isinstance(before, dict):
            raise ArgumentError(f"out: expected the settings of a run in {self.out}/settings.json, got {before!r}")
        if not resume:
            raise ArgumentError(f"out: {self.out} already holds a run; add --resume to continue it, or choose another")
        changed = sorted(k for k in {*before, *self.settings} if before.get(k) != self.settings.get(k))
        if changed:
            raise ArgumentError(f"out: {self.out} holds a run with other settings ({', '.join(changed)})")

    def execute(
        self, job: Job, units: Sequence[Unit], jobs: int = 1, engine: str = "local", address: str | None = None,
        progress: bool = True,
    ) -> pd.DataFrame:  # fmt: skip
        """Compute the rows that are not there yet and return the whole table."""
        chunks = [tuple(units[i : i + CHUNK]) for i in range(0, len(units), CHUNK)]
        done = self._whole_chunks(chunks, len(job.methods))
        before = sum(map(len, chunks[:done]))
        with tqdm(total=len(units), initial=before, disable=not progress, unit="unit") as bar:
            results: Iterable[list[list[Any]]] = run_on(engine, job, chunks[done:], jobs, address)
            for rows, chunk in zip(results, chunks[done:], strict=True):
                self._append(rows)
                bar.update(len(chunk))
        return self.read()

    def _whole_chunks(self, chunks: Sequence[Sequence[Unit]], methods: int) -> int:
        """Cut the table after its last whole chunk and return how many there are."""
        if not self.table.exists():
            with self.table.open("w", newline="") as file:
                csv.writer(file).writerow(COLUMNS)
            return 0
        text = self.table.read_bytes()
        ends = [i + 1 for i, byte in enumerate(text) if byte == 10]  # a half-written row has no end
        whole, rows = 0, 0
        for chunk in chunks:
            if rows + len(chunk) * methods > len(ends) - 1:
                break
            whole, rows = whole + 1, rows + len(chunk) * methods
        os.truncate(self.table, ends[rows] if ends else 0)
        if not ends:
            self.table.unlink()
            return self._whole_chunks(chunks, methods)
        return whole

    def _append(self, rows: list[list[Any]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        with self.table.open("a", newline="") as file:
            file.write(text.getvalue())
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> int:
        """Number of rows that are written."""
        return max(self.table.read_bytes().count(b"\n") - 1, 0) if self.table.exists() else 0

    def read(self) -> pd.DataFrame:
        """The table as it stands."""
        return pd.read_csv(self.table, dtype={"reason": str, "given_by": str})


def _rows(
    model: str,
    units: Sequence[Unit],
    problems: Sequence[HeadProblem],
    name: str,
    answers: Sequence[Certificate | str],
) -> Iterator[list[Any]]:
    for unit, problem, answer in zip(units, problems, answers, strict=True):
        row: dict[str, Any] = {"model": model, **asdict(unit), "method": name}
        if isinstance(answer, Certificate):
            best = _beside_best(answer, problem)
            row |= best.to_dict() | {"method": name, "given_by": answer.method}
            if name in SLACK_METHODS and row["upper"] is not None:
                slack = secant_slack(problem, best.lower)
                row["gap_over_slack"] = best.gap / slack if slack > 0 else None
        else:
            row |= {"nominal": problem.nominal, "reason": answer}
        yield ["" if (value := row.get(column)) is None else _plain(value) for column in COLUMNS]


def _beside_best(certificate: Certificate, problem: HeadProblem) -> Certificate:
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


def _plain(value: Any) -> Any:
    return repr(value) if isinstance(value, float) else str(value).replace("\n", " ")


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
