"""swap_attention: the same outputs, and a graph in which attention is found."""

from __future__ import annotations

import pytest
import torch
from attn_bounds_lirpa import attach, swap_attention
from attn_bounds_lirpa.swap import plain_attention
from torch import nn

from attn_bounds.errors import UnsupportedModelError
from tests.lirpa.conftest import attained, ball, convert

pytestmark = pytest.mark.lirpa


def bert():
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(hidden_size=12, num_attention_heads=3, intermediate_size=16, hidden_act="relu")
    return Only(BertLayer(config))


def gpt2():
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    config = GPT2Config(n_embd=12, n_head=3, attn_implementation="eager")
    return CausalReference(GPT2Attention(config, layer_idx=0))


def vit():
    from transformers import ViTConfig
    from transformers.models.vit.modeling_vit import ViTAttention

    config = ViTConfig(hidden_size=12, num_attention_heads=3, intermediate_size=16, attn_implementation="sdpa")
    return Only(ViTAttention(config))


class Only(nn.Module):
    """The first output of a module, as a model of one tensor."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        out = self.part(x)
        return out[0] if isinstance(out, tuple) else out


class CausalReference(Only):
    """GPT-2's attention alone; its eager form takes the causal mask from the outside."""

    mask = torch.triu(torch.full((1, 1, 4, 4), -1e9, dtype=torch.float64), 1)

    def forward(self, x):
        return self.part(x, attention_mask=self.mask)[0]


class Multihead(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x):
        q, k, v = (part.reshape(-1, x.shape[1], 3, 4).permute(0, 2, 1, 3) for part in self.qkv(x).chunk(3, 2))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).permute(0, 2, 1, 3)


@pytest.mark.parametrize("build", [Multihead, Functional, bert, gpt2, vit])
def test_swapped_models_give_the_same_outputs_and_sound_bounds(build):
    torch.manual_seed(0)
    model, x = build().double().eval(), torch.randn(1, 4, 12)
    swapped = swap_attention(model)
    torch.testing.assert_close(swapped(x), model(x), rtol=0, atol=1e-12)
    network = convert(swapped, x)
    report = attach(network)
    assert len(report["fused"]) == 1, report
    torch.testing.assert_close(network(x), model(x), rtol=1e-12, atol=1e-12)
    C = torch.randn(1, 3, 48)
    lower, upper = network.compute_bounds(x=(ball(x, 0.02),), C=C.reshape(1, 3, *network(x).shape[1:]), method="CROWN")
    low, high = attained(model, x, 0.02, C=C[0], samples=200, steps=5)
    assert (lower <= low + 1e-9).all() and (upper >= high - 1e-9).all()


@pytest.mark.parametrize("mask", [None, torch.tensor([[True, False, True], [True, True, False]]), torch.randn(2, 3)])
def test_plain_attention_is_torch_attention(mask):
    q, k, v = torch.randn(2, 2, 2, 5), torch.randn(2, 2, 3, 5), torch.randn(2, 2, 3, 4)
    for scale in (None, 0.3):
        expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        torch.testing.assert_close(plain_attention(q, k, v, mask, scale=scale), expected)


def test_what_is_not_supported_is_named():
    with pytest.raises(UnsupportedModelError, match="batch dimension must be first"):
        swap_attention(nn.Sequential(nn.MultiheadAttention(12, 3)))
    with pytest.raises(UnsupportedModelError, match="grouped heads"):
        plain_attention(torch.randn(1, 4, 2, 3), torch.randn(1, 2, 2, 3), torch.randn(1, 2, 2, 3), enable_gqa=True)
    cross = Multihead()
    cross.forward = lambda x: cross.attention(x, 2 * x, x)[0]
    with pytest.raises(UnsupportedModelError, match="self-attention"):
        part = swap_attention(cross.attention)
        part(torch.randn(1, 2, 12), torch.randn(1, 2, 12), torch.randn(1, 2, 12))
