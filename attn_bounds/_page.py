"""Pages: parts with a sentence, a table and a figure, as Markdown and as HTML, each with its CSV beside it."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .errors import ArgumentError
from .tables import read_table


@dataclass(frozen=True)
class Part:
    """One part of a report: a heading, a sentence on what is shown, a table, and a figure drawn from `data`."""

    name: str
    title: str
    text: str
    table: pd.DataFrame | None = None
    data: pd.DataFrame | None = None
    draw: Callable[[pd.DataFrame, Path], Path] | None = None


def read_run(folder: Path) -> tuple[pd.DataFrame, str]:
    """The table of a run and the command that made it. Raises: ArgumentError where the folder holds no run."""
    try:
        table = read_table(folder / "results.csv")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"run: expected a folder that holds a run, got {folder} ({error})") from None
    if table.empty:
        raise ArgumentError(f"run: expected rows in {folder / 'results.csv'}, got none")
    note = folder / "command.txt"
    return table, note.read_text().strip() if note.exists() else "(noted when the run ends)"


def write_page(folder: Path, title: str, lead: str, parts: Sequence[Part], command: str) -> Path:
    """Write report.md, report.html and figures/ (PNG and CSV each); return the HTML page."""
    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    kept = drawn(parts, figures)
    again = f"attn-bounds compare report {folder}"
    (folder / "report.md").write_text(markdown(title, lead, kept, command, again))
    found = folder / "report.html"
    found.write_text(page(title, lead, kept, command, again))
    return found


def drawn(parts: Sequence[Part], figures: Path) -> list[Part]:
    """Write the CSVs and figures of the parts that have something to show, and return those."""
    kept = [part for part in parts if part.data is None or len(part.data)]
    for part in kept:
        for kind, data in (("table", part.table), ("figure", part.data)):
            if data is not None:
                data.to_csv(figures / f"{part.name}-{kind}.csv", index=False)
        if part.draw is not None:
            part.draw(part.data, figures / f"{part.name}.png")
    return kept


def _cells(table: pd.DataFrame) -> list[list[str]]:
    def text(value: Any) -> str:
        if isinstance(value, float):
            return "" if np.isnan(value) else f"{value:.3g}"
        return str(value)

    return [[text(value) for value in row] for row in table.itertuples(index=False)]


def markdown(title: str, lead: str, parts: Sequence[Part], command: str, again: str) -> str:
    lines = [f"# {title}", "", lead, "", "Run:", "", f"    {command}", "", "Report:", "", f"    {again}", ""]
    for part in parts:
        lines += [f"## {part.title}", "", part.text, ""]
        if part.table is not None:
            lines += ["| " + " | ".join(map(str, part.table.columns)) + " |", "|" + "---|" * len(part.table.columns)]
            lines += ["| " + " | ".join(row) + " |" for row in _cells(part.table)]
            lines += ["", f"`figures/{part.name}-table.csv`", ""]
        if part.draw is not None:
            lines += [f"![{part.title}](figures/{part.name}.png)", "", f"`figures/{part.name}-figure.csv`", ""]
    return "\n".join(lines)


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;font-size:13px}td,th{padding:3px 9px;border-bottom:1px solid #ddd;text-align:left}"
    "img{max-width:100%}pre{background:#f5f5f5;padding:.6em;overflow-x:auto}small{color:#666}.scroll{overflow-x:auto}"
)


def page(title: str, lead: str, parts: Sequence[Part], command: str, again: str) -> str:
    e = html.escape
    out = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{e(title)}</title>",
        f"<style>{_STYLE}</style></head><body><h1>{e(title)}</h1><p>{e(lead)}</p>",
        f"<p>Run, then report:</p><pre>{e(command)}\n{e(again)}</pre>",
    ]
    for part in parts:
        out.append(f"<h2>{e(part.title)}</h2><p>{e(part.text)}</p>")
        if part.table is not None:
            head = "".join(f"<th>{e(str(c))}</th>" for c in part.table.columns)
            body = "".join("<tr>" + "".join(f"<td>{e(c)}</td>" for c in row) + "</tr>" for row in _cells(part.table))
            csv = f"figures/{part.name}-table.csv"
            out.append(f"<div class='scroll'><table><tr>{head}</tr>{body}</table></div>")
            out.append(f"<p><small><a href='{csv}'>{csv}</a></small></p>")
        if part.draw is not None:
            csv = f"figures/{part.name}-figure.csv"
            out.append(f"<img src='figures/{part.name}.png' alt='{e(part.title)}'>")
            out.append(f"<p><small><a href='{csv}'>{csv}</a></small></p>")
    out.append("</body></html>")
    return "\n".join(out)
