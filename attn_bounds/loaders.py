"""Heads out of other people's modules: transformers BERT, GPT-2 and ViT, and torch.nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import ArgumentError, UnsupportedModelError
from .head import AttentionHead


def from_bert(model: Any, layer: int, head: int) -> AttentionHead:
    """Read one head of a transformers BERT (or RoBERTa, ELECTRA, ...: any `encoder.layer[i].attention.self`).

    The head reads hidden_states[layer]. The output projection's bias belongs to no head and is left out.
    Raises: UnsupportedModelError, ArgumentError.
    """
    _refuse_grouped(model)
    encoder = _inner(model, "encoder", "bert", "roberta", "electra", "deberta", "base_model")
    blocks = getattr(encoder, "layer", None)
    if blocks is None or not hasattr(getattr(blocks[0], "attention", None), "self"):
        raise UnsupportedModelError(_not_a("BERT", model, "encoder.layer[i].attention.self"))
    attention = _pick("layer", blocks, layer).attention
    inner = attention.self
    if getattr(inner, "position_embedding_type", "absolute") not in ("absolute", None):
        raise UnsupportedModelError(
            f"model: expected absolute positions, got position_embedding_type={inner.position_embedding_type!r}, "
            "whose scores hold a further term that AttentionHead does not"
        )
    return _slice(inner.query, inner.key, inner.value, attention.output.dense, head, _heads(model, inner))


def from_gpt2(model: Any, layer: int, head: int) -> AttentionHead:
    """Read one head of a transformers GPT-2 (fused Conv1D c_attn).

    The head reads ln_1(hidden_states[layer]) and attends to the prefix only: pass `keys` to HeadProblem.
    Raises: UnsupportedModelError, ArgumentError.
    """
    _refuse_grouped(model)
    blocks = getattr(_inner(model, "h", "transformer", "base_model", owner=True), "h", None)
    if blocks is None or not hasattr(getattr(blocks[0], "attn", None), "c_attn"):
        raise UnsupportedModelError(_not_a("GPT-2", model, "h[i].attn.c_attn"))
    attention = _pick("layer", blocks, layer).attn
    width = attention.c_proj.weight.shape[0]
    count = attention.num_heads
    # Conv1D keeps (in, out); Linear.weight is (out, in).
    q, k, v = attention.c_attn.weight.T.split(width)
    b_q, b_k, b_v = attention.c_attn.bias.split(width)
    rows = _rows(head, count, width // count)
    size = width // count
    scale = size**-0.5 if getattr(attention, "scale_attn_weights", True) else 1.0
    if getattr(attention, "scale_attn_by_inverse_layer_idx", False):
        scale /= layer + 1
    return AttentionHead(
        q[rows], k[rows], v[rows], attention.c_proj.weight.T[:, rows], b_q[rows], b_k[rows], b_v[rows], scale
    )


def from_vit(model: Any, layer: int, head: int) -> AttentionHead:
    """Read one head of a transformers ViT (or DeiT); it reads layernorm_before(hidden_states[layer]).

    Raises: UnsupportedModelError, ArgumentError.
    """
    _refuse_grouped(model)
    base = _inner(model, None, "vit", "deit", "base_model", owner=True)
    blocks = getattr(base, "layers", None)
    if blocks is None:
        blocks = getattr(getattr(base, "encoder", None), "layer", None)
    if blocks is None or not hasattr(blocks[0], "layernorm_before"):
        raise UnsupportedModelError(_not_a("ViT", model, "layers[i].layernorm_before"))
    attention = _pick("layer", blocks, layer).attention
    if hasattr(attention, "q_proj"):  # transformers 5
        parts = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        return _slice(*parts, head, _heads(model, attention))
    inner = attention.attention  # transformers 4
    return _slice(inner.query, inner.key, inner.value, attention.output.dense, head, _heads(model, inner))


def from_multihead_attention(module: torch.nn.MultiheadAttention, head: int) -> AttentionHead:
    """Read one head of a torch.nn.MultiheadAttention whose queries, keys and values have one width.

    Raises: UnsupportedModelError, ArgumentError.
    """
    if not isinstance(module, torch.nn.MultiheadAttention):
        raise UnsupportedModelError(f"module: expected torch.nn.MultiheadAttention, got {type(module).__name__}")
    if module.bias_k is not None or module.add_zero_attn:
        raise UnsupportedModelError("module: expected no added key (add_bias_kv, add_zero_attn), got one")
    width = module.embed_dim
    if module.in_proj_weight is not None:
        q, k, v = module.in_proj_weight.split(width)
    else:
        q, k, v = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        if k.shape[1] != width or v.shape[1] != width:
            raise UnsupportedModelError(
                f"module: expected kdim = vdim = embed_dim = {width}, got kdim {k.shape[1]}, vdim {v.shape[1]}"
            )
    rows = _rows(head, module.num_heads, module.head_dim)
    biases = [None] * 3 if module.in_proj_bias is None else [b[rows] for b in module.in_proj_bias.split(width)]
    return AttentionHead(q[rows], k[rows], v[rows], module.out_proj.weight[:, rows], *biases)


def from_model(model: Any, layer: int, head: int) -> AttentionHead:
    """Read one head of any supported transformers model, by its architecture."""
    _refuse_grouped(model)
    return loader_of(model)(model, layer, head)


def loader_of(model: Any) -> Callable[[Any, int, int], AttentionHead]:
    """Return the loader that reads `model`, by its config's model_type. Raises: UnsupportedModelError."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    loaders = {"bert": from_bert, "roberta": from_bert, "electra": from_bert, "gpt2": from_gpt2, "vit": from_vit}
    loaders["deit"] = from_vit
    if kind not in loaders:
        raise UnsupportedModelError(
            f"model: expected one of {', '.join(loaders)}, got {type(model).__name__} (model_type {kind!r}); "
            "build AttentionHead from its weights instead"
        )
    return loaders[kind]


def _slice(query: Any, key: Any, value: Any, out: Any, head: int, count: int) -> AttentionHead:
    width = query.weight.shape[0]
    if key.weight.shape[0] != width or value.weight.shape[0] != width:
        raise UnsupportedModelError(
            f"model: expected as many key and value heads as query heads, got {width} query rows, "
            f"{key.weight.shape[0]} key rows, {value.weight.shape[0]} value rows (grouped key/value heads)"
        )
    rows = _rows(head, count, width // count)
    biases = [None if part.bias is None else part.bias[rows] for part in (query, key, value)]
    return AttentionHead(query.weight[rows], key.weight[rows], value.weight[rows], out.weight[:, rows], *biases)


def _rows(head: int, count: int, size: int) -> slice:
    if not 0 <= head < count:
        raise ArgumentError(f"head: expected 0..{count - 1}, got {head}")
    return slice(head * size, (head + 1) * size)


def _pick(name: str, blocks: Any, index: int) -> Any:
    if not 0 <= index < len(blocks):
        raise ArgumentError(f"{name}: expected 0..{len(blocks) - 1}, got {index}")
    return blocks[index]


def _heads(model: Any, attention: Any) -> int:
    count = getattr(attention, "num_attention_heads", None)
    return count if count is not None else model.config.num_attention_heads


def _inner(model: Any, name: str | None, *wrappers: str, owner: bool = False) -> Any:
    """Find `name` on the model or, for task models, on the base model inside it."""
    for candidate in (model, *(getattr(model, wrapper, None) for wrapper in wrappers)):
        if candidate is None:
            continue
        if name is None:
            if hasattr(candidate, "layers") or hasattr(candidate, "encoder"):
                return candidate
        elif hasattr(candidate, name):
            return candidate if owner else getattr(candidate, name)
    return None


def _refuse_grouped(model: Any) -> None:
    config = getattr(model, "config", None)
    groups, count = (getattr(config, key, None) for key in ("num_key_value_heads", "num_attention_heads"))
    kind = type(model).__name__
    if groups is not None and count is not None and groups != count:
        raise UnsupportedModelError(
            f"model: {kind} has grouped key/value heads ({groups} for {count} query heads), which this loader does not "
            "read; build AttentionHead from the query head's rows and its group's key and value rows"
        )
    if getattr(config, "rope_theta", None) is not None or getattr(config, "rope_parameters", None) is not None:
        raise UnsupportedModelError(
            f"model: {kind} has rotary positions, whose scores are not a fixed bilinear form; AttentionHead does not "
            "apply to it unless the rotation at the two positions is folded into W_Q and W_K"
        )


def _not_a(family: str, model: Any, path: str) -> str:
    return f"model: expected a transformers {family} (with {path}), got {type(model).__name__}"
