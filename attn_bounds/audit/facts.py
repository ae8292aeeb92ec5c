"""Ball arithmetic for the audit: a problem's data, exact from its float64 inputs, and a few rigorous enclosures.

Everything here starts from the weights, the tokens and the region; nothing comes from the code that found a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from flint import arb, arb_mat, ctx

from ..problem import HeadProblem
from ..regions import Balls, Boxes

PRECISION = 160  # bits
NORM_PRECISION = 420
NORM_POWER = 44  # eigenvalue bounds come from traces of powers 2^44: they lose a factor 1 + 3e-13


def exact_matrix(tensor: torch.Tensor) -> arb_mat:
    """A float64 matrix, or vector as a column, without rounding."""
    tensor = tensor.detach().cpu()
    return arb_mat(tensor.tolist()) if tensor.dim() == 2 else arb_mat([[x] for x in tensor.tolist()])


def column(matrix: arb_mat, j: int = 0) -> list[arb]:
    """One column as a list."""
    return [matrix[i, j] for i in range(matrix.nrows())]


def dot(x: list[arb], y: list[arb]) -> arb:
    """Inner product."""
    return sum((a * b for a, b in zip(x, y, strict=True)), arb(0))


def root(x: arb) -> arb:
    """sqrt of a number known to be at least 0, whose ball may reach below."""
    if x > 0 or x == 0:
        return x.sqrt()
    return arb(0).union(x.upper().sqrt()) if x.upper() > 0 else arb(0)


def size(x: list[arb]) -> arb:
    """Euclidean norm."""
    return root(dot(x, x))


def larger(x: arb, y: arb) -> arb:
    """An enclosure of max(x, y)."""
    return x.max(y)


def top_eigenvalue(matrix: arb_mat, shift: arb) -> arb:
    """Upper bound of the greatest eigenvalue of a matrix whose eigenvalues are real and at least -shift.

    sum_i (l_i + shift)^p is the trace of (A + shift)^p and at least (l_max + shift)^p, for p = 2^k.
    """
    n = matrix.nrows()
    power = arb_mat(n, n, [matrix[i, j] + (shift if i == j else 0) for i in range(n) for j in range(n)])
    log_scale = arb(0)  # the matrix is power * exp(log_scale * exponent)
    exponent = 1
    for _ in range(NORM_POWER):
        weight = sum((abs(power[i, i]) for i in range(n)), arb(0)).mid()
        if not weight > 0:
            break
        power = power * (1 / weight)
        log_scale += weight.log() / exponent
        power, exponent = power * power, exponent * 2
    trace = sum((power[i, i] for i in range(n)), arb(0)).upper()
    if not trace > 0:
        return -shift
    return (log_scale + trace.log() / exponent).exp().upper() - shift


@dataclass(frozen=True)
class Facts:
    """A problem in ball arithmetic. Lists run over the attended keys, the moving query's own key last."""

    problem: HeadProblem

    @cached_property
    def fq(self) -> arb_mat:
        """scale W_Q, (h, d)."""
        return exact_matrix(self.problem.head.W_Q) * arb(self.problem.head.scale)

    @cached_property
    def fk(self) -> arb_mat:
        """W_K, (h, d)."""
        return exact_matrix(self.problem.head.W_K)

    @cached_property
    def u(self) -> list[arb]:
        """Gradient of a value in its token."""
        return column(self._value_map)

    @cached_property
    def _value_map(self) -> arb_mat:
        return exact_matrix(self.problem.head.W_V).transpose() * self._mixed

    @cached_property
    def _mixed(self) -> arb_mat:
        head = self.problem.head
        c = exact_matrix(self.problem.readout)
        return c if head.W_O is None else exact_matrix(head.W_O).transpose() * c

    @cached_property
    def v_const(self) -> arb:
        """Constant of every value."""
        return dot(column(exact_matrix(self.problem.head.b_V)), column(self._mixed))

    @cached_property
    def order(self) -> list[int]:
        """The attended keys, as rows of the placed points."""
        return self.problem.key_order

    @cached_property
    def centre(self) -> list[list[arb]]:
        """Centres of the placed points' regions."""
        placed = self.problem.placed
        if isinstance(placed, Balls):
            return [[arb(x) for x in row] for row in placed.centre.tolist()]
        assert isinstance(placed, Boxes)
        return [
            [(arb(a) + arb(b)) / 2 for a, b in zip(low, high, strict=True)]
            for low, high in zip(placed.lower.tolist(), placed.upper.tolist(), strict=True)
        ]

    @cached_property
    def radius(self) -> list[arb]:
        """Radii of the balls."""
        assert isinstance(self.problem.placed, Balls)
        return [arb(r) for r in self.problem.placed.radius.tolist()]

    @cached_property
    def half(self) -> list[list[arb]]:
        """Half-widths of the boxes."""
        placed = self.problem.placed
        assert isinstance(placed, Boxes)
        return [
            [(arb(b) - arb(a)) / 2 for a, b in zip(low, high, strict=True)]
            for low, high in zip(placed.lower.tolist(), placed.upper.tolist(), strict=True)
        ]

    @cached_property
    def query_centre(self) -> list[arb]:
        """Centre of the query's region."""
        row = self.problem.query_place
        return self.centre[row] if row is not None else [arb(x) for x in self.problem.query_point.tolist()]

    @cached_property
    def q(self) -> list[arb]:
        """scale (W_Q z + b_Q) at the centre."""
        bias = exact_matrix(self.problem.head.b_Q) * arb(self.problem.head.scale)
        return column(self.fq * arb_mat([[x] for x in self.query_centre]) + bias)

    @cached_property
    def k(self) -> list[list[arb]]:
        """W_K z_j of the attended keys at their centres (the key bias is common to all scores)."""
        keys = self.fk * arb_mat([self.centre[j] for j in self.order]).transpose()
        return [column(keys, j) for j in range(len(self.order))]

    @cached_property
    def s0(self) -> list[arb]:
        """Scores at the centre."""
        return [dot(self.q, k) for k in self.k]

    @cached_property
    def v0(self) -> list[arb]:
        """Values at the centre."""
        return [dot(self.u, self.centre[j]) + self.v_const for j in self.order]

    @cached_property
    def a(self) -> list[arb]:
        """Gradient of a score in its key, at the query's centre."""
        return column(self.fk.transpose() * arb_mat([[x] for x in self.q]))

    @cached_property
    def aa(self) -> arb:
        """|a|^2."""
        return dot(self.a, self.a)

    @cached_property
    def uu(self) -> arb:
        """|u|^2."""
        return dot(self.u, self.u)

    @cached_property
    def au(self) -> arb:
        """a . u."""
        return dot(self.a, self.u)

    @cached_property
    def a_size(self) -> arb:
        """|a|."""
        return root(self.aa)

    @cached_property
    def u_size(self) -> arb:
        """|u|."""
        return root(self.uu)

    @cached_property
    def cosine(self) -> float:
        """Cosine of the angle between a and u, roughly."""
        return float(self.au) / max(float(self.a_size) * float(self.u_size), 1e-300)

    @cached_property
    def b(self) -> list[list[arb]]:
        """Gradients of the scores in the query; the own key's counts both of its roles."""
        keys = arb_mat(self.k) * self.fq  # (n, d)
        rows = [[keys[j, i] for i in range(keys.ncols())] for j in range(keys.nrows())]
        if self.problem.has_own_key:
            rows[-1] = [x + y for x, y in zip(rows[-1], self.a, strict=True)]
        return rows

    @cached_property
    def bilinear_norm(self) -> arb:
        """Upper bound of the spectral norm of scale W_Q^T W_K: its square is the top eigenvalue of G_Q G_K."""
        with ctx.workprec(NORM_PRECISION):  # each squaring of a matrix may widen its balls by a factor of its size
            return root(top_eigenvalue((self.fq * self.fq.transpose()) * (self.fk * self.fk.transpose()), arb(0)))

    @cached_property
    def own_range(self) -> tuple[arb, arb]:
        """Bounds of the eigenvalues of the symmetric part of scale W_Q^T W_K, 0 included.

        With E = [Fq; Fk] and J = [[0, 1], [1, 0]] / 2 its nonzero eigenvalues are those of J E E^T.
        """
        h, d = self.fq.nrows(), self.fq.ncols()
        with ctx.workprec(NORM_PRECISION):
            stacked = arb_mat([[f[i, j] for j in range(d)] for f in (self.fq, self.fk) for i in range(h)])
            gram = stacked * stacked.transpose()
            swapped = arb_mat([[gram[(i + h) % (2 * h), j] / 2 for j in range(2 * h)] for i in range(2 * h)])
            reach = self.bilinear_norm
            low, high = top_eigenvalue(swapped * arb(-1), reach), top_eigenvalue(swapped, reach)
        return -larger(low, arb(0)), larger(high, arb(0))


def output_at(problem: HeadProblem, tokens: torch.Tensor, query: torch.Tensor | None) -> arb:
    """f at a point, enclosed."""
    facts = Facts(problem)
    head = problem.head
    index = problem.query_index
    point = tokens[index] if index is not None else (problem.query_point if query is None else query)
    bias = exact_matrix(head.b_Q) * arb(head.scale)
    q = column(facts.fq * exact_matrix(point) + bias)
    z = exact_matrix(tokens[facts.order])
    keys, values = z * facts.fk.transpose(), z * arb_mat([[x] for x in facts.u])
    scores = [dot(q, [keys[j, i] for i in range(keys.ncols())]) for j in range(keys.nrows())]
    shift = max(scores, key=float).mid()
    weights = [(s - shift).exp() for s in scores]
    return dot(weights, column(values)) / sum(weights, arb(0)) + facts.v_const


def is_inside(problem: HeadProblem, tokens: torch.Tensor, query: torch.Tensor | None) -> bool:
    """Whether a point lies in the region: lists and boxes exactly, balls to one part in 1e12 (and a rounding)."""
    return problem.contains(tokens, query)


def set_precision() -> None:
    """Set the working precision."""
    ctx.prec = PRECISION
