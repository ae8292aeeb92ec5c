"""Write attention in the plain form that converts (MatMul, scale, mask, Softmax, MatMul), in a model of any library.

Fused kernels such as scaled_dot_product_attention do not survive the conversion to a bounded graph; their plain form
does, and `fuse_attention` then finds it. Outputs are unchanged up to rounding.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from torch import Tensor, nn

from attn_bounds.errors import UnsupportedModelError


def swap_attention(module: nn.Module) -> nn.Module:
    """A copy of `module`, in evaluation mode, with every attention it knows in plain form.

    Known: torch.nn.MultiheadAttention (batch_first), self-attention of transformers BERT, GPT-2 and ViT modules, and
    every call of torch's scaled_dot_product_attention inside `module`. One line says why a part is not supported.
    """
    swapped = copy.deepcopy(module).eval()
    for name, part in list(swapped.named_modules()):
        build = _BUILDERS.get(type(part).__name__)
        if build is None:
            continue
        plain = build(part, name).eval()
        if not name:
            return plain
        parent, _, child = name.rpartition(".")
        setattr(swapped.get_submodule(parent), child, plain)
    return PlainCalls(swapped)


class PlainCalls(nn.Module):
    """Runs a module with torch's scaled_dot_product_attention replaced by its plain form."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        original = nn.functional.scaled_dot_product_attention
        nn.functional.scaled_dot_product_attention = plain_attention
        try:
            return self.module(*args, **kwargs)
        finally:
            nn.functional.scaled_dot_product_attention = original


def plain_attention(
    query: Tensor,  # (batch, heads, n_q, d)
    key: Tensor,  # (batch, heads, n_k, d)
    value: Tensor,  # (batch, heads, n_k, d_v)
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale q k^T + mask) v with the arguments of torch's scaled_dot_product_attention; no dropout."""
    if enable_gqa and key.shape[1] != query.shape[1]:
        raise UnsupportedModelError("attention with grouped heads is not supported; repeat the keys and values first")
    scores = query.matmul(key.transpose(-1, -2)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores + _causal(query.shape[-2], key.shape[-2], scores)
    if attn_mask is not None:
        scores = scores + (_additive(attn_mask, scores) if attn_mask.dtype == torch.bool else attn_mask)
    return torch.softmax(scores, -1).matmul(value)


def _causal(n_q: int, n_k: int, like: Tensor) -> Tensor:
    mask = np.triu(np.full((int(n_q), int(n_k)), -1e9), 1)  # numpy: a traced triu does not convert
    return torch.as_tensor(mask, dtype=like.dtype, device=like.device)


def _additive(allowed: Tensor, like: Tensor) -> Tensor:
    return torch.where(allowed, 0.0, -1e9).to(like.dtype)


class PlainSelfAttention(nn.Module):
    """Self-attention of tokens (batch, n, d) from three projections; returns (output, None) as its originals do."""

    def __init__(self, q: nn.Module, k: nn.Module, v: nn.Module, out: nn.Module | None, heads, scale, causal=False):
        super().__init__()
        self.q, self.k, self.v, self.out = q, k, v, out
        self.heads, self.scale, self.causal = heads, scale, causal

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[1], self.heads, x.shape[2] // self.heads).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        q, k, v = (self._split(part(hidden_states)) for part in (self.q, self.k, self.v))
        mixed = plain_attention(q, k, v, attention_mask, is_causal=self.causal, scale=self.scale).permute(0, 2, 1, 3)
        mixed = mixed.reshape(-1, mixed.shape[1], mixed.shape[2] * mixed.shape[3])
        return (mixed if self.out is None else self.out(mixed)), None


class PlainMultihead(PlainSelfAttention):
    """torch.nn.MultiheadAttention(batch_first=True) called as attention(x, x, x)."""

    batch_first = False  # what keeps torch's TransformerEncoderLayer off its fused path

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, **kwargs):
        if key is not query or value is not query:
            raise UnsupportedModelError("MultiheadAttention: only self-attention, called with one tensor, is supported")
        if key_padding_mask is not None:
            raise UnsupportedModelError("MultiheadAttention: a key padding mask is not supported; use attn_mask")
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask  # this module's masks mark what may not be read
        return super().forward(query, attn_mask)


def _multihead(part: nn.MultiheadAttention, name: str) -> nn.Module:
    if not part.batch_first:
        raise UnsupportedModelError(
            f"{name}: MultiheadAttention with batch_first=False; the batch dimension must be first"
        )
    if not part._qkv_same_embed_dim or part.bias_k is not None or part.add_zero_attn:
        raise UnsupportedModelError(
            f"{name}: MultiheadAttention with separate key sizes or extra keys is not supported"
        )
    weights = part.in_proj_weight.chunk(3)
    biases = part.in_proj_bias.chunk(3) if part.in_proj_bias is not None else [None] * 3
    layers = [_linear(w, b) for w, b in zip(weights, biases, strict=True)]
    return PlainMultihead(*layers, part.out_proj, part.num_heads, part.head_dim**-0.5)


def _bert(part: nn.Module, name: str) -> nn.Module:
    heads, size = part.num_attention_heads, part.attention_head_size
    return PlainSelfAttention(part.query, part.key, part.value, None, heads, size**-0.5)


def _vit(part: nn.Module, name: str) -> nn.Module:
    if not hasattr(part, "q_proj"):  # older releases wrap a ViTSelfAttention, which is swapped itself
        return part
    layers = part.q_proj, part.k_proj, part.v_proj, part.o_proj
    return PlainSelfAttention(*layers, part.num_attention_heads, part.scaling)


def _gpt2(part: nn.Module, name: str) -> nn.Module:
    if part.is_cross_attention:
        raise UnsupportedModelError(f"{name}: cross-attention is not supported")
    scale = part.head_dim**-0.5 if part.scale_attn_weights else 1.0
    if part.scale_attn_by_inverse_layer_idx:
        scale /= part.layer_idx + 1
    weights, biases = part.c_attn.weight.T.chunk(3), part.c_attn.bias.chunk(3)  # their Conv1D keeps (in, out)
    layers = [_linear(w, b) for w, b in zip(weights, biases, strict=True)]
    return PlainSelfAttention(
        *layers, _linear(part.c_proj.weight.T, part.c_proj.bias), part.num_heads, scale, causal=True
    )


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device=weight.device, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


_BUILDERS = {
    "MultiheadAttention": _multihead,
    "BertSelfAttention": _bert,
    "BertSdpaSelfAttention": _bert,
    "ViTSelfAttention": _bert,
    "ViTAttention": _vit,
    "Dropout": lambda part, name: nn.Identity(),  # does nothing in evaluation mode, and not every version converts it
    "GPT2Attention": _gpt2,
    "GPT2SdpaAttention": _gpt2,
}
