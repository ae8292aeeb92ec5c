"""Arguments in, float64 tensors out: one place that checks what users pass to `attn_bounds.ntk`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_bounds.errors import ArgumentError, NotFiniteError, ShapeError

ArrayLike = Any  # numpy array, tensor, nested list, data frame


def _tensor(name: str, value: ArrayLike) -> Tensor:
    if isinstance(value, Tensor):
        out = value
    else:
        try:
            array = np.asarray(value)
            if array.dtype == object:
                array = array.astype(np.float64)
            out = torch.as_tensor(array)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{name}: expected numbers, got {type(value).__name__} ({error})") from error
    if out.is_complex():
        raise ArgumentError(f"{name}: expected real numbers, got {out.dtype}")
    out = out.to(torch.float64)
    if not bool(torch.isfinite(out).all()):
        raise NotFiniteError(f"{name}: expected finite numbers, got NaN or infinity; impute or drop those rows first")
    return out


# Products of a few entries must neither overflow nor vanish: attention cubes its inputs, its Gram takes six powers.
_LARGEST = 1e50


def matrix(
    name: str, value: ArrayLike, *, min_rows: int = 1, columns: int | None = None, any_scale: bool = False
) -> Tensor:
    """Return `value` as a finite float64 tensor (n, d), on the device it came from; integers and float32 are converted.

    Raises ShapeError (not 2-D, fewer than `min_rows` rows, wrong number of columns), NotFiniteError, ArgumentError
    (no numbers, or, without `any_scale`, of a size whose powers float64 cannot hold).
    """
    out = _tensor(name, value)
    if out.ndim != 2:
        raise ShapeError(f"{name}: expected a matrix (rows are examples), got shape {tuple(out.shape)}")
    if out.shape[0] < min_rows:
        raise ShapeError(f"{name}: expected at least {min_rows} rows, got {out.shape[0]}")
    if out.shape[1] < 1:
        raise ShapeError(f"{name}: expected at least 1 column, got 0")
    if columns is not None and out.shape[1] != columns:
        raise ShapeError(f"{name}: expected {columns} columns, got {out.shape[1]}")
    size = float(out.detach().abs().max())
    if not any_scale and size > 0 and not 1 / _LARGEST <= size <= _LARGEST:
        raise ArgumentError(
            f"{name}: expected a largest entry of size {1 / _LARGEST:g} to {_LARGEST:g}, got {size:g}; rescale the data"
        )
    return out


def targets(name: str, value: ArrayLike, rows: int) -> Tensor:
    """Return regression targets as a finite float64 tensor (rows, outputs); a vector becomes one column."""
    out = _tensor(name, value)
    if out.ndim == 1:
        out = out[:, None]
    if out.ndim != 2 or out.shape[0] != rows:
        raise ShapeError(f"{name}: expected ({rows},) or ({rows}, outputs), got {tuple(out.shape)}")
    return out


def like(reference: ArrayLike, value: Tensor) -> Any:
    """Give `value` back as a tensor if `reference` is one, else as a numpy array."""
    return value if isinstance(reference, Tensor) else value.detach().cpu().numpy()


def positive(name: str, value: float, *, zero: bool = False) -> float:
    """Return `value` as a float if it is finite and > 0 (>= 0 with `zero`); ArgumentError otherwise."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name}: expected a number, got {value!r}") from error
    if not np.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise ArgumentError(f"{name}: expected a finite number {'>= 0' if zero else '> 0'}, got {value!r}")
    return number


def whole(name: str, value: int, least: int = 1, most: int | None = None) -> int:
    """Return `value` if it is an integer >= least (and <= most); ArgumentError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least or (most and value > most):
        span = f">= {least}" if most is None else f"in {least}..{most}"
        raise ArgumentError(f"{name}: expected an integer {span}, got {value!r}")
    return int(value)


def choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return `value` if it is one of `allowed`; ArgumentError otherwise."""
    if value not in allowed:
        raise ArgumentError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")
    return value
