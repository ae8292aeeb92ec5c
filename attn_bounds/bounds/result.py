"""What a bound module returns for a batch of reduced problems."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class BatchBound:
    """Sound upper bounds of a batch; infinity where the method gave none, with the reason beside it."""

    upper: torch.Tensor  # (B,) rounding included
    inflation: torch.Tensor  # (B,) the part of `upper` that pays for rounding only
    witness: dict[str, Any] = field(default_factory=dict)  # tensors with leading dimension B, or lists of length B
    point: tuple[torch.Tensor, torch.Tensor] | None = None  # x (B, n - own, m), y (B, k)
    reason: list[str | None] | None = None

    def witness_of(self, index: int) -> dict[str, Any]:
        """The witness of one problem, `inflation` included; of tensors without entries only the shapes, in `empty`."""
        one = {name: value[index] for name, value in self.witness.items()}
        one = {k: (v.clone() if isinstance(v, torch.Tensor) else v) for k, v in one.items()}
        empty = {k: tuple(v.shape) for k, v in one.items() if isinstance(v, torch.Tensor) and v.numel() == 0}
        one = {k: v for k, v in one.items() if k not in empty}
        if empty:
            one["empty"] = empty
        one["inflation"] = float(self.inflation[index])
        return one

    def reason_of(self, index: int) -> str | None:
        """Why one problem has no bound; None where it has one."""
        return None if self.reason is None else self.reason[index]


def whole(witness: dict[str, Any]) -> dict[str, Any]:
    """A certificate's witness with its tensors without entries put back."""
    shapes = witness.get("empty", {})
    empty = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return empty | {name: value for name, value in witness.items() if name != "empty"}
