"""Condition numbers, the exponent and the width thresholds on a data set."""

from __future__ import annotations

import pandas as pd

from attn_bounds.ntk.data import Dataset
from attn_bounds.ntk.settings import Settings
from attn_bounds.ntk.spectrum import spectrum
from attn_bounds.ntk.studies._base import Study


def spectrum_study(data: Dataset, settings: Settings) -> Study:
    """Measure condition numbers, the exponent and the width thresholds, over tolerances, centring and seeds."""
    out = Study("spectrum", f"Spectra of the Gram matrices ({data.name}, n = {settings.n})")
    main = spectrum(data.split(settings.n, settings.n_test).X, tol=settings.tol)
    rows = []
    for tol in dict.fromkeys((settings.tol, settings.tol / 10)):
        for centre in (False, True):
            for seed in range(settings.seeds):
                X = data.split(settings.n, settings.n_test, seed).X
                found = spectrum(X, tol=tol, centre=centre, max_ntk=1000 if seed == 0 else 2)
                keys = (
                    "tol",
                    "rank",
                    "kappa",
                    "exponent",
                    "exponent_normalized",
                    "width_kappa6",
                    "width_kappa6_n_log_n",
                )
                row = {"centred": centre, "seed": seed} | {k: getattr(found, k) for k in keys}
                if seed == 0:
                    row |= {k: getattr(found, k) for k in ("kappa_ntk", "kappa_ntk_attended", "exponent_ntk")}
                rows.append(row)
    table = pd.DataFrame(rows)
    grouped = table.groupby(["tol", "centred"], sort=False)
    summary = grouped.agg(
        rank=("rank", "median"),
        kappa=("kappa", "mean"),
        kappa_min=("kappa", "min"),
        kappa_max=("kappa", "max"),
        exponent=("exponent", "mean"),
        exponent_normalized=("exponent_normalized", "mean"),
        width_kappa6=("width_kappa6", "mean"),
        width_kappa6_n_log_n=("width_kappa6_n_log_n", "mean"),
        kappa_ntk=("kappa_ntk", "first"),
        kappa_ntk_attended=("kappa_ntk_attended", "first"),
        exponent_ntk=("exponent_ntk", "first"),
    ).reset_index()
    out.tables = {"spectrum": main.table(), "by tolerance, centring and seed": summary}
    out.figures = {k: v for k, v in main.to_dict().items() if isinstance(v, int | float)}
    out.figures["exponent"] = main.exponent
    out.notes = [
        *main.notes,
        f"kappa_d is at most 1/tol = {1 / settings.tol:g} by construction, so every figure depends on tol",
    ]
    out.extra["spectrum"] = main
    return out
