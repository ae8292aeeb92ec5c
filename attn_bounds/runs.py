"""Runs: many units, several methods, one row each, written as they come; a killed run resumes and loses nothing."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from .certificate import Certificate
from .certify import certify_many, why_not
from .errors import ArgumentError, ModelLoadError
from .models import LoadedModel
from .problem import HeadProblem

CHUNK = 96  # units a batch; fixed, since a resumed run must batch as an undisturbed one does
COLUMNS = [
    "model", "prompt", "layer", "head", "query", "query_moves", "region", "radius", "readout", "method", "nominal",
    "lower", "upper", "relative_gap", "is_exact", "given_by", "seconds", "reason",
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


def runner(method: str, device: Any = None, **options: Any) -> Runner:
    """The runner of one of the library's methods."""
    return lambda problems: certify_many(problems, method, device=device, **options)


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
        if not resume:
            raise ArgumentError(f"out: {self.out} already holds a run; add --resume to continue it, or choose another")
        changed = sorted(k for k in {*before, *self.settings} if before.get(k) != self.settings.get(k))
        if changed:
            raise ArgumentError(f"out: {self.out} holds a run with other settings ({', '.join(changed)})")

    def execute(
        self, model: LoadedModel, prompts: Sequence[Any], units: Sequence[Unit], runners: dict[str, Runner],
        tokens: int | None = None, progress: bool = True,
    ) -> pd.DataFrame:  # fmt: skip
        """Compute the rows that are not there yet and return the whole table."""
        chunks = [units[i : i + CHUNK] for i in range(0, len(units), CHUNK)]
        done = self._whole_chunks(chunks, len(runners))
        with tqdm(total=len(units), initial=sum(map(len, chunks[:done])), disable=not progress, unit="unit") as bar:
            for chunk in chunks[done:]:
                problems = [self._problem(model, prompts, unit, tokens) for unit in chunk]
                rows = [row for name, run in runners.items() for row in _rows(model.name, chunk, problems, name, run)]
                self._append(rows)
                bar.update(len(chunk))
        return self.read()

    @staticmethod
    def _problem(model: LoadedModel, prompts: Sequence[Any], unit: Unit, tokens: int | None) -> HeadProblem:
        return model.problem(
            prompts[unit.prompt], unit.layer, unit.head, unit.query, unit.radius, unit.region, unit.readout,
            unit.query_moves, tokens,
        )  # fmt: skip

    def _whole_chunks(self, chunks: list[Sequence[Unit]], methods: int) -> int:
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

    def read(self) -> pd.DataFrame:
        """The table as it stands."""
        return pd.read_csv(self.table, keep_default_na=True)


def _rows(
    model: str, units: Sequence[Unit], problems: Sequence[HeadProblem], name: str, run: Runner
) -> Iterator[list[Any]]:
    for unit, answer in zip(units, _answers(problems, name, run), strict=True):
        row: dict[str, Any] = {"model": model, **asdict(unit), "method": name}
        if isinstance(answer, Certificate):
            row |= answer.to_dict() | {"method": name, "given_by": answer.method}
        else:
            row["reason"] = answer
        yield ["" if (value := row.get(column)) is None else _plain(value) for column in COLUMNS]


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
