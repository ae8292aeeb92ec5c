"""What each defence does to flip rate, poisoning and clean accuracy."""

from __future__ import annotations

from attn_bounds.ntk.data import Dataset
from attn_bounds.ntk.defences import best_defence, defences, standard_defences
from attn_bounds.ntk.poisoning import NetworkTraining
from attn_bounds.ntk.settings import Settings
from attn_bounds.ntk.studies._base import Study


def defence_study(data: Dataset, settings: Settings) -> Study:
    """Measure flip rate, accuracy lost to poisoning and clean accuracy of every defence."""
    split = data.split(settings.n, settings.n_test)
    out = Study(
        "defend",
        f"Defences ({data.name}, n = {settings.n}, ridge {settings.ridge}, epsilon {settings.attack.epsilon:g})",
    )
    network = NetworkTraining(width=settings.network_width, time=settings.network_time)
    table = defences(
        split,
        settings.ridge,
        settings.attack,
        candidates=standard_defences(split, network),
        poison_fraction=settings.poison_fraction,
    )
    out.tables = {"defences": table}
    good = best_defence(table[~table.defence.str.contains("baseline")])
    out.figures = {"halving_defences": float(len(good)), "flip_rate none": float(table.flip_rate.iloc[0])}
    if len(good):
        names = ", ".join(
            f"{d} ({f:.1%}, accuracy {a:.3f})" for d, f, a in zip(good.defence, good.flip_rate, good.clean, strict=True)
        )
        out.notes.append(f"at least half the flip rate at no loss of clean accuracy: {names}")
    else:
        out.notes.append("no defence halves the flip rate without losing clean accuracy")
    return out
