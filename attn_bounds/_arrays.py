"""Turning what users pass (numpy, torch, lists; any float dtype or device) into checked float64 tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .errors import ArgumentError, NotFiniteError, ShapeError


def as_float64(
    name: str, value: Any, shape: Sequence[int | str] | None = None, device: Any = None, copy: bool = True
) -> torch.Tensor:
    """Convert `value` to a finite float64 tensor; `shape` may hold names for free sizes, as in ("n", 384).

    The tensor is a copy (unless `copy` is False): what the caller does to its own array later changes nothing here.
    """
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.device.type == "meta":
            raise ArgumentError(f"{name}: expected a dense tensor with data, got {value.layout} on {value.device}")
        tensor = value.detach()
        if tensor.is_complex() or tensor.dtype == torch.bool:
            raise ArgumentError(f"{name}: expected real numbers, got dtype {tensor.dtype}")
        tensor = tensor.to(device=device, dtype=torch.float64, copy=copy)
    else:
        try:
            array = np.asarray(value)
            if array.dtype.kind not in "iufO":
                raise TypeError(f"dtype {array.dtype}")
            tensor = torch.from_numpy(np.array(array, dtype=np.float64, order="C", copy=True)).to(device)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{name}: expected an array of numbers, got {type(value).__name__} ({error})") from None
    if shape is not None:
        fits = tensor.dim() == len(shape) and all(
            isinstance(want, str) or want == got for want, got in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            raise ShapeError(f"{name}: expected {shape_text(shape)}, got {tuple(tensor.shape)}")
    if not torch.isfinite(tensor).all():
        bad = int((~torch.isfinite(tensor)).sum())
        raise NotFiniteError(f"{name}: expected finite numbers, got {bad} NaN or infinite of {tensor.numel()}")
    return tensor


def shape_text(shape: Sequence[int | str]) -> str:
    """("n", 384) -> "(n, 384)"."""
    return "(" + ", ".join(str(size) for size in shape) + ("," if len(shape) == 1 else "") + ")"


def as_mask(name: str, value: Any, size: int, device: Any = None) -> torch.Tensor:
    """Convert `value` to a bool tensor of shape (size,)."""
    try:
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(np.array(value))
    except (TypeError, ValueError) as error:
        message = f"{name}: expected a bool mask of shape ({size},), got {type(value).__name__} ({error})"
        raise ArgumentError(message) from None
    if tensor.dtype != torch.bool:
        raise ArgumentError(f"{name}: expected a bool mask of shape ({size},), got dtype {tensor.dtype}")
    if tuple(tensor.shape) != (size,):
        raise ShapeError(f"{name}: expected ({size},), got {tuple(tensor.shape)}")
    return tensor.to(device=device, copy=True)


def checked_index(name: str, value: Any, size: int) -> int | None:
    """An index in 0..size-1; None where `value` is not a single number but may be an array. Raises: ArgumentError."""
    if not isinstance(value, (int, float, complex, str, type(None))) and getattr(value, "ndim", None) != 0:
        return None
    wanted = f"{name}: expected an index in 0..{size - 1}"
    dtype = str(getattr(value, "dtype", type(value).__name__))
    if (not isinstance(value, int) and "int" not in dtype) or isinstance(value, bool) or "bool" in dtype:
        raise ArgumentError(f"{wanted}, or a vector, got {value!r}")
    if not 0 <= int(value) < size:
        raise ArgumentError(f"{wanted}, got {int(value)}")
    return int(value)


def checked_device(device: Any) -> torch.device:
    """A torch device that is there. Raises: ArgumentError."""
    try:
        where = torch.device(device)
        torch.zeros(1, device=where).cpu()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        first = str(error).strip().splitlines()[0]
        message = f"device: expected one that torch has here (cpu, cuda, ...), got {device!r} ({first})"
        raise ArgumentError(message) from None
    return where
