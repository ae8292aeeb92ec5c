"""AttentionHead and its loaders against the modules they were read from."""

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    ViTConfig,
    ViTModel,
)

import attn_bounds as ab
from tests.conftest import random_head


def tokens(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_sums_to(module_output: torch.Tensor, heads: list, z: torch.Tensor, bias: torch.Tensor, causal=False) -> None:
    for i in range(z.shape[0]):
        keys = torch.arange(z.shape[0]) <= i if causal else None
        total = sum(head.forward(z, i, keys) for head in heads) + bias
        assert torch.allclose(module_output[i], total, atol=1e-12)


def test_forward_is_softmax_attention(rng):
    head = random_head(rng, 5, 3)
    z = rng.standard_normal((4, 5))
    q, k = z[2] @ head.W_Q.numpy().T + head.b_Q.numpy(), z @ head.W_K.numpy().T + head.b_K.numpy()
    e = np.exp(k @ q / np.sqrt(3))
    expected = head.W_O.numpy() @ ((e / e.sum()) @ (z @ head.W_V.numpy().T + head.b_V.numpy()))
    assert np.allclose(head.forward(z, 2), expected, atol=1e-13)
    assert np.allclose(head.forward(z, z[2]), expected, atol=1e-13)
    batch = head.forward(np.stack([z, z + 1]), 2)
    assert np.allclose(batch[0], expected, atol=1e-13) and batch.shape == (2, 3)


def test_any_dtype_goes_in_and_float64_comes_out(rng):
    w = rng.standard_normal((2, 4)).astype(np.float16)
    head = ab.AttentionHead(w, torch.as_tensor(w).bfloat16(), torch.as_tensor(w).float())
    assert {head.W_Q.dtype, head.W_K.dtype, head.W_V.dtype} == {torch.float64}
    tokens = np.ones((2, 4), np.float32)
    assert head.forward(tokens, 0).dtype == np.float64
    assert head.forward(torch.as_tensor(tokens), 0).dtype == torch.float64


@pytest.mark.parametrize("wrap", [False, True])
def test_bert_heads_sum_to_the_block(wrap):
    config = BertConfig(hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=8, vocab_size=9)
    model = (BertForSequenceClassification if wrap else BertModel)(config).double().eval()
    block = (model.bert if wrap else model).encoder.layer[1].attention
    z = tokens(4, 12)
    heads = [ab.from_bert(model, 1, i) for i in range(3)]
    inner = block.self(z[None])[0][0]
    assert_sums_to(block.output.dense(inner), heads, z, block.output.dense.bias)


def test_gpt2_heads_sum_to_the_block():
    config = GPT2Config(n_embd=12, n_layer=2, n_head=3, vocab_size=9, scale_attn_by_inverse_layer_idx=True)
    model = GPT2LMHeadModel(config).double().eval()
    block = model.transformer.h[1].attn
    z = tokens(4, 12)
    mask = torch.full((4, 4), -1e30, dtype=torch.float64).triu(1)[None, None]
    heads = [ab.AttentionHead.from_gpt2(model, 1, i) for i in range(3)]
    assert_sums_to(block(z[None], attention_mask=mask)[0][0], heads, z, block.c_proj.bias, causal=True)


def test_vit_heads_sum_to_the_block():
    config = ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=8, image_size=8, patch_size=4
    )
    model = ViTModel(config).double().eval()
    layer = (model.layers if hasattr(model, "layers") else model.encoder.layer)[1]
    z = tokens(5, 12)
    out = layer.attention(z[None])
    out = (out[0] if isinstance(out, tuple) else out)[0]
    projection = layer.attention.o_proj if hasattr(layer.attention, "o_proj") else layer.attention.output.dense
    assert_sums_to(out, [ab.from_vit(model, 1, i) for i in range(3)], z, projection.bias)


@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention_heads_sum_to_the_module(bias):
    module = torch.nn.MultiheadAttention(12, 3, bias=bias, batch_first=True).double()
    z = tokens(4, 12)
    out = module(z[None], z[None], z[None])[0][0]
    heads = [ab.from_multihead_attention(module, i) for i in range(3)]
    assert_sums_to(out, heads, z, module.out_proj.bias if bias else torch.zeros(12))


@pytest.mark.parametrize("loader", [ab.from_bert, ab.from_gpt2, ab.from_vit, ab.from_model])
@pytest.mark.parametrize("kind", [(LlamaConfig, LlamaModel), (MistralConfig, MistralModel)])
def test_grouped_heads_are_refused(loader, kind):
    config = kind[0](
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=8,
        vocab_size=9,
    )
    with pytest.raises(ab.errors.UnsupportedModelError, match="grouped key/value heads"):
        loader(kind[1](config), 0, 0)


def test_other_models_and_indices_are_refused():
    config = BertConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=8, vocab_size=9)
    model = BertModel(config)
    with pytest.raises(ab.errors.ArgumentError, match=r"head: expected 0\.\.2, got 3"):
        ab.from_bert(model, 0, 3)
    with pytest.raises(ab.errors.ArgumentError, match=r"layer: expected 0\.\.0, got -1"):
        ab.from_bert(model, -1, 0)
    with pytest.raises(ab.errors.UnsupportedModelError, match="GPT-2"):
        ab.from_gpt2(model, 0, 0)
    with pytest.raises(ab.errors.UnsupportedModelError, match="MultiheadAttention"):
        ab.from_multihead_attention(torch.nn.Linear(2, 2), 0)
    with pytest.raises(ab.errors.UnsupportedModelError, match="kdim"):
        ab.from_multihead_attention(torch.nn.MultiheadAttention(12, 3, kdim=6), 0)


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ({"W_K": np.ones((1, 4))}, r"W_K: expected \(2, 4\).*grouped"),
        ({"W_V": np.ones((2, 3))}, r"W_V: expected \(d_head, d\)|W_V: expected \(d_v, 4\), got \(2, 3\)"),
        ({"W_O": np.ones((3, 5))}, r"W_O: expected \(d_out, 2\), got \(3, 5\)"),
        ({"b_Q": np.ones(3)}, r"b_Q: expected \(2,\), got \(3,\)"),
        ({"W_Q": np.full((2, 4), np.nan)}, "W_Q: expected finite"),
        ({"scale": float("inf")}, "scale: expected a finite"),
        ({"W_Q": "words"}, "W_Q: expected an array of numbers"),
    ],
)
def test_bad_weights_are_named(weights, match):
    good = {"W_Q": np.ones((2, 4)), "W_K": np.ones((2, 4)), "W_V": np.ones((2, 4))}
    with pytest.raises(ab.errors.ArgumentError, match=match):
        ab.AttentionHead(**(good | weights))
