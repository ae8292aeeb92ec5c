"""What every method answers: an attained value, a sound upper bound, and the witness that re-proves it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .problem import HeadProblem

EXACT_GAP = 1e-9  # relative gap under which a certificate counts as exact
EXACT_SPREAD = 1e-10  # and, where nothing moves, the gap in units of the value spread


@dataclass(frozen=True)
class Certificate:
    """Two-sided answer for max f: `lower` is attained at `maximizer`, no point of the region exceeds `upper`.

    `upper` is infinite where the method gave no bound; `reason` then says why. `witness` holds what `verify()` needs.
    """

    problem: HeadProblem = field(repr=False)
    method: str
    lower: float
    upper: float
    nominal: float
    maximizer: torch.Tensor = field(repr=False)  # (n, d)
    maximizer_query: torch.Tensor | None = field(repr=False)  # (d,), where an outside query moves
    seconds: float
    spread: float  # max v - min v over keys at the centre
    witness: dict[str, Any] = field(repr=False)
    reason: str | None = None
    seal: str = field(default="", repr=False)

    @property
    def gap(self) -> float:
        """upper - lower, at least 0."""
        return max(self.upper - self.lower, 0.0)

    @property
    def movement(self) -> float:
        """lower - nominal: how far the output has been seen to move."""
        return self.lower - self.nominal

    @property
    def relative_gap(self) -> float:
        """(upper - lower) / (lower - nominal); 0 where both vanish to rounding."""
        if not math.isfinite(self.upper):
            return math.inf
        tiny = 1e-12 * (self.spread + abs(self.nominal))
        if self.movement > tiny:
            return self.gap / self.movement
        return 0.0 if self.gap <= max(tiny, EXACT_SPREAD * self.spread) else math.inf

    @property
    def is_exact(self) -> bool:
        """Whether `upper` equals `lower` to 1e-9 of the movement, to 1e-10 of the value spread, or to its rounding."""
        return self.relative_gap < EXACT_GAP or self.gap <= max(EXACT_SPREAD * self.spread, 1.01 * self.inflation)

    @property
    def inflation(self) -> float:
        """The part of `upper` that only pays for rounding."""
        return float(self.witness.get("inflation", 0.0))

    def verify(self) -> bool:
        """Re-prove the certificate in ball arithmetic, trusting none of the code that found it."""
        from .audit import audit  # here: the audit reads certificates

        return audit(self).passed

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain Python values; a missing bound is None."""
        known = math.isfinite(self.upper)
        return {
            "method": self.method,
            "nominal": self.nominal,
            "lower": self.lower,
            "upper": self.upper if known else None,
            "relative_gap": self.relative_gap if math.isfinite(self.relative_gap) else None,
            "is_exact": self.is_exact,
            "seconds": self.seconds,
            "reason": self.reason,
        }


def seal_of(certificate: Certificate) -> str:
    """Digest of every field a proof depends on: notices a certificate altered since it was made."""
    digest = hashlib.sha256()
    parts = (certificate.method, certificate.lower, certificate.upper, certificate.nominal, certificate.maximizer)
    _feed(digest, (*parts, certificate.maximizer_query, certificate.spread))
    for name in sorted(certificate.witness):
        _feed(digest, (name, certificate.witness[name]))
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, (tuple, list)):
        for item in value:
            _feed(digest, item)
    elif isinstance(value, dict):
        for name in sorted(value):
            _feed(digest, (name, value[name]))
    elif isinstance(value, torch.Tensor):
        digest.update(repr(tuple(value.shape)).encode())
        digest.update(np.ascontiguousarray(value.detach().cpu().numpy()).tobytes())
    elif isinstance(value, np.ndarray):
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, float):
        digest.update(value.hex().encode())
    else:
        digest.update(repr(value).encode())
    digest.update(b"|")
