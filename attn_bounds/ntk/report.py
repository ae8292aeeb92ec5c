"""One page with every study: verdicts first, then tables and plots."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable
from pathlib import Path

from attn_bounds.ntk.claims import Verdict, verdicts
from attn_bounds.ntk.data import Dataset
from attn_bounds.ntk.plots import PLOTS
from attn_bounds.ntk.settings import Settings
from attn_bounds.ntk.studies import (
    Study,
    convergence_study,
    defence_study,
    error_study,
    influence_study,
    malleability_study,
    poison_study,
    softmax_study,
    spectrum_study,
)


def run_study(name: str, data: Dataset, settings: Settings, out: Path, *, progress: bool = False) -> Study:
    """Run one study and leave its tables (csv), plot (png) and JSON in the folder `out`."""
    runs: dict[str, Callable[[], Study]] = {
        "spectrum": lambda: spectrum_study(data, settings),
        "convergence": lambda: convergence_study(data, settings, resume=out / "convergence.jsonl", progress=progress),
        "influence": lambda: influence_study(data, settings),
        "malleability": lambda: malleability_study(data, settings, progress=progress),
        "poison": lambda: poison_study(data, settings),
        "errors": lambda: error_study(data, settings),
        "defend": lambda: defence_study(data, settings),
        "softmax": lambda: softmax_study(data, settings),
    }
    out.mkdir(parents=True, exist_ok=True)
    study = runs[name]()
    for title, table in study.tables.items():
        table.to_csv(out / f"{name} - {title.replace('/', '-')}.csv", index=False)
    (out / f"{name}.json").write_text(json.dumps(study.to_dict(), indent=1, default=str))
    if name in PLOTS:
        PLOTS[name](study).savefig(out / f"{name}.png", dpi=110)
    return study


STUDIES = ("spectrum", "convergence", "influence", "malleability", "poison", "errors", "defend", "softmax")


def report(data: Dataset, settings: Settings, out: Path, *, progress: bool = False) -> tuple[Path, list[Verdict]]:
    """Run all studies and write `out`/report.html (with report.json); return its path and the verdicts."""
    studies: dict[str, Study] = {}
    seconds: dict[str, float] = {}
    for name in STUDIES:
        start = time.perf_counter()
        studies[name] = run_study(name, data, settings, out, progress=progress)
        seconds[name] = time.perf_counter() - start
        if progress:
            print(f"{name}: {seconds[name]:.0f} s", flush=True)
    found = verdicts(studies)
    page = out / "report.html"
    page.write_text(_page(data, settings, studies, found, seconds))
    record = {
        "data": data.name,
        "settings": str(settings),
        "seconds": seconds,
        "verdicts": [vars(v) for v in found],
        "figures": {name: study.to_dict()["figures"] for name, study in studies.items()},
    }
    (out / "report.json").write_text(json.dumps(record, indent=1))
    return page, found


_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;font-size:13px;margin:.6em 0 1.2em}
td,th{padding:3px 9px;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}
th{background:#f4f4f4} img{max-width:100%} .scroll{overflow-x:auto}
.reproduced{color:#1a7f37;font-weight:600}.partly{color:#9a6700;font-weight:600}.not{color:#b3261e;font-weight:600}
"""


def _page(
    data: Dataset, settings: Settings, studies: dict[str, Study], found: list[Verdict], seconds: dict[str, float]
) -> str:
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>NTK report: {html.escape(data.name)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>NTK and influence malleability of linearized attention: {html.escape(data.name)}</h1>",
        f"<p>{len(data.X)} examples, {data.X.shape[1]} features, {len(data.classes)} classes; n = {settings.n}, "
        f"{settings.seeds} seed(s), ridge {settings.ridge}, tol {settings.tol:g}, epsilon {settings.attack.epsilon:g} "
        f"({settings.attack.norm}); {sum(seconds.values()):.0f} s.</p>",
        "<h2>Published claims</h2>",
        "<table><tr><th>claim</th><th>published</th><th>measured here</th><th>verdict</th><th>remark</th></tr>",
    ]
    for v in found:
        cells = "".join(f"<td>{html.escape(x)}</td>" for x in (v.claim, v.published, v.measured))
        mark = v.verdict.split()[0]
        parts.append(f"<tr>{cells}<td class='{mark}'>{v.verdict}</td><td>{html.escape(v.remark)}</td></tr>")
    parts.append("</table>")
    for name, study in studies.items():
        parts.append(f"<h2>{html.escape(study.title)}</h2>")
        parts += [f"<p>{html.escape(note)}</p>" for note in study.notes]
        if name in PLOTS:
            parts.append(f"<img src='{name}.png' alt='{html.escape(study.title)}'>")
        for title, table in study.tables.items():
            body = table.to_html(index=False, border=0, na_rep="", float_format=lambda x: f"{x:.4g}")
            parts.append(f"<h3>{html.escape(title)}</h3><div class='scroll'>{body}</div>")
    parts.append("</body></html>")
    return "\n".join(parts)
