"""Read a VNN-LIB property of the common form: one input box, and an unsafe output set that is a union of polyhedra."""

from __future__ import annotations

import gzip
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attn_bounds.errors import ArgumentError, ModelLoadError

_TOKEN = re.compile(r"[()]|[^\s()]+")
_VARIABLE = re.compile(r"([XY])_(\d+)$")


@dataclass(frozen=True)
class Property:
    """Box `lower <= x <= upper`; an output y is unsafe if `a @ y <= b` row by row for one of the `unsafe` (a, b)."""

    lower: np.ndarray  # (n_in,), float64, exactly the file's numbers
    upper: np.ndarray  # (n_in,)
    unsafe: list[tuple[np.ndarray, np.ndarray]]  # a (rows, n_out), b (rows,)

    def violated(self, y: np.ndarray, tolerance: float = 0.0) -> bool:
        """Whether the output y lies in the unsafe set."""
        return any((a @ y <= b + tolerance).all() for a, b in self.unsafe)


def read_vnnlib(path: str | Path) -> Property:
    """Read a `.vnnlib` or `.vnnlib.gz` file; input disjunctions and nonlinear terms are refused with one line."""
    path = Path(path)
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ModelLoadError(f"vnnlib: cannot read {path}: {error}") from error
    forms = _parse(text, path)
    counts = {"X": 0, "Y": 0}
    asserts = []
    for form in forms:
        if form[0] == "declare-const" and len(form) == 3 and form[2] == "Real":
            kind, index = _variable(form[1], path)
            counts[kind] = max(counts[kind], index + 1)
        elif form[0] == "assert" and len(form) == 2:
            asserts.append(form[1])
        else:
            raise ArgumentError(f"vnnlib: {path}: expected declare-const NAME Real or assert, got {form[0]}")
    if not counts["X"] or not counts["Y"]:
        raise ArgumentError(f"vnnlib: {path}: no input X_i or no output Y_i is declared")
    return _collect(asserts, counts["X"], counts["Y"], path)


def _parse(text: str, path: Path) -> list:
    stack: list[list] = [[]]
    for line in text.splitlines():
        for token in _TOKEN.findall(line.split(";", 1)[0]):
            if token == "(":
                stack.append([])
            elif token != ")":
                stack[-1].append(token)
            elif len(stack) == 1 or not stack[-1]:
                raise ArgumentError(f"vnnlib: {path}: unbalanced or empty parentheses")
            else:
                done = stack.pop()
                stack[-1].append(done)
    if len(stack) != 1 or not all(isinstance(form, list) for form in stack[0]):
        raise ArgumentError(f"vnnlib: {path}: unbalanced parentheses")
    return stack[0]


def _collect(asserts: list, n_in: int, n_out: int, path: Path) -> Property:
    lower, upper = np.full(n_in, -np.inf), np.full(n_in, np.inf)
    common: list[tuple[np.ndarray, float]] = []
    clauses: list[list[tuple[np.ndarray, float]]] | None = None
    for form in asserts:
        if form[0] == "or":
            if clauses is not None:
                raise ArgumentError(f"vnnlib: {path}: two disjunctions; write the unsafe set as one (or (and ...) ...)")
            clauses = [[_row(c, n_out, path) for c in _conjuncts(branch)] for branch in form[1:]]
            continue
        for atom in _conjuncts(form):
            if _mentions_input(atom):
                _bound(atom, lower, upper, path)
            else:
                common.append(_row(atom, n_out, path))
    missing = np.flatnonzero(~np.isfinite(lower) | ~np.isfinite(upper))
    if missing.size:
        raise ArgumentError(f"vnnlib: {path}: X_{missing[0]} has no finite lower and upper bound")
    if (lower > upper).any():
        raise ArgumentError(f"vnnlib: {path}: empty box, X_{np.flatnonzero(lower > upper)[0]} has lower > upper")
    if clauses is None and not common:
        raise ArgumentError(f"vnnlib: {path}: no assertion about the outputs")
    rows = [common + clause for clause in (clauses if clauses is not None else [[]])]
    return Property(lower, upper, [(np.stack([a for a, _ in c]), np.array([b for _, b in c])) for c in rows])


def _conjuncts(form: list) -> list:
    return [atom for part in form[1:] for atom in _conjuncts(part)] if form[0] == "and" else [form]


def _mentions_input(atom) -> bool:
    return any(_mentions_input(part) if isinstance(part, list) else part.startswith("X_") for part in atom)


def _bound(atom: list, lower: np.ndarray, upper: np.ndarray, path: Path) -> None:
    op, left, right = _comparison(atom, path)
    if str(right).startswith("X_"):
        op, left, right = ("<=" if op == ">=" else ">="), right, left
    _, index = _variable(left, path)
    value = _number(right, path)
    if op == "<=":
        upper[index] = min(upper[index], value)
    else:
        lower[index] = max(lower[index], value)


def _row(atom: list, n_out: int, path: Path) -> tuple[np.ndarray, float]:
    """`left <= right` as a row a.y <= b."""
    if _mentions_input(atom):
        raise ArgumentError(f"vnnlib: {path}: disjunctions about inputs are not read; split into one file a box")
    op, left, right = _comparison(atom, path)
    if op == ">=":
        left, right = right, left
    a, b = np.zeros(n_out), 0.0
    for side, sign in ((left, 1.0), (right, -1.0)):
        if _VARIABLE.match(side):
            a[_variable(side, path)[1]] += sign
        else:
            b -= sign * _number(side, path)
    return a, b


def _comparison(atom: list, path: Path) -> tuple[str, str, str]:
    if len(atom) != 3 or atom[0] not in ("<=", ">=") or not all(isinstance(side, str) for side in atom[1:]):
        raise ArgumentError(f"vnnlib: {path}: expected (<= A B) or (>= A B) of variables and numbers, got {atom}")
    return atom[0], atom[1], atom[2]


def _variable(name: str, path: Path) -> tuple[str, int]:
    match = _VARIABLE.match(name)
    if not match:
        raise ArgumentError(f"vnnlib: {path}: expected a variable X_i or Y_i, got {name}")
    return match[1], int(match[2])


def _number(text: str, path: Path) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ArgumentError(f"vnnlib: {path}: expected a number, got {text}") from None
    if not np.isfinite(value):
        raise ArgumentError(f"vnnlib: {path}: expected a finite number, got {text}")
    return value
