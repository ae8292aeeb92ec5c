"""Turning what users pass (numpy, torch, lists; any float dtype or device) into checked float64 tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .errors import ArgumentError, NotFiniteError, ShapeError


def as_float64(name: str, value: Any, shape: Sequence[int | str] | None = None, device: Any = None) -> torch.Tensor:
    """Convert `value` to a finite float64 tensor; `shape` may hold names for free sizes, as in ("n", 384)."""
    try:
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name}: expected an array of numbers, got {type(value).__name__} ({error})") from None
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise ArgumentError(f"{name}: expected real numbers, got dtype {tensor.dtype}")
    if shape is not None:
        fits = tensor.dim() == len(shape) and all(
            isinstance(want, str) or want == got for want, got in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            raise ShapeError(f"{name}: expected {shape_text(shape)}, got {tuple(tensor.shape)}")
    tensor = tensor.to(device=device, dtype=torch.float64)
    if not torch.isfinite(tensor).all():
        bad = int((~torch.isfinite(tensor)).sum())
        raise NotFiniteError(f"{name}: expected finite numbers, got {bad} NaN or infinite of {tensor.numel()}")
    return tensor


def shape_text(shape: Sequence[int | str]) -> str:
    """("n", 384) -> "(n, 384)"."""
    return "(" + ", ".join(str(size) for size in shape) + ("," if len(shape) == 1 else "") + ")"


def as_mask(name: str, value: Any, size: int, device: Any = None) -> torch.Tensor:
    """Convert `value` to a bool tensor of shape (size,)."""
    tensor = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    if tensor.dtype != torch.bool:
        raise ArgumentError(f"{name}: expected a bool mask of shape ({size},), got dtype {tensor.dtype}")
    if tuple(tensor.shape) != (size,):
        raise ShapeError(f"{name}: expected ({size},), got {tuple(tensor.shape)}")
    return tensor.to(device=device)


def checked_device(device: Any) -> torch.device:
    """A torch device that is there. Raises: ArgumentError."""
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        first = str(error).strip().splitlines()[0]
        message = f"device: expected one that torch has here (cpu, cuda, ...), got {device!r} ({first})"
        raise ArgumentError(message) from None
    return where
