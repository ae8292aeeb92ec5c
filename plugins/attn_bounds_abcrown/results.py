"""Result files of the VNN-COMP kind: one text file an instance, and a csv summary; both written whole or not at all."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from .incomplete import Verdict

FIELDS = ["instance", "verdict", "margin_crown", "margin_alpha", "seconds", "method"]


def instance_name(onnx: str | Path, vnnlib: str | Path) -> str:
    """The two file names without their endings, joined by an underscore."""
    return "_".join(Path(path).name.removesuffix(".gz").rsplit(".", 1)[0] for path in (onnx, vnnlib))


def write_result(folder: Path, name: str, verdict: Verdict) -> None:
    """Write `name`.txt (first line the word alone, then the counterexample) and add the row of results.csv."""
    lines = [verdict.word]
    if verdict.counterexample is not None:
        x, y = verdict.counterexample
        pairs = [f"(X_{i} {v!r})" for i, v in enumerate(map(float, x))] + [
            f"(Y_{i} {v!r})" for i, v in enumerate(map(float, y))
        ]
        lines += [("(" if i == 0 else "") + pair + (")" if i == len(pairs) - 1 else "") for i, pair in enumerate(pairs)]
    rows = {row["instance"]: row for row in read_summary(folder)}
    rows[name] = dict(
        zip(
            FIELDS,
            [name, verdict.word, verdict.margin_crown, verdict.margin_alpha, round(verdict.seconds, 3), verdict.method],
            strict=True,
        )
    )
    partial = folder / "results.csv.partial"
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows.values())
    os.replace(partial, folder / "results.csv")
    partial = folder / f"{name}.txt.partial"
    partial.write_text("\n".join(lines) + "\n")
    os.replace(partial, folder / f"{name}.txt")


def read_summary(folder: Path) -> list[dict]:
    """The rows of results.csv, or none."""
    path = folder / "results.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def finished(folder: Path, name: str) -> str | None:
    """The word of an instance whose result file is there from an earlier run."""
    path = folder / f"{name}.txt"
    return path.read_text().splitlines()[0] if path.exists() else None
