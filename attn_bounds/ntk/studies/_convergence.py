"""Finite against infinite width on two classes of a data set."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from attn_bounds.ntk.data import Dataset
from attn_bounds.ntk.dynamics import MODELS, ConvergenceSettings, convergence, kernel_distance, slope
from attn_bounds.ntk.kernels import two_layer_ntk
from attn_bounds.ntk.networks import TwoLayerReLU
from attn_bounds.ntk.settings import Settings
from attn_bounds.ntk.studies._base import Study


def pair_of(data: Dataset, settings: Settings) -> Dataset:
    """Return the two classes that the convergence study works on."""
    if len(data.classes) == 2:
        return data
    if settings.pair is not None:
        return data.subset(*settings.pair)
    return data.subset("3", "8") if {"3", "8"} <= set(data.classes) else data.subset(*data.classes[:2])


def convergence_study(
    data: Dataset, settings: Settings, *, resume: Path | None = None, progress: bool = False
) -> Study:
    """Compare finite with infinite width: kernels at the start over widths, predictions after matched training."""
    pair = pair_of(data, settings)
    size = min(250, math.ceil(0.7 * len(pair.X)), settings.n)
    split = pair.split(size, min(settings.n_test, len(pair.X) - size))
    out = Study("convergence", f"Finite against infinite width ({pair.name}, n = {size})")
    start = []
    for model, attention in MODELS.items():
        A = attention.fit(split.X).transform(split.X)
        K = two_layer_ntk(A)
        for width in settings.kernel_widths:
            for seed in range(settings.kernel_seeds):
                network = TwoLayerReLU.initial(width, A.shape[1], seed=seed).to(A.device)
                start.append(
                    {
                        "model": model,
                        "width": width,
                        "seed": seed,
                        "kernel_distance": kernel_distance(network.ntk(A), K),
                    }
                )
    at_start = pd.DataFrame(start)
    runs = []
    for time in settings.times:
        chosen = ConvergenceSettings(widths=settings.widths, seeds=settings.width_seeds, time=time)
        runs.append(
            convergence(split.X, split.Y, split.X_test, chosen, resume=resume, progress=progress).assign(time=time)
        )
    trained = pd.concat(runs, ignore_index=True)
    last = trained[trained.fraction == 1]
    rows = []
    for (time, model), part in last.groupby(["time", "model"], sort=False):
        means = part.groupby("width").prediction_distance.mean()
        initial = at_start[at_start.model == model]
        by_width = initial.groupby("width").kernel_distance.mean()
        kernel_slope = slope(list(by_width.index), list(by_width))
        rows.append(
            {"model": model, "time": time, "kernel slope": kernel_slope}
            | {f"distance, m={w}": v for w, v in means.items()}
            | {
                "change": means.iloc[-1] / means.iloc[0] - 1,
                "spread": part[part.width == means.index[-1]].prediction_distance.std(ddof=0),
                "rms, last": part[part.width == means.index[-1]].prediction_rms.mean(),
                "kernel moved": part[part.width == means.index[-1]].kernel_moved.mean(),
            }
        )
        if time == settings.times[0]:
            out.figures |= {
                f"kernel_slope {model}": kernel_slope,
                f"distance_small {model}": float(means.iloc[0]),
                f"distance_large {model}": float(means.iloc[-1]),
            }
    out.tables["prediction distance by width"] = pd.DataFrame(rows)
    out.extra = {"start": at_start, "trained": trained}
    out.notes = [
        "prediction distance: ||f_m - f_NTK|| / ||f_NTK|| on test inputs at matched training time, f_0 subtracted; "
        f"training time in units of gradient flow on sum |f - y|^2 / 2: {', '.join(f'{t:g}' for t in settings.times)}",
        f"widths {', '.join(map(str, settings.widths))}, {settings.width_seeds} seed(s); kernel slopes over widths "
        f"{', '.join(map(str, settings.kernel_widths))}, {settings.kernel_seeds} seeds",
    ]
    return out
