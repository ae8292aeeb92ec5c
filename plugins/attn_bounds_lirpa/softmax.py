"""A sound softmax for auto_LiRPA: exact interval ends, LSE-type relaxation without its two faults, free tangent point.

Faults of the operator that it replaces (auto_LiRPA 0.7.1, softmax "lse"): an epsilon inside a logarithm lifts the ends
of a secant and makes the upper bound too low for wide score ranges; a score whose interval is a point gives NaN
gradients.
"""

from __future__ import annotations

import torch

from .base import RelaxedOp, interval_ends
from .relaxations import log_softmax_of_scores_interval, softmax_of_scores_lower, softmax_of_scores_upper


class BoundRepairedSoftmax(RelaxedOp):
    """softmax over one axis; parameters are the tangent points of the lower and the upper bound of each output."""

    def __init__(self, attr=None, inputs=None, output_index=0, options=None):
        super().__init__(attr, inputs, output_index, options)
        self.axis = attr["axis"]
        self.has_constraint = True

    def forward(self, x):
        return torch.softmax(x, self.axis)

    def interval_propagate(self, *v):
        lower, upper = (t.transpose(self.axis, -1) for t in interval_ends(v[0]))
        log_lower, log_upper = log_softmax_of_scores_interval(lower, upper)
        return torch.exp(log_lower).transpose(self.axis, -1), torch.exp(log_upper).transpose(self.axis, -1)

    def clamp_interim_bounds(self):
        low, high = self.interval_propagate((self.inputs[0].lower, self.inputs[0].upper))
        self.lower, self.upper = torch.maximum(self.lower, low), torch.minimum(self.upper, high)

    def parameter_shape(self):
        return (*self.inputs[0].lower.transpose(self.axis, -1).shape[1:], 2)

    def default_parameters(self, like):
        return like.new_full([1] * (like.ndim + 1), 0.5)

    def upper_rows(self, rows, parameters):
        axis = self.axis if self.axis < 0 else self.axis + 1
        rows = rows.transpose(axis, -1)
        lower, upper = (t.transpose(self.axis, -1) for t in self.box(0))
        at = [
            lower.unsqueeze(-2) + theta.unsqueeze(-1) * (upper - lower).unsqueeze(-2)
            for theta in self._thetas(parameters)
        ]
        lo_const, lo_coef = softmax_of_scores_lower(lower, upper, at[0].expand(*at[0].shape[:-2], lower.shape[-1], -1))
        up_const, up_coef = softmax_of_scores_upper(lower, upper, at[1].expand(*at[1].shape[:-2], lower.shape[-1], -1))
        pos, neg = rows.clamp(min=0), rows.clamp(max=0)
        # einsum, unlike matmul, makes no copy a row of coefficients that all rows share
        slope = sum(torch.einsum("s...j,s...jk->s...k", *part) for part in ((pos, up_coef), (neg, lo_coef)))
        bias = (pos * up_const + neg * lo_const).flatten(2).sum(-1)
        return (slope.transpose(axis, -1),), bias

    @staticmethod
    def _thetas(parameters):
        return parameters[..., 0], parameters[..., -1]
