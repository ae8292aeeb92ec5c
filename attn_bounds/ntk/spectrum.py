"""Condition numbers of the Gram matrix and of the attended Gram matrix, and the widths they ask for."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attn_bounds.errors import ArgumentError
from attn_bounds.ntk._arrays import ArrayLike, matrix
from attn_bounds.ntk.attention import LinearizedAttention, unit_rows
from attn_bounds.ntk.kernels import two_layer_ntk

_EPS = float(np.finfo(np.float64).eps)


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """What `spectrum` found. NaN means "not measurable in float64", and `notes` then says why."""

    n: int
    d: int
    tol: float
    rank: int
    kappa: float  # kappa_d of G = X X^T
    kappa_attended: float  # of the attended Gram matrix (X C)(X C)^T, same rank
    exponent: float  # log kappa_attended / log kappa
    exponent_normalized: float  # the same after scaling attended rows to unit length
    width_kappa6: float  # kappa^6
    width_kappa6_n_log_n: float  # kappa^6 n log n
    kappa_ntk: float  # of the infinite-width NTK on the plain rows
    kappa_ntk_attended: float  # of the infinite-width NTK on the attended rows
    exponent_ntk: float  # log of the latter over log of the former
    eigenvalues: tuple[float, ...]  # of G, descending, min(n, d) of them
    eigenvalues_attended: tuple[float, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Return plain Python values (keys as the attributes); NaN becomes None, as JSON has no NaN."""
        out = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in out.items()}

    def table(self) -> pd.DataFrame:
        """Return one row a quantity, for printing."""
        names = {
            "kappa": "kappa_d of G",
            "kappa_attended": "kappa_d of the attended Gram",
            "exponent": "exponent",
            "exponent_normalized": "exponent, attended rows normalised",
            "width_kappa6": "width threshold kappa^6",
            "width_kappa6_n_log_n": "width threshold kappa^6 n log n",
            "kappa_ntk": "kappa of Theta_inf, plain rows",
            "kappa_ntk_attended": "kappa of Theta_inf, attended rows",
            "exponent_ntk": "exponent of Theta_inf",
        }
        rows = [("n, d, tol, rank", f"{self.n}, {self.d}, {self.tol:g}, {self.rank}")]
        rows += [(label, f"{getattr(self, key):.6g}") for key, label in names.items()]
        return pd.DataFrame(rows, columns=["quantity", "value"])


def spectrum(X: ArrayLike, *, tol: float = 1e-3, centre: bool = False, max_ntk: int = 2000) -> Spectrum:
    """Measure kappa_d of G = X X^T and of the attended Gram matrix with one rank, and their exponent.

        r = #{sigma_i^2 > tol sigma_1^2},  kappa = sigma_1^2 / sigma_r^2,  exponent = log kappa_attended / log kappa

    sigma are the singular values of X; the attended ones are those of the matrix X C (C = X^T X), whose condition
    number is kappa^1.5. G^3, with kappa^3, is never formed: float64 cannot hold it from kappa = 1e5 on.
    kappa is at most 1/tol by construction, so tol belongs to every figure quoted.

    Args: X (n, d), n >= 2; tol in [1e-10, 1); centre: subtract the mean first; max_ntk: above this n the condition
    numbers of the infinite-width kernel are taken on the first max_ntk rows.
    Errors: ShapeError, NotFiniteError, ArgumentError (tol out of range; X all zero).
    Source: arXiv 2603.13085 for the thresholds.
    """
    if not 1e-10 <= tol < 1:
        raise ArgumentError(f"tol: expected a number in [1e-10, 1), got {tol!r}")
    data = matrix("X", X, min_rows=2, any_scale=True).detach()
    if centre:
        data = data - data.mean(0)
    n, d = data.shape
    values = torch.linalg.svdvals(data)
    if float(values[0]) == 0:
        raise ArgumentError("X: every entry is zero" + (" after centring (all rows are the same)" if centre else ""))
    data = data / values[0]  # scale-free, so that cubes neither overflow nor underflow
    values = torch.linalg.svdvals(data)
    rank = int((values**2 > tol * values[0] ** 2).sum())
    kappa = float((values[0] / values[rank - 1]) ** 2)
    notes: list[str] = []

    attended = data @ (data.mT @ data)
    attended_values = torch.linalg.svdvals(attended)
    kappa_attended, exponent, exponent_normalized = math.nan, math.nan, math.nan
    if rank == 1:
        notes.append(f"one eigenvalue above tol = {tol:g}: kappa is 1 for both Grams and the exponent is undefined")
        kappa_attended = 1.0
    elif kappa < 1 + 1e-12:
        notes.append("kappa is 1: all eigenvalues above tol are equal, and the exponent is undefined")
        kappa_attended = float((attended_values[0] / attended_values[rank - 1]) ** 2)
    elif _EPS * kappa**1.5 > 1e-4:
        notes.append(f"kappa = {kappa:.3g}: the attended condition number is lost to float64 rounding; raise tol")
    else:
        kappa_attended = float((attended_values[0] / attended_values[rank - 1]) ** 2)
        exponent = math.log(kappa_attended) / math.log(kappa)
        plain = torch.linalg.svdvals(unit_rows(data))
        cone = torch.linalg.svdvals(unit_rows(attended))
        base = float((plain[0] / plain[rank - 1]) ** 2) if float(plain[rank - 1]) > 0 else math.inf
        if 1 + 1e-12 < base < math.inf:
            exponent_normalized = 2 * float(torch.log(cone[0] / cone[rank - 1])) / math.log(base)

    kappas = []
    for power, label in ((0.0, "plain"), (1.0, "attended")):
        rows = data[:max_ntk]
        features = LinearizedAttention(centre=False, power=power).fit(data).transform(rows)
        kappas.append(_kernel_condition(two_layer_ntk(features), label, notes))
    if n > max_ntk:
        notes.append(f"condition numbers of Theta_inf on the first {max_ntk} of {n} rows")
    ntk, ntk_attended = kappas
    return Spectrum(
        n=n,
        d=d,
        tol=float(tol),
        rank=rank,
        kappa=kappa,
        kappa_attended=kappa_attended,
        exponent=exponent,
        exponent_normalized=exponent_normalized,
        width_kappa6=kappa**6,
        width_kappa6_n_log_n=kappa**6 * n * math.log(n),
        kappa_ntk=ntk,
        kappa_ntk_attended=ntk_attended,
        exponent_ntk=math.log(ntk_attended) / math.log(ntk) if ntk > 1 + 1e-12 else math.nan,
        eigenvalues=tuple((values**2).tolist()),
        eigenvalues_attended=tuple((attended_values**2).tolist()),
        notes=tuple(notes),
    )


def _kernel_condition(K: Tensor, label: str, notes: list[str]) -> float:
    w = torch.linalg.eigvalsh(K)
    if float(w[0]) <= len(w) * _EPS * float(w[-1]):
        notes.append(f"Theta_inf on the {label} rows is singular in float64 (duplicate or parallel rows)")
        return math.nan
    return float(w[-1] / w[0])
