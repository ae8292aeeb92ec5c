"""Leave-one-out influence on a data set: checks and the most influential points."""

from __future__ import annotations

import pandas as pd
import torch

from attn_bounds.ntk.data import Dataset
from attn_bounds.ntk.influence import KernelInfluence, RidgeInfluence
from attn_bounds.ntk.malleability import (
    accuracy,
    rank_correlation,
)
from attn_bounds.ntk.poisoning import NetworkTraining
from attn_bounds.ntk.settings import Settings
from attn_bounds.ntk.studies._base import Study, kernels


def influence_study(data: Dataset, settings: Settings) -> Study:
    """Check closed-form leave-one-out against refitting, list top points, compare kernel and trained network."""
    split = data.split(settings.n, settings.n_test)
    out = Study("influence", f"Influence of training points ({data.name}, n = {settings.n}, ridge {settings.ridge})")
    checks, tops = [], []
    for name, kernel in kernels().items():
        model = KernelInfluence(kernel, settings.ridge).fit(split.X, split.Y)
        prediction, hat = model.prediction(split.X_test), model.hat(split.X_test)
        full = model.predict(split.X_test)
        worst = 0.0
        for i in torch.linspace(0, settings.n - 1, 5).long().tolist():
            keep = torch.arange(settings.n, device=split.X.device) != i
            K = model.kernel(split.X[keep])
            eye = torch.eye(len(K), dtype=K.dtype, device=K.device)
            alpha = torch.linalg.solve(K + model.ridge_ * eye, split.Y[keep])
            without = model.kernel(split.X_test, split.X[keep]) @ alpha
            worst = max(worst, float((full - without - prediction[i]).abs().max()))
        A, B = (kernel.attention.transform(x) for x in (split.X, split.X_test))
        _, end = NetworkTraining(width=1024, time=settings.network_time).train(A, split.Y)
        K = end.ntk(A)
        net = RidgeInfluence(K, end.ntk(B, A), split.Y, settings.ridge.resolve(K, split.Y))
        checks.append(
            {
                "model": name,
                "accuracy": accuracy(full, split),
                "ridge": model.ridge_,
                "dof": model.degrees_of_freedom_,
                "largest |closed form - refit|": worst,
                "Spearman, kernel against trained network (m = 1024)": rank_correlation(hat, net.hat()),
            }
        )
        out.figures[f"loo_error {name}"] = worst
        indices = hat.abs().topk(min(5, len(hat)), dim=0).indices
        for t in range(min(4, settings.n_test)):
            for rank, i in enumerate(indices[:, t].tolist()):
                tops.append(
                    {
                        "model": name,
                        "test point": t,
                        "label": data.classes[int(split.y_test[t])],
                        "rank": rank + 1,
                        "training point": i,
                        "training label": data.classes[int(split.y[i])],
                        "hat": float(hat[i, t]),
                        "of the true output": float(
                            prediction[i, t, 0 if prediction.shape[2] == 1 else split.y_test[t]]
                        ),
                    }
                )
    out.tables = {"checks": pd.DataFrame(checks), "most influential points": pd.DataFrame(tops)}
    out.extra = {"split": split, "tops": out.tables["most influential points"]}
    out.notes = ["sign: prediction influence is f - f_without_i, so positive means that the point raises the output"]
    return out
