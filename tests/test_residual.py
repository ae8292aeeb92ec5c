"""Second-order terms of blocks: they add up to the Hessian, and the sum of their maxima covers the joint one."""

import importlib.util

import numpy as np
import pytest
import torch
from torch.func import grad, jvp
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

from attn_bounds import errors
from attn_bounds.residual import BlockReadout, Joint, block_of, block_residual, second_order_terms

N, D = 3, 12


def small_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT2Model(GPT2Config(n_embd=D, n_layer=2, n_head=3, vocab_size=20, n_positions=8))
    else:
        model = BertModel(
            BertConfig(
                hidden_size=D, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, vocab_size=20,
                max_position_embeddings=8,
            )
        )  # fmt: skip
    with torch.no_grad():  # the initial weights are so small that attention is uniform
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double().eval().requires_grad_(False)


def unit(kind: str, layer: int = 0) -> tuple[torch.nn.Module, BlockReadout]:
    model = small_model(kind)
    states = model(input_ids=torch.tensor([[3, 7, 11]]), output_hidden_states=True).hidden_states
    readout = np.random.default_rng(1).standard_normal(D)
    return model, BlockReadout(block_of(model, layer), states[layer][0], N - 1, readout)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_the_block_is_the_models_own(kind):
    model, g = unit(kind)
    states = model(input_ids=torch.tensor([[3, 7, 11]]), output_hidden_states=True).hidden_states
    after = states[1][0] if kind == "bert" else model.h[1].ln_1(states[1])[0]
    assert float(g(torch.zeros(N, D, dtype=torch.float64))) == pytest.approx(float(after[-1] @ g.readout), abs=1e-12)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("split", [False, True])
def test_the_terms_add_up_to_the_hessian(kind, split):
    _, g = unit(kind)
    zero = torch.zeros(N, D, dtype=torch.float64)
    terms = second_order_terms(g, split)
    for seed in range(3):
        w = torch.randn(N, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        whole = float((jvp(grad(g), (zero,), (w,))[1] * w).sum() / 2)
        parts = sum(float(t.form(w.flatten())) for found in terms.values() for t in found)
        assert parts == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_each_maximum_is_one(kind):
    """Each term's closed-form maximum covers its value everywhere, and a single operation attains its own."""
    _, g = unit(kind)
    draw = torch.Generator().manual_seed(0)
    for found in (*second_order_terms(g).values(), *second_order_terms(g, True).values()):
        for term in found:
            w = torch.randn(200, N * D, generator=draw, dtype=torch.float64)
            w = w / w.norm(dim=-1, keepdim=True)
            assert max(float(term.form(v)) for v in w) <= float(term.maximum()) * (1 + 1e-9) + 1e-15
            if isinstance(term, Joint):
                each = [Joint(term.hessian[m : m + 1], term.g[m : m + 1]) for m in range(len(term.g))]
                tops = [torch.linalg.eigvalsh(t.g[0].T @ t.hessian[0] @ t.g[0])[-1].clamp_min(0) / 2 for t in each]
                assert float(sum(tops)) == pytest.approx(float(term.maximum()), rel=1e-8)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_the_residual_against_the_dense_hessian(kind):
    _, g = unit(kind)
    zero = torch.zeros(N, D, dtype=torch.float64)
    dense = torch.autograd.functional.hessian(g, zero).reshape(N * D, N * D)
    values = torch.linalg.eigvalsh(dense)
    r = block_residual(g, 1e-4)
    assert r.second_order == pytest.approx(1e-8 * float(values[-1]) / 2, rel=1e-5)
    assert r.attained == pytest.approx(r.second_order, rel=0.02)
    assert r.per_operation >= r.second_order and r.per_operation_split >= r.second_order
    assert r.effective_rank == pytest.approx(float(values.square().sum() / values.abs().max() ** 2), rel=0.6)
    assert r.predicted >= 1 and sum(r.by_operation.values()) == pytest.approx(r.per_operation)


@pytest.mark.lirpa
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_crown_lies_above_what_is_attained(kind):
    if importlib.util.find_spec("auto_LiRPA") is None:
        pytest.skip("needs auto_LiRPA")
    try:
        from attn_bounds_lirpa.blocks import crown_upper
    except errors.MissingDependencyError as error:
        pytest.skip(str(error))
    _, g = unit(kind)
    for split in (False, True):
        assert crown_upper(g, 1e-3, split) >= block_residual(g, 1e-3).attained > 0


def test_errors():
    model, g = unit("gpt2")
    with pytest.raises(errors.ArgumentError, match="layer"):
        block_of(model, 5)
    with pytest.raises(errors.ArgumentError, match="position"):
        BlockReadout(g.block, g.stream, 3, g.readout)
    with pytest.raises(errors.ArgumentError, match="radius"):
        block_residual(g, 0.0)
    with pytest.raises(errors.ShapeError, match="readout"):
        BlockReadout(g.block, g.stream, 0, g.readout[:-1])
