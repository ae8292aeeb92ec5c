"""Run tables: rows written a chunk at a time, in a fixed order; a killed run resumes and loses nothing."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
from tqdm import tqdm

from .engines import run_on
from .errors import ArgumentError, MissingDependencyError, ModelLoadError

FORMATS = ("csv", "parquet")
Row = dict[str, Any]


class Job(Protocol):
    """What computes the rows of a chunk of units; it pickles, since processes and clusters run it.

    `chunk` units are computed together, `per_unit` rows come of each: both fixed, since a resumed run must batch as an
    undisturbed one does.
    """

    @property
    def chunk(self) -> int:
        """Units a chunk."""

    @property
    def per_unit(self) -> int:
        """Rows a unit."""

    def __call__(self, units: Sequence[Any]) -> list[Row]:
        """The rows of the units, in order."""


class Run:
    """A table in a folder: settings.json and results.csv.

    Args: settings (JSON; `kind` says what was run), columns of the table, resume to continue a run that is there.
    Raises: ModelLoadError where the folder cannot be written, ArgumentError where it holds another run.
    """

    def __init__(self, out: str | Path, settings: Row, columns: Sequence[str], resume: bool = False) -> None:
        self.out = Path(out)
        self.table = self.out / "results.csv"
        self.columns = list(columns)
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

    def _check(self, before: Any, resume: bool) -> None:
        if not isinstance(before, dict):
            raise ArgumentError(f"out: expected the settings of a run in {self.out}/settings.json, got {before!r}")
        if not resume:
            raise ArgumentError(f"out: {self.out} already holds a run; add --resume to continue it, or choose another")
        changed = sorted(k for k in {*before, *self.settings} if before.get(k) != self.settings.get(k))
        if changed:
            raise ArgumentError(f"out: {self.out} holds a run with other settings ({', '.join(changed)})")

    def execute(
        self, job: Job, units: Sequence[Any], jobs: int = 1, engine: str = "local", address: str | None = None,
        progress: bool = True,
    ) -> pd.DataFrame:  # fmt: skip
        """Compute the rows that are not there yet and return the whole table."""
        chunks = [tuple(units[i : i + job.chunk]) for i in range(0, len(units), job.chunk)]
        done = self._whole_chunks(chunks, job.per_unit)
        before = sum(map(len, chunks[:done]))
        with tqdm(total=len(units), initial=before, disable=not progress, unit="unit") as bar:
            results: Iterable[list[Row]] = run_on(engine, job, chunks[done:], jobs, address)
            for rows, chunk in zip(results, chunks[done:], strict=True):
                self._append(rows)
                bar.update(len(chunk))
        return self.read()

    def _whole_chunks(self, chunks: Sequence[Sequence[Any]], per_unit: int) -> int:
        """Cut the table after its last whole chunk and return how many there are."""
        if not self.table.exists():
            with self.table.open("w", newline="") as file:
                csv.writer(file).writerow(self.columns)
            return 0
        text = self.table.read_bytes()
        ends = [i + 1 for i, byte in enumerate(text) if byte == 10]  # a half-written row has no end
        whole, rows = 0, 0
        for chunk in chunks:
            if rows + len(chunk) * per_unit > len(ends) - 1:
                break
            whole, rows = whole + 1, rows + len(chunk) * per_unit
        os.truncate(self.table, ends[rows] if ends else 0)
        if not ends:
            self.table.unlink()
            return self._whole_chunks(chunks, per_unit)
        return whole

    def _append(self, rows: Sequence[Row]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([_plain(row.get(c)) for c in self.columns] for row in rows)
        with self.table.open("a", newline="") as file:
            file.write(text.getvalue())
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> int:
        """Number of rows that are written."""
        return max(self.table.read_bytes().count(b"\n") - 1, 0) if self.table.exists() else 0

    def read(self) -> pd.DataFrame:
        """The table as it stands."""
        return read_table(self.table)


def read_table(path: Path) -> pd.DataFrame:
    """A results.csv."""
    return pd.read_csv(path, dtype={"reason": str, "given_by": str})


def check_format(name: str) -> None:
    """Refuse early what could not be written at the end. Raises: ArgumentError, MissingDependencyError."""
    if name not in FORMATS:
        raise ArgumentError(f"format: expected one of {', '.join(FORMATS)}, got {name!r}")
    if name == "parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise MissingDependencyError("format: 'parquet' needs a package: pip install pyarrow") from None


def _plain(value: Any) -> str:
    """A cell: floats to the last digit, one line."""
    if value is None:
        return ""
    return repr(float(value)) if isinstance(value, float) else str(value).replace("\n", " ")
