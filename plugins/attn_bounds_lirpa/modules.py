"""Attention as one operator in a torch model: `AttentionHeads`, which auto_LiRPA bounds as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from auto_LiRPA import register_custom_op
from torch import Tensor, nn

from attn_bounds.errors import ArgumentError, ShapeError
from attn_bounds.head import AttentionHead

from .heads_op import BoundAttentionHead, attention_heads

NAME = "attn_bounds::AttentionHead"


class AttentionHeadOp(torch.autograd.Function):
    """The heads as one node of a traced graph."""

    @staticmethod
    def symbolic(g, x, w_q, b_q, w_k, b_k, w_v, b_v, mask, heads, scale):
        out = g.op(NAME, x, w_q, b_q, w_k, b_k, w_v, b_v, mask, heads_i=heads, scale_f=scale)
        sizes, weight = x.type().sizes(), w_v.type().sizes()  # None where the converter does not keep them
        known = sizes is not None and weight is not None
        return out.setType(x.type().with_sizes([*sizes[:-1], weight[0]]) if known else x.type())

    @staticmethod
    def forward(ctx, *args):
        ctx.save_for_backward(*args[:8])
        ctx.options = args[8:]
        return attention_heads(*args[:8], heads=args[8], scale=args[9])

    @staticmethod
    def backward(ctx, gradient):
        inputs = [part.detach().requires_grad_() for part in ctx.saved_tensors]
        with torch.enable_grad():
            y = attention_heads(*inputs, heads=ctx.options[0], scale=ctx.options[1])
        return (*torch.autograd.grad(y, inputs, gradient), None, None)


class AttentionHeads(nn.Module):
    """Self-attention of tokens x (b, n, d): the outputs of h heads side by side, (b, n, h c).

    q, k, v: linear layers to h c features. mask: (n, n), added to the scores. scale: default 1 / sqrt(c of q).
    """

    def __init__(
        self,
        q: nn.Linear,
        k: nn.Linear,
        v: nn.Linear,
        heads: int = 1,
        scale: float | None = None,
        mask: Tensor | None = None,
    ):
        super().__init__()
        if q.weight.shape != k.weight.shape or q.in_features != v.in_features:
            shapes = [tuple(part.weight.shape) for part in (q, k, v)]
            raise ShapeError(f"q, k, v: expected layers of equal sizes on one input, got weights {shapes}")
        if type(heads) is not int or heads < 1 or any(part.out_features % heads for part in (q, k, v)):
            raise ArgumentError(f"heads: expected a divisor of the layers' widths, got {heads}")
        if scale is not None and not math.isfinite(scale):
            raise ArgumentError(f"scale: expected a finite number, got {scale}")
        if mask is not None and not mask.is_floating_point():
            raise ArgumentError(f"mask: expected numbers to add to the scores (0 and -inf), got {mask.dtype}")
        self.q, self.k, self.v, self.heads = q, k, v, heads
        self.scale = (q.out_features // heads) ** -0.5 if scale is None else float(scale)
        self.register_buffer("mask", torch.zeros(1, 1, dtype=q.weight.dtype) if mask is None else mask)

    @classmethod
    def of(cls, heads: AttentionHead | Sequence[AttentionHead], mask: Tensor | None = None, dtype: Any = None):
        """From `attn_bounds` heads that read the same tokens. Without their W_O, which is a linear layer after it."""
        heads = [heads] if isinstance(heads, AttentionHead) else list(heads)
        if len({(head.d, head.d_head, head.W_V.shape[0], head.scale) for head in heads}) != 1:
            raise ArgumentError("heads: expected heads of equal sizes and scales")
        layers = []
        for name in "QKV":
            weight = torch.cat([getattr(head, f"W_{name}") for head in heads])
            layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype, device=weight.device)
            layer.weight.data = weight.clone()
            layer.bias.data = torch.cat([getattr(head, f"b_{name}") for head in heads]).clone()
            layers.append(layer)
        return cls(*layers, len(heads), heads[0].scale, mask).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        parts = [part for layer in (self.q, self.k, self.v) for part in (layer.weight, _bias(layer))]
        return AttentionHeadOp.apply(x, *parts, self.mask, self.heads, self.scale)


def _bias(layer: nn.Linear) -> Tensor:
    return layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias


register_custom_op(NAME, BoundAttentionHead)
