"""Finite width against infinite width: closed-form training of the kernel, and distances along training."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from attn_bounds.errors import ArgumentError
from attn_bounds.ntk._arrays import ArrayLike, matrix, positive, targets
from attn_bounds.ntk.attention import LinearizedAttention
from attn_bounds.ntk.kernels import two_layer_ntk
from attn_bounds.ntk.networks import TwoLayerReLU, train_network

# The three feature maps under comparison: the plain network, and attention with and without centring.
MODELS = {
    "relu": LinearizedAttention(centre=False, power=0.0),
    "attention uncentred": LinearizedAttention(centre=False),
    "attention centred": LinearizedAttention(centre=True),
}


def gradient_flow_prediction(
    K_train: Tensor,
    K_test: Tensor,
    Y: Tensor,
    time: float,
    *,
    start_train: Tensor | None = None,
    learning_rate: float | None = None,
) -> Tensor:
    """Predict what training on the kernel gives at `time`, minus the prediction at the start.

        f_t(z) - f_0(z) = K_z K^-1 (I - exp(-K t)) (Y - f_0(X))          loss sum_i |f(x_i) - y_i|^2 / 2

    K_train (n, n), K_test (t, n), Y (n, outputs), start_train f_0(X) or None for 0. With `learning_rate` the
    exponential is (I - rate K)^(t/rate), exactly what gradient descent with that step does.
    Works with singular K: directions of eigenvalue 0 contribute t times their residual.
    """
    positive("time", time, zero=True)
    residual = Y if start_train is None else Y - start_train
    w, V = torch.linalg.eigh(K_train)
    w = w.clamp(min=0)
    tiny = w * time < 1e-12
    if learning_rate is None:
        decay = -torch.expm1(-w * time)
    else:
        positive("learning_rate", learning_rate)
        if float(w[-1]) * learning_rate >= 2:
            raise ArgumentError(
                f"learning_rate: gradient descent diverges at {learning_rate:g}; below {2 / float(w[-1]):g} is stable"
            )
        decay = 1 - (1 - learning_rate * w) ** round(time / learning_rate)
    gain = torch.where(tiny, torch.full_like(w, time), decay / torch.where(tiny, torch.ones_like(w), w))
    return K_test @ (V @ (gain[:, None] * (V.mT @ residual)))


def kernel_distance(K: Tensor, reference: Tensor) -> float:
    """Compute ||K - reference||_F / ||reference||_F."""
    return float((K - reference).norm() / reference.norm())


def kernel_alignment(K: Tensor, reference: Tensor) -> float:
    """Compute the cosine <K, reference>_F / (||K||_F ||reference||_F)."""
    return float((K * reference).sum() / (K.norm() * reference.norm()))


@dataclasses.dataclass(frozen=True)
class ConvergenceSettings:
    """What one convergence study runs. time is in units where the loss is sum |f - y|^2 / 2."""

    widths: tuple[int, ...] = (64, 256, 1024, 4096)
    seeds: int = 3
    time: float = 3.0
    checkpoints: int = 4  # points along training at which the kernel is compared
    models: tuple[str, ...] = tuple(MODELS)


def convergence(
    X: ArrayLike,
    Y: ArrayLike,
    Z: ArrayLike,
    settings: ConvergenceSettings | None = None,
    *,
    resume: Path | str | None = None,
    progress: bool = False,
) -> pd.DataFrame:
    """Compare networks of growing width with their infinite-width limit, at the start and through training.

    Args: X (n, d), Y (n,) or (n, outputs) targets, Z (t, d) test inputs; resume: a JSON-lines file; finished runs
    found there (same data, same settings) are not repeated, and each new one is appended at once.

    Returns one row per model, width, seed and fraction of training: kernel_distance and kernel_alignment to
    Theta_inf and kernel_moved (distance to the network's own kernel at the start), on the training inputs;
    prediction_distance = ||f_m - f_NTK|| / ||f_NTK|| and prediction_rms on Z at the matched training time, f_0
    subtracted, gradient descent in float64 with the step 1/lambda_max and the closed form of that same step.
    """
    settings = ConvergenceSettings() if settings is None else settings
    data = matrix("X", X, min_rows=2)
    labels = targets("Y", Y, len(data)).to(data.device)
    test = matrix("Z", Z, columns=data.shape[1]).to(data.device)
    for model in settings.models:
        if model not in MODELS:
            raise ArgumentError(f"models: expected some of {', '.join(MODELS)}, got {model!r}")
    if settings.seeds < 1 or not settings.widths:
        raise ArgumentError("settings: expected at least one seed and one width")
    stamp = f"{float(data.sum()):.12g} {float(labels.abs().sum()):.12g} {float(test.sum()):.12g} {tuple(data.shape)}"
    done = _Runs(Path(resume) if resume is not None else None)
    jobs = [(m, w, s) for m in settings.models for w in settings.widths for s in range(settings.seeds)]
    limits: dict[str, _Limit] = {}
    rows: list[dict[str, object]] = []
    for model, width, seed in tqdm(jobs, desc="convergence", disable=not progress):
        key = f"{model}|{width}|{seed}|{settings.time:g}|{settings.checkpoints}|{stamp}"
        if key not in done.rows:
            if model not in limits:
                limits[model] = _Limit(model, data, labels, test, settings.time)
            done.add(key, limits[model].run(width, seed, settings.checkpoints))
        rows += done.rows[key]
    return pd.DataFrame(rows)


class _Limit:
    """The infinite-width side of one model, shared by all its finite-width runs."""

    def __init__(self, model: str, X: Tensor, Y: Tensor, Z: Tensor, time: float) -> None:
        attention = MODELS[model]
        self.model, self.Y = model, Y
        self.A = attention.fit(X).transform(X)
        self.B = attention.transform(Z)
        self.K = two_layer_ntk(self.A)
        self.K_test = two_layer_ntk(self.B, self.A)
        self.rate = 1.0 / float(torch.linalg.eigvalsh(self.K)[-1])
        self.steps = max(1, round(time / self.rate))

    def run(self, width: int, seed: int, checkpoints: int) -> list[dict[str, object]]:
        start = TwoLayerReLU.initial(width, self.A.shape[1], self.Y.shape[1], seed=seed).to(self.A.device)
        at = tuple(sorted({max(1, round(self.steps * (i + 1) / checkpoints)) for i in range(checkpoints)}))
        _, copies = train_network(start, self.A, self.Y, steps=self.steps, learning_rate=self.rate, at=at)
        K_start, f_start = start.ntk(self.A), start(self.B)
        rows = []
        for step, network in [(0, start), *zip(at, copies, strict=True)]:
            K = network.ntk(self.A)
            limit = gradient_flow_prediction(self.K, self.K_test, self.Y, step * self.rate, learning_rate=self.rate)
            gap = float((network(self.B) - f_start - limit).norm())
            size = float(limit.norm())
            rows.append(
                {
                    "model": self.model,
                    "width": width,
                    "seed": seed,
                    "step": step,
                    "fraction": step / self.steps,
                    "kernel_distance": kernel_distance(K, self.K),
                    "kernel_alignment": kernel_alignment(K, self.K),
                    "kernel_moved": kernel_distance(K, K_start),
                    "prediction_distance": gap / size if size > 0 else None,
                    "prediction_rms": gap / math.sqrt(limit.numel()),
                }
            )
        return rows


class _Runs:
    """Finished runs, kept in memory and, if a path is given, one JSON line each."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: dict[str, list[dict[str, object]]] = {}
        if path is not None and path.exists():
            lines = path.read_text().splitlines()
            for number, line in enumerate(lines):
                try:
                    record = json.loads(line)
                    self.rows[record["key"]] = record["rows"]
                except (json.JSONDecodeError, KeyError, TypeError) as error:
                    if number + 1 < len(lines):  # a last line cut short by an interruption is simply run again
                        raise ArgumentError(
                            f"resume: {path} line {number + 1} is not a finished run ({error})"
                        ) from error

    def add(self, key: str, rows: list[dict[str, object]]) -> None:
        self.rows[key] = rows
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps({"key": key, "rows": rows}) + "\n")


def slope(widths: Sequence[float], values: Sequence[float]) -> float:
    """Fit log value = slope log width + const and return the slope (NaN with fewer than two widths)."""
    if len(set(widths)) < 2:
        return math.nan
    return float(np.polyfit(np.log(widths), np.log(values), 1)[0])
