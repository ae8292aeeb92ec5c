"""An incomplete verifier of its own: one pass of bounds, rows with optimised parameters, ReLU splits, an attack."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import attn_bounds_lirpa
import numpy as np
import torch
from attn_bounds_lirpa.optimise import optimised_lower_bound
from attn_bounds_lirpa.split import split_rows
from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm

from attn_bounds.errors import ShapeError, UnsupportedModelError

from .attack import find_counterexample
from .guard import install_guard
from .onnx_route import input_shape, load_onnx, onnx_to_torch
from .vnnlib_reader import Property, read_vnnlib

_FIRST_SPLITS = 0.3  # of the time that is left after the first pass, before intermediate rows are optimised


@dataclass
class Verdict:
    """What is known about one instance: the word, lowest margins after the first pass and at the end, and how."""

    word: str  # sat, unsat, timeout, unknown
    margin_crown: float = math.nan
    margin_alpha: float = math.nan
    seconds: float = 0.0
    method: str = ""
    counterexample: tuple[np.ndarray, np.ndarray] | None = None


@dataclass
class Settings:
    """`graph`: fuse_attention, repair_softmax or stock; the iterations are Adam steps for rows and for final rows.

    `leaves`: how many parts of the region the ReLU splits may bound in all; 0: the whole only.
    """

    graph: str = "fuse_attention"
    rows_iterations: int = 8
    iterations: int = 40
    lr: float = 0.25
    leaves: int = 10000
    restarts: int = 20
    steps: int = 40
    double: bool = False


class Verifier:
    """One ONNX network, converted once, and as many properties as are asked."""

    def __init__(self, onnx: str | Path, settings: Settings | None = None, guard: bool = True):
        self.settings = settings or Settings()
        self.dtype = torch.float64 if self.settings.double else torch.float32
        self.model = load_onnx(onnx)
        self.shape = input_shape(self.model)
        self.module = onnx_to_torch(self.model).to(self.dtype)
        with _default(self.dtype):
            self.network = _bounded(self.module, torch.zeros(self.shape, dtype=self.dtype))
        if self.settings.graph == "fuse_attention":
            attn_bounds_lirpa.attach(self.network)
        elif self.settings.graph == "repair_softmax":
            attn_bounds_lirpa.repair_softmax(self.network)
        if guard:
            install_guard(self.network)

    def verify(self, vnnlib: str | Path, timeout: float = 60.0) -> Verdict:
        """Verdict on one VNN-LIB file within about `timeout` seconds."""
        start = time.monotonic()
        prop = read_vnnlib(vnnlib)
        if prop.lower.size != math.prod(self.shape):
            raise ShapeError(f"vnnlib: expected {math.prod(self.shape)} inputs, got {prop.lower.size}")
        verdict = self._verify(prop, start + timeout)
        verdict.seconds = time.monotonic() - start
        return verdict

    def _verify(self, prop: Property, deadline: float) -> Verdict:
        attack = self.settings
        found = find_counterexample(self.module, self.model, prop, self.shape, restarts=4, steps=5)
        if found is not None:
            return Verdict("sat", method="attack", counterexample=found)
        first, best, method = self.margins(prop, deadline)
        verdict = Verdict("unknown", _lowest(first, prop), _lowest(best, prop), method=method)
        if verdict.margin_alpha > 0:
            verdict.word = "unsat"
            return verdict
        if time.monotonic() < deadline:
            found = find_counterexample(self.module, self.model, prop, self.shape, attack.restarts, attack.steps)
            if found is not None:
                verdict.word, verdict.method, verdict.counterexample = "sat", "attack", found
        if verdict.word == "unknown" and time.monotonic() >= deadline:
            verdict.word = "timeout"
        return verdict

    def margins(self, prop: Property, deadline: float) -> tuple[np.ndarray, np.ndarray, str]:
        """Lower bounds of a . y - b, row by row, after the first pass and in the end, and what the latter rest on."""
        with _default(self.dtype):
            return self._margins(prop, deadline)

    def _margins(self, prop: Property, deadline: float) -> tuple[np.ndarray, np.ndarray, str]:
        x, C, limits = box_and_rows(prop, self.shape, self.dtype)
        options, method = self.settings, "crown"
        start = time.monotonic()
        first, bounds, _ = optimised_lower_bound(self.network, (x,), C, 0, 0)
        end = time.monotonic()
        # a step of all rows takes four passes or so, forward and back for both ends of each
        affordable = 4 * options.rows_iterations * (end - start) < deadline - end
        until = end + _FIRST_SPLITS * (deadline - end) if affordable else deadline
        best, leaves = self._split(x, C, limits, first, bounds, until)
        if leaves:
            method = f"{leaves} leaves of ReLU splits"
        if affordable and (best <= limits).any() and time.monotonic() < deadline:
            rows, bounds, _ = optimised_lower_bound(
                self.network, (x,), C, options.rows_iterations, 0, options.lr, deadline, limits, bounds
            )
            best, leaves = self._split(x, C, limits, torch.maximum(best, rows), bounds, deadline)
            method = "optimised rows" + (f", {leaves} leaves of ReLU splits" if leaves else "")
        margins = ((bound - limits)[0].double().cpu().numpy() for bound in (first, best))
        return *margins, method

    def _split(self, x, C, limits, best, bounds, deadline) -> tuple[torch.Tensor, int]:
        """Splits of the rows that `best` leaves open: the better of the two bounds, and how many leaves it took."""
        rows = (best <= limits)[0].nonzero().squeeze(-1)
        if not len(rows) or time.monotonic() >= deadline:
            return best, 0
        iterations, leaves = self.settings.iterations, self.settings.leaves
        found = split_rows(
            self.network, (x,), C[:, rows], limits[:, rows], bounds, deadline, iterations=iterations, max_leaves=leaves
        )
        return best.index_copy(1, rows, torch.maximum(best[:, rows], found.lower)), found.leaves


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """auto_LiRPA builds constants in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _bounded(module: torch.nn.Module, example: torch.Tensor) -> BoundedModule:
    """The module as auto_LiRPA's graph; operators that it has no bounds for are named in one line."""
    from auto_LiRPA.utils import logger

    lines = io.StringIO()
    others, passed_on = logger.handlers[:], logger.propagate
    logger.handlers[:], logger.propagate = [logging.StreamHandler(lines)], False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return BoundedModule(module, example, bound_opts={**attn_bounds_lirpa.OPTIONS}, verbose=False)
    except Exception as error:  # NotImplementedError where it has no bounds, others where its conversion stumbles
        names = sorted(set(re.findall(r"'operator': '(\w+)'|Name: (onnx::\w+)", lines.getvalue())))
        named = ", ".join("".join(pair).removeprefix("onnx::") for pair in names)
        reason = named or " ".join(f"the conversion failed with {type(error).__name__}: {error}".split())
        raise UnsupportedModelError(f"onnx: auto_LiRPA cannot bound this network: {reason}") from error
    finally:
        logger.handlers[:], logger.propagate = others, passed_on


def box_and_rows(prop: Property, shape: tuple[int, ...], dtype: torch.dtype):
    """The box as a BoundedTensor, and the rows C (1, s, outputs) and limits (1, s) of all unsafe polyhedra together."""
    low, high = (_outward(end, dtype, sign).reshape(shape) for end, sign in ((prop.lower, -1), (prop.upper, 1)))
    x = BoundedTensor((low + high) / 2, PerturbationLpNorm(norm=math.inf, x_L=low, x_U=high))
    C, limits = (np.concatenate([pair[i] for pair in prop.unsafe]) for i in (0, 1))
    return x, torch.as_tensor(C, dtype=dtype).unsqueeze(0), torch.as_tensor(limits, dtype=dtype).unsqueeze(0)


def _lowest(margins: np.ndarray, prop: Property) -> float:
    """Smallest over the unsafe polyhedra of the largest margin of their rows: > 0 proves that none is reached."""
    ends = np.cumsum([len(b) for _, b in prop.unsafe])
    return min(float(part.max()) for part in np.split(margins, ends[:-1]))


def _outward(end: np.ndarray, dtype: torch.dtype, sign: int) -> torch.Tensor:
    """The end of a box in the model's dtype, rounded so that the box can only grow."""
    rounded = torch.as_tensor(end, dtype=dtype)
    exact = torch.as_tensor(end, dtype=torch.float64)
    inside = sign * (exact - rounded.double()) > 0
    return torch.where(inside, torch.nextafter(rounded, torch.full_like(rounded, sign * math.inf)), rounded)
