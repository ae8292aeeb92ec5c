"""How far attacked or noisy training inputs bend influence: sign-flip rate, rank correlation, and maxima."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from attn_bounds.errors import ArgumentError, NotFiniteError, ShapeError
from attn_bounds.ntk._arrays import ArrayLike, choice, positive, whole
from attn_bounds.ntk.data import Split
from attn_bounds.ntk.influence import RidgeInfluence
from attn_bounds.ntk.ridge import Ridge, decide

CONDITIONS = ("adversarial", "random", "frozen")
SATURATED = 0.4  # a flip rate of 50% is a coin toss; from here on two models can no longer be told apart


@dataclasses.dataclass(frozen=True)
class Attack:
    """A perturbation of all training inputs, each within `epsilon` of where it was.

    objective "refit": PGD raises the training loss of the kernel ridge model refitted on the attacked inputs;
    "fixed": PGD raises the loss of the model fitted on the clean inputs (ordinary adversarial examples).
    norm "linf" or "l2" (per example). bounds: the attacked inputs stay in [low, high] if given.
    Step 2.5 epsilon / steps, from a random start of a tenth of epsilon.
    """

    epsilon: float = 0.3
    steps: int = 10
    norm: str = "linf"
    objective: str = "refit"
    bounds: tuple[float, float] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        positive("epsilon", self.epsilon)
        choice("norm", self.norm, ("linf", "l2"))
        choice("objective", self.objective, ("refit", "fixed"))
        whole("steps", self.steps)
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ArgumentError(f"bounds: expected (low, high) with low < high, got {self.bounds!r}")

    def project(self, X: Tensor, D: Tensor) -> Tensor:
        """Return D (n, d) brought back into the ball, and X + D into the bounds."""
        if self.norm == "linf":
            D = D.clamp(-self.epsilon, self.epsilon)
        else:
            D = D * (self.epsilon / D.norm(dim=1, keepdim=True).clamp(min=1e-300)).clamp(max=1)
        return D if self.bounds is None else (X + D).clamp(*self.bounds) - X

    def ascend(self, D: Tensor, gradient: Tensor) -> Tensor:
        """Return D moved one step up the gradient."""
        size = 2.5 * self.epsilon / self.steps
        if self.norm == "linf":
            return D + size * gradient.sign()
        return D + size * gradient / gradient.norm(dim=1, keepdim=True).clamp(min=1e-300)

    def noise(self, X: Tensor) -> Tensor:
        """Return X with random noise of full size: signs for "linf", random directions for "l2"."""
        N = torch.randn(X.shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64).to(X.device)
        N = self.epsilon * N.sign() if self.norm == "linf" else self.epsilon * N / N.norm(dim=1, keepdim=True)
        return X + self.project(X, N)


def fitted(kernel: Any, X: Tensor) -> Any:
    """Return a copy of the kernel, fitted on X if it has a `fit`."""
    kernel = copy.deepcopy(kernel)
    if hasattr(kernel, "fit"):
        kernel.fit(X)
    return kernel


def attack_inputs(kernel: Any, X: Tensor, Y: Tensor, ridge: float, attack: Attack, *, frozen: bool = False) -> Tensor:
    """Run PGD on the training inputs X (n, d) against kernel ridge regression; return the attacked inputs.

    Objective "refit": maximise sum_i |f_X'(x'_i) - y_i|^2 = ridge^2 |(K(X', X') + ridge)^-1 Y|^2, with anything the
    kernel fits (the attention matrix C) recomputed from X', or kept as fitted on X with `frozen`.
    Errors: ArgumentError if ridge is 0 ("refit" then has training loss 0); NotFiniteError if a gradient is not finite.
    """
    if attack.objective == "refit":
        positive("ridge", ridge)
    clean = fitted(kernel, X)
    eye = torch.eye(len(X), dtype=X.dtype, device=X.device)
    alpha = torch.linalg.solve(clean(X) + ridge * eye, Y) if attack.objective == "fixed" else None
    start = torch.rand(X.shape, generator=torch.Generator().manual_seed(attack.seed), dtype=torch.float64).to(X.device)
    D = attack.project(X, attack.epsilon * (0.2 * start - 0.1))
    for _ in range(attack.steps):
        D = D.detach().requires_grad_(True)
        moved = X + D
        if alpha is not None:
            loss = ((clean(moved, X) @ alpha - Y) ** 2).sum()
        else:
            K = (clean if frozen else fitted(kernel, moved))(moved)
            loss = ridge**2 * (torch.linalg.solve(K + ridge * eye, Y) ** 2).sum()
        (gradient,) = torch.autograd.grad(loss, D)
        if not bool(torch.isfinite(gradient).all()):
            raise NotFiniteError(
                "attack: the gradient of the training loss is not finite; pass a larger ridge or other inputs"
            )
        D = attack.project(X, attack.ascend(D.detach(), gradient))
    return X + D.detach()


def flip_rate(before: ArrayLike, after: ArrayLike, *, fraction: float = 0.1) -> float:
    """Share of the most influential training points whose influence changes sign.

    before, after (train, ...): for every column the `fraction` of the training points (at least one) with the largest
    |before|, and of those the share with sign(after) != sign(before), averaged over columns.
    """
    a, b = _columns(before, after)
    if not 0 < fraction <= 1:
        raise ArgumentError(f"fraction: expected a number in (0, 1], got {fraction!r}")
    top = a.abs().topk(max(1, int(fraction * len(a))), dim=0).indices
    return float((a.gather(0, top).sign() != b.gather(0, top).sign()).double().mean())


def rank_correlation(before: ArrayLike, after: ArrayLike) -> float:
    """Spearman correlation over training points, averaged over columns (NaN if influence is constant)."""
    a, b = _columns(before, after)
    ranks = [x.argsort(dim=0).argsort(dim=0).double() for x in (a, b)]
    ra, rb = (r - r.mean(0) for r in ranks)
    if bool((a == a[:1]).all()) or bool((b == b[:1]).all()):
        return float("nan")
    return float(((ra * rb).sum(0) / (ra.norm(dim=0) * rb.norm(dim=0))).mean())


def _columns(before: ArrayLike, after: ArrayLike) -> tuple[Tensor, Tensor]:
    before, after = torch.as_tensor(before), torch.as_tensor(after)
    if before.shape != after.shape or before.ndim < 2:
        raise ShapeError(f"before, after: expected equal shapes (train, test, ...), got {before.shape}, {after.shape}")
    if not bool(torch.isfinite(before).all() and torch.isfinite(after).all()):
        raise NotFiniteError("influence: NaN or infinity; raise the ridge")
    return before.flatten(1), after.flatten(1)


def influences(solved: RidgeInfluence, split: Split) -> dict[str, Tensor]:
    """Collect the kinds of influence of a solved model on the test points.

    "hat" (train, test), "prediction" (train, test, outputs: each output of each test point is a column of its own),
    "loss" (train, test) and, with several outputs, "prediction, true class" (train, test).
    """
    prediction = solved.prediction()
    out = {"hat": solved.hat(), "prediction": prediction, "loss": solved.loss(split.Y_test)}
    if prediction.shape[2] > 1:
        index = split.y_test[None, :, None].expand(len(prediction), -1, 1)
        out["prediction, true class"] = prediction.gather(2, index)[..., 0]
    return out


def _thin(influence: Tensor, columns: int = 300) -> Tensor:
    flat = influence.flatten(1)
    return flat[:, :: max(1, flat.shape[1] // columns)]


def compare(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], *, fraction: float = 0.1
) -> list[dict[str, Any]]:
    """Return one record per kind of influence: flip_rate, and spearman (over at most 300 evenly spaced columns)."""
    return [
        {
            "influence": kind,
            "flip_rate": flip_rate(before[kind], after[kind], fraction=fraction),
            "spearman": rank_correlation(_thin(before[kind]), _thin(after[kind])),
        }
        for kind in before
    ]


def malleability(
    kernels: Mapping[str, Any],
    split: Split,
    ridge: Ridge,
    attack: Attack | None = None,
    *,
    conditions: tuple[str, ...] = CONDITIONS,
    fraction: float = 0.1,
) -> pd.DataFrame:
    """Measure how much influence on the test points changes when the training inputs move.

    Args:
        kernels: name to kernel (AttendedKernel for attention and, with power=0, for the ReLU baseline).
        ridge: the rule, resolved on each kernel's clean inputs; the number found is kept for the moved inputs.
        conditions: "adversarial" (PGD, attention recomputed), "random" (noise of the same size), "frozen" (PGD with the
            attention matrix kept as fitted on the clean inputs, for kernels that have one).
    Returns one row per kernel, condition and influence: flip_rate, spearman, max_influence (on the clean inputs),
    accuracy (clean), accuracy_moved, ridge, dof. See `saturation` before reading ratios.
    """
    attack = Attack() if attack is None else attack
    rows = []
    for name, kernel in kernels.items():
        clean = fitted(kernel, split.X)
        K = clean(split.X)
        lam = ridge.resolve(K, split.Y)
        solved = RidgeInfluence(K, clean(split.X_test, split.X), split.Y, lam)
        before = influences(solved, split)
        for condition in conditions:
            choice("conditions", condition, CONDITIONS)
            if condition == "frozen" and not hasattr(kernel, "fit"):
                continue
            if condition == "random":
                moved = attack.noise(split.X)
            else:
                moved = attack_inputs(kernel, split.X, split.Y, lam, attack, frozen=condition == "frozen")
            used = clean if condition == "frozen" else fitted(kernel, moved)
            again = RidgeInfluence(used(moved), used(split.X_test, moved), split.Y, lam)
            for record in compare(before, influences(again, split), fraction=fraction):
                rows.append(
                    {
                        "model": name,
                        "condition": condition,
                        **record,
                        "max_influence": float(before[record["influence"]].abs().max()),
                        "accuracy": accuracy(solved.predictions, split),
                        "accuracy_moved": accuracy(again.predictions, split),
                        "ridge": lam,
                        "dof": solved.degrees_of_freedom,
                    }
                )
    return pd.DataFrame(rows)


def accuracy(F: Tensor, split: Split) -> float:
    """Share of test points whose outputs F (test, outputs) decide for the right class."""
    return float((decide(F) == decide(split.Y_test)).double().mean())


def ratios(table: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Ratio of flip rates (definition b) and of maximal |influence| (definition a) to the baseline model.

    `table` may hold several seeds (a column "seed"): one ratio a seed, then mean, min and max over seeds.
    """
    keys = ["condition", "influence"] + (["seed"] if "seed" in table else [])
    columns = {"flip_rate": "flip_rate_base", "max_influence": "max_influence_base"}
    base = table[table.model == baseline].set_index(keys)[list(columns)].rename(columns=columns)
    if base.empty:
        raise ArgumentError(f"baseline: expected one of {', '.join(table.model.unique())}, got {baseline!r}")
    out = []
    for model, part in table[table.model != baseline].groupby("model", sort=False):
        joined = part.set_index(keys).join(base).reset_index()
        joined["flip_ratio"] = joined.flip_rate / joined.flip_rate_base.where(joined.flip_rate_base > 0)
        joined["max_ratio"] = joined.max_influence / joined.max_influence_base
        for (condition, influence), group in joined.groupby(["condition", "influence"], sort=False):
            out.append(
                {
                    "model": model,
                    "condition": condition,
                    "influence": influence,
                    "flip_rate_base": group.flip_rate_base.mean(),
                    "flip_rate": group.flip_rate.mean(),
                    "flip_ratio": group.flip_ratio.mean(),
                    "flip_ratio_min": group.flip_ratio.min(),
                    "flip_ratio_max": group.flip_ratio.max(),
                    "max_ratio": group.max_ratio.mean(),
                    "max_ratio_min": group.max_ratio.min(),
                    "max_ratio_max": group.max_ratio.max(),
                }
            )
    return pd.DataFrame(out)


def saturation(table: pd.DataFrame) -> str | None:
    """Say so if flip rates are near the 50% of a coin toss for every model under one condition, else None."""
    hat = table[table.influence == "hat"].groupby(["condition", "model"]).flip_rate.mean()
    for condition in ("adversarial", "random"):
        if condition in hat.index.get_level_values(0) and bool((hat[condition] >= SATURATED).all()):
            return (
                f"saturated: under {condition} perturbation every model flips {hat[condition].min():.0%} or more of "
                "its signs (50% is chance), so the ratio says nothing; take a smaller epsilon"
            )
    return None
