"""Test errors of networks and kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd

from attn_bounds.ntk.data import Dataset, Split
from attn_bounds.ntk.influence import RidgeInfluence
from attn_bounds.ntk.kernels import GramKernel
from attn_bounds.ntk.malleability import (
    accuracy,
    fitted,
)
from attn_bounds.ntk.poisoning import NetworkTraining
from attn_bounds.ntk.ridge import Ridge
from attn_bounds.ntk.settings import Settings
from attn_bounds.ntk.studies._base import Study, kernels


def error_study(data: Dataset, settings: Settings) -> Study:
    """Compare test errors of trained networks with those of their kernels and of the Gram-induced kernel."""
    out = Study("errors", f"Test error of networks and kernels ({data.name}, n = {settings.n})")
    rows = []
    network = NetworkTraining(width=settings.network_width, time=settings.network_time)
    for seed in range(min(3, settings.seeds)):
        split = data.split(settings.n, settings.n_test, seed)
        training = dataclasses.replace(network, seed=seed)
        for name, kernel in kernels().items():
            clean = fitted(kernel, split.X)
            A, B = (clean.attention.transform(x) for x in (split.X, split.X_test))
            start, end = training.train(A, split.Y)
            rows.append({"model": f"{name} network", "seed": seed, "error": 1 - accuracy(end(B) - start(B), split)})
            rows.append({"model": f"{name} NTK", "seed": seed, "error": 1 - _kernel_accuracy(clean, split)})
        gram = GramKernel(1.0).fit(split.X - split.X.mean(0))
        mean = split.X.mean(0)
        centred = dataclasses.replace(split, X=split.X - mean, X_test=split.X_test - mean)
        rows.append({"model": "Gram-induced kernel", "seed": seed, "error": 1 - _kernel_accuracy(gram, centred)})
    table = pd.DataFrame(rows).groupby("model", sort=False).error.agg(["mean", "min", "max"]).reset_index()
    out.tables = {"test error": table}
    for model, mean in zip(table.model, table["mean"], strict=True):
        out.figures[f"error {model}"] = float(mean)
    out.notes = ["kernels: ridge relative:0.001 of the mean diagonal; networks as in the label-flip study"]
    return out


def _kernel_accuracy(kernel: Any, split: Split) -> float:
    K = kernel(split.X)
    lam = Ridge("relative", 1e-3).resolve(K)
    return accuracy(RidgeInfluence(K, kernel(split.X_test, split.X), split.Y, lam).predictions, split)
