"""Bound operators of scaled dot product attention: pairwise score differences, and the softmax-weighted sum of values.

`softmax(scale q k^T + mask) v` is written as two nodes, both with closed bounds of their own:

    d = pairwise differences of the scores, one for every pair of keys     (ScoreDifferences)
    o = sum_j v_j / sum_k exp(d_jk)                                        (AttentionMix)

The differences are bounded as rows of their own, so what two scores share cancels; the mix is relaxed as a whole,
knowing the row that is propagated (see `relaxations.weighted_sum_upper`).
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from .base import RelaxedOp, interval_ends
from .bilinear import JointScores
from .ranges import ValueRanges
from .relaxations import MIX_DEFAULTS, attention_interval, far, weighted_sum_upper
from .scaling import Scaling


def pair_indices(n_keys: int, device=None) -> tuple[Tensor, Tensor]:
    """The pairs j < k of keys, as two index tensors of length n_keys (n_keys - 1) / 2."""
    pairs = torch.triu_indices(n_keys, n_keys, 1, device=device)
    return pairs[0], pairs[1]


def full_differences(lower: Tensor, upper: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    """(..., pairs) intervals of s_k - s_j, j < k, as two (..., n_keys, n_keys) tensors with d_kj = -d_jk."""
    j, k = pair_indices(n_keys, lower.device)
    full_lower = lower.new_zeros(*lower.shape[:-1], n_keys, n_keys)
    full_upper = torch.zeros_like(full_lower)
    index = (..., j, k), (..., k, j)
    full_lower[index[0]], full_lower[index[1]] = lower, -upper
    full_upper[index[0]], full_upper[index[1]] = upper, -lower
    return full_lower, full_upper


def score_differences(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """(..., n_keys) intervals of scores as (..., j, k) intervals of all differences s_k - s_j, zero on the diagonal."""
    full_lower = lower.unsqueeze(-2) - upper.unsqueeze(-1)
    full_upper = upper.unsqueeze(-2) - lower.unsqueeze(-1)
    own = torch.eye(lower.shape[-1], dtype=torch.bool, device=lower.device)
    return full_lower.masked_fill(own, 0), full_upper.masked_fill(own, 0)


class BoundScoreDifferences(RelaxedOp):
    """d[..., i, (j, k)] = scale q_i . (k_k - k_j) + mask_ik - mask_ij for the pairs j < k of keys.

    With `pairs=False` the scores themselves, (b, h, n_q, n_k): fewer rows, for long sequences.
    Inputs q (b, h, n_q, c) and k transposed (b, h, c, n_k), behind them the operands of `scaling`. Each product of
    coordinates is bounded by a mix of the two facets of its envelope, weight rho; where the input region is a box and
    the work is bearable, all of them together by their joint remainder (see `bilinear`), and a weight mixes the two.
    """

    def __init__(self, attr=None, inputs=None, output_index=0, options=None, scaling=None, pairs=True, network=None):
        super().__init__(attr, inputs, output_index, options)
        self.requires_input_bounds = [0, 1]
        self.scaling = scaling or Scaling()
        self.pairs = pairs
        self.network = weakref.ref(network) if network is not None else lambda: None
        self.max_work = 4 * 10**9  # multiplications of the joint remainders; beyond it, McCormick's planes alone
        self.known_joint = None

    def forward(self, q, k, *operands):
        s = self.scaling.of(q.matmul(k))
        if not self.pairs:
            return s
        j, other = pair_indices(k.shape[-1], k.device)
        return s[..., other] - s[..., j]

    def interval_propagate(self, *v):
        (q_lo, q_hi), (k_lo, k_hi) = interval_ends(v[0]), interval_ends(v[1])
        q, dq = (q_lo + q_hi) / 2, (q_hi - q_lo) / 2
        k, dk = (k_lo + k_hi) / 2, (k_hi - k_lo) / 2
        middle, scale = self.scaling.of(q.matmul(k)), abs(self.scaling.values()[0])
        if not self.pairs:
            radius = scale * (dq.matmul(k.abs()) + (q.abs() + dq).matmul(dk))
            return middle - radius, middle + radius
        j, other = pair_indices(k.shape[-1], k.device)
        diff = (k[..., other] - k[..., j]).abs()
        radius = dq.matmul(diff) + (q.abs() + dq).matmul(dk[..., other] + dk[..., j])
        middle = middle[..., other] - middle[..., j]
        return middle - scale * radius, middle + scale * radius

    def parameter_shape(self):  # rho for every coordinate, and the weight of McCormick's planes against the joint one
        q, k = self.inputs[0].lower, self.inputs[1].lower
        return (q.shape[1], q.shape[2], k.shape[3], q.shape[3] + 1)

    def default_parameters(self, like):
        width = self.inputs[0].lower.shape[3]
        return torch.cat([like.new_full((width,), 0.5), like.new_zeros(1)]).expand(1, 1, 1, 1, -1)

    def upper_rows(self, rows, parameters):
        on_scores = self._rows_on_scores(rows, self.inputs[1].lower.shape[-1])
        scale, mask = self.scaling.values()
        bias = 0 if mask is None else (on_scores * mask.to(rows)).flatten(2).sum(-1)
        a = on_scores * scale  # (s, b, h, i, j)
        joint = self._joint()
        if parameters.shape[2:-1].numel() == 1:  # the defaults
            (slope_q, slope_k), inner = self._tangent_planes(a, rows * scale, joint)
        elif joint is None:
            (slope_q, slope_k), inner = self._facets(a, parameters[..., :-1])
        else:  # a mix of two upper bounds
            weight = parameters[..., -1].mean(-1)[..., None]  # (s, b, h, i, 1)
            facets, of_facets = self._facets(weight * a, parameters[..., :-1])
            tangent, of_tangent = self._tangent_planes((1 - weight) * a, (1 - weight) * rows * scale, joint)
            slope_q, slope_k = (one + other for one, other in zip(facets, tangent, strict=True))
            inner = of_facets + of_tangent
        slopes = slope_q, slope_k.transpose(-1, -2), *[None] * len(self.scaling.operands)
        return slopes, bias + inner.flatten(2).sum(-1)

    def forget(self) -> None:
        """Let the next pass compute the joint remainders anew, from bounds that got tighter on the same region."""
        self.known_joint = None

    def _joint(self) -> JointScores | None:
        network, known = self.network(), self.known_joint
        if network is None or not self.pairs:
            return None
        if known is None or not known.held.still(network):
            n_keys = self.inputs[1].lower.shape[-1]
            if not JointScores.applies(network, self, n_keys * (n_keys - 1) // 2, self.max_work):
                return None
            with torch.no_grad():
                known = self.known_joint = JointScores(network, self, pair_indices(n_keys, self.inputs[0].lower.device))
        return known if known.is_bound else None

    def _tangent_planes(self, a, rows, joint):
        """Slopes in q and k, and constants (s, b, h, i), of the planes that touch q . k in the middle."""
        q_lo, q_hi = self.box(0)
        k_lo, k_hi = (end.transpose(-1, -2) for end in self.box(1))
        q, k = ((q_lo + q_hi) / 2, (k_lo + k_hi) / 2) if joint is None else (joint.query.to(a), joint.key.to(a))
        dq, dk = torch.maximum(q_hi - q, q - q_lo), torch.maximum(k_hi - k, k - k_lo)
        slack = (a.abs() * dq.matmul(dk.transpose(-1, -2))).sum(-1)
        if joint is not None:
            together = rows.clamp(min=0) * joint.above + rows.clamp(max=0) * joint.below
            slack = torch.minimum(slack, together.sum(-1))
        return (a.matmul(k), a.transpose(-1, -2).matmul(q)), slack - (a * q.matmul(k.transpose(-1, -2))).sum(-1)

    def _facets(self, a, rho):
        """The same for a mix of the two facets of every product's envelope, rho (s, b, h, i, j, c)."""
        q_lo, q_hi = self.box(0)
        k_lo, k_hi = (end.transpose(-1, -2) for end in self.box(1))
        dq, dk = q_hi - q_lo, k_hi - k_lo
        m = q_lo.unsqueeze(-2) + rho * dq.unsqueeze(-2)
        pos, neg = a.clamp(min=0), a.clamp(max=0)
        g_pos = k_hi.unsqueeze(-3) - rho * dk.unsqueeze(-3)
        g_neg = k_lo.unsqueeze(-3) + rho * dk.unsqueeze(-3)
        slope_k = torch.einsum("sbhij,sbhijc->sbhjc", a, m)
        slope_q = torch.einsum("sbhij,sbhijc->sbhic", pos, g_pos) + torch.einsum("sbhij,sbhijc->sbhic", neg, g_neg)
        slack = (rho * (1 - rho) * dq.unsqueeze(-2) * dk.unsqueeze(-3)).sum(-1)
        inner = pos * (slack - (m * g_pos).sum(-1)) - neg * (slack + (m * g_neg).sum(-1))
        return (slope_q, slope_k), inner.sum(-1)

    def _rows_on_scores(self, rows, n_keys):
        if not self.pairs:
            return rows
        j, other = pair_indices(n_keys, rows.device)
        on_scores = rows.new_zeros(*rows.shape[:-1], n_keys)
        on_scores.index_add_(-1, other, rows)
        on_scores.index_add_(-1, j, -rows)
        return on_scores


class BoundAttentionMix(RelaxedOp):
    """o_i = sum_j p_ij v_j with p_ij = 1 / sum_k exp(d_ijk); inputs d (b, h, n_q, pairs) and v (b, h, n_k, c).

    With `pairs=False` the first input is the scores.
    """

    def __init__(self, attr=None, inputs=None, output_index=0, options=None, network=None, max_rows=1024, pairs=True):
        super().__init__(attr, inputs, output_index, options)
        self.pairs = pairs
        self.ranges = ValueRanges(network, max_rows)

    def forward(self, d, v):
        if not self.pairs:
            return torch.softmax(d, -1).matmul(v)
        n_keys = v.shape[-2]
        first = torch.zeros(*d.shape[:-1], n_keys, dtype=d.dtype, device=d.device)
        first[..., 1:] = d[..., : n_keys - 1]  # the pairs (0, k)
        return torch.softmax(first, -1).matmul(v)

    def forget(self) -> None:
        """Let the next pass range the values anew, from bounds that got tighter on the same region."""
        self.ranges.forget()

    def interval_propagate(self, *v):
        (d_lo, d_hi), (v_lo, v_hi) = interval_ends(v[0]), interval_ends(v[1])
        return attention_interval(*self._differences(d_lo, d_hi, v_lo.shape[-2]), v_lo, v_hi)

    def _differences(self, lower, upper, n_keys):
        return full_differences(lower, upper, n_keys) if self.pairs else score_differences(lower, upper)

    def parameter_shape(self):
        d, v = self.inputs[0].lower, self.inputs[1].lower
        return (d.shape[1], d.shape[2], v.shape[2], 4)

    def default_parameters(self, like):
        return like.new_tensor(MIX_DEFAULTS).expand(1, 1, 1, 1, 4)

    def clip(self, parameters):
        parameters[..., 0].clamp_(0, 1)
        parameters[..., 2:].clamp_(0, 1)

    def upper_rows(self, rows, parameters):
        value, optimising = self.inputs[1], self.opt_stage in ("opt", "reuse")
        n_keys = value.lower.shape[-2]
        d_lo, d_hi = self._differences(*self.box(0), n_keys)
        start = getattr(self.asked[0], "name", None), self.asked[1]
        w_lo, w_hi = self.ranges.of(value, rows, start, optimising)
        rho, shift, theta_lo, theta_hi = parameters.unbind(-1)
        shift = shift.mean(-1, keepdim=True)
        a, m, const = weighted_sum_upper(d_lo, d_hi, w_lo, w_hi, rho, shift, theta_lo, theta_hi)
        if self.pairs:
            j, k = pair_indices(n_keys, rows.device)
            slope_d = a[..., j, k] - a[..., k, j]
        else:
            slope_d = a.sum(-2) - a.sum(-1)
        slope_v = torch.einsum("sbhij,sbhic->sbhjc", m, rows)
        return (slope_d, slope_v), const.flatten(2).sum(-1).masked_fill(far(d_lo, d_hi), torch.nan)
