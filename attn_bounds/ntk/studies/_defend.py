"""What each defence does to flip rate, poisoning and clean accuracy."""

from __future__ import annotations

import pandas as pd

from attn_bounds.ntk.data import Dataset
from attn_bounds.ntk.defences import best_defence, defences, standard_defences
from attn_bounds.ntk.poisoning import NetworkTraining
from attn_bounds.ntk.settings import Settings
from attn_bounds.ntk.studies._base import Study


def defence_study(data: Dataset, settings: Settings) -> Study:
    """Measure flip rate, accuracy lost to poisoning and clean accuracy of every defence, averaged over splits."""
    seeds = range(min(settings.defence_seeds, settings.seeds))
    out = Study(
        "defend",
        f"Defences ({data.name}, n = {settings.n}, ridge {settings.ridge}, epsilon {settings.attack.epsilon:g}, "
        f"{len(seeds)} seed(s))",
    )
    network = NetworkTraining(width=settings.network_width, time=settings.network_time)
    parts = []
    for seed in seeds:
        split = data.split(settings.n, settings.n_test, seed)
        part = defences(
            split,
            settings.ridge,
            settings.attack,
            candidates=standard_defences(split, network),
            poison_fraction=settings.poison_fraction,
        )
        parts.append(part)
    grouped = pd.concat(parts).groupby("defence", sort=False)
    table = grouped.mean().reset_index()
    table.insert(2, "flip_rate_max", grouped.flip_rate.max().to_numpy())
    out.tables = {"defences": table}
    good = best_defence(table[~table.defence.str.contains("baseline")])
    out.figures = {"halving_defences": float(len(good)), "flip_rate none": float(table.flip_rate.iloc[0])}
    if len(good):
        rows = zip(good.defence, good.flip_rate, good.clean, strict=True)
        names = ", ".join(f"{defence} ({rate:.1%}, accuracy {clean:.3f})" for defence, rate, clean in rows)
        out.notes.append(
            f"at most half the flip rate of the undefended model ({table.flip_rate.iloc[0]:.1%}, accuracy "
            f"{table.clean.iloc[0]:.3f}) at no loss of clean accuracy: {names}"
        )
    else:
        out.notes.append("no defence halves the flip rate without losing clean accuracy")
    return out
