"""What every study returns, and the two models that all of them compare."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pandas as pd

from attn_bounds.ntk.attention import LinearizedAttention
from attn_bounds.ntk.kernels import AttendedKernel

BASELINE = "ReLU"
ATTENTION = "attention"


@dataclasses.dataclass
class Study:
    """What one study found: tables to print, figures (numbers by name) to judge claims by, notes to read first."""

    name: str
    title: str
    tables: dict[str, pd.DataFrame] = dataclasses.field(default_factory=dict)
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)  # what plots need beyond the tables

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; figures that are not finite become None."""
        return {
            "name": self.name,
            "title": self.title,
            "figures": {k: v if math.isfinite(v) else None for k, v in self.figures.items()},
            "notes": self.notes,
            "tables": {k: _records(table) for k, table in self.tables.items()},
        }


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    clean = table.astype(object).where(table.notna(), None)
    return [
        {k: v.item() if isinstance(v, np.generic) else v for k, v in row.items()} for row in clean.to_dict("records")
    ]


def kernels() -> dict[str, AttendedKernel]:
    """Return the two models under comparison: the same kernel on centred plain rows and on centred attended rows."""
    return {BASELINE: AttendedKernel(LinearizedAttention(power=0.0)), ATTENTION: AttendedKernel(LinearizedAttention())}
