"""Accuracy lost to flipped labels."""

from __future__ import annotations

from attn_bounds.ntk.data import Dataset
from attn_bounds.ntk.poisoning import NetworkTraining, poisoning
from attn_bounds.ntk.settings import Settings
from attn_bounds.ntk.studies._base import ATTENTION, BASELINE, Study, kernels


def poison_study(data: Dataset, settings: Settings) -> Study:
    """Measure the accuracy lost to label flips for kernels and trained networks."""
    split = data.split(settings.n, settings.n_test)
    out = Study("poison", f"Label flips ({data.name}, n = {settings.n}, {settings.poison_fraction:.1%} of the labels)")
    network = NetworkTraining(width=settings.network_width, time=settings.network_time)
    table = poisoning(kernels(), split, settings.ridge, fraction=settings.poison_fraction, network=network)
    out.tables = {"accuracy lost": table}
    chosen = table[table.method != "random"]
    for name in (BASELINE, ATTENTION):
        out.figures[f"drop {name}"] = float(chosen[chosen.model.str.startswith(name)]["drop"].max())
        random = table[(table.method == "random") & table.model.str.startswith(name)]
        out.figures[f"random_drop {name}"] = float(random["drop"].max())
    out.notes = [
        "the attacker sees the test points: an upper end of what these attacks can do",
        f"networks: width {network.width}, full-batch gradient descent with momentum to time {network.time:g}",
    ]
    return out
