from __future__ import annotations

import math

import pytest
import torch

from attn_bounds.errors import ArgumentError, ShapeError
from attn_bounds.head import AttentionHead
from attn_bounds.ntk import Attack, Ridge, empirical_ntk
from attn_bounds.ntk.malleability import attack_inputs
from attn_bounds.ntk.softmax import EmpiricalKernel, SoftmaxAttention, fit_module, sentences


def test_forward_is_the_written_formula() -> None:
    net = SoftmaxAttention(3, 4, 2, 5)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    for n in range(2):
        z = x[n] + net.position
        rows = []
        for i in range(3):
            s = torch.stack([(z[i] @ net.w_q + net.b_q) @ (z[j] @ net.w_k + net.b_k) / math.sqrt(2) for j in range(3)])
            p = s.exp() / s.exp().sum()
            rows.append(sum(p[j] * (z[j] @ net.w_v + net.b_v) for j in range(3)))
        torch.testing.assert_close(net(x.flatten(1))[n], torch.stack(rows).mean(0) @ net.readout + net.bias)


def test_permuting_tokens_changes_nothing_without_positions() -> None:
    net = SoftmaxAttention(4, 3, 2, 1)
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    assert not torch.allclose(net(x), net(x[:, [2, 0, 3, 1]]))
    with torch.no_grad():
        net.position.zero_()
    torch.testing.assert_close(net(x), net(x[:, [2, 0, 3, 1]]))


def test_from_head_agrees_with_the_head(generator) -> None:
    W = [torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(3)]
    b = [torch.randn(2, generator=generator, dtype=torch.float64) for _ in range(3)]
    head = AttentionHead(*W, b_Q=b[0], b_K=b[1], b_V=b[2])
    net = SoftmaxAttention.from_head(head, 4, 2)
    with torch.no_grad():
        net.readout.copy_(torch.eye(2))
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    expected = torch.stack([head.forward(x, x[i]) for i in range(4)]).mean(0).reshape(-1)
    torch.testing.assert_close(net(x[None])[0], expected)


def test_training_lowers_the_error_and_kernel_moves(digits) -> None:
    split = digits.split(60, 10)
    net = SoftmaxAttention(8, 8, 4, 10)
    before = EmpiricalKernel(net)(split.X)
    torch.testing.assert_close(before, empirical_ntk(net, None, split.X) / 10)
    start = float(((net(split.X) - split.Y) ** 2).sum(1).mean().detach())
    assert fit_module(net, split.X, split.Y, steps=50) < 0.9 * start
    assert not torch.allclose(EmpiricalKernel(net)(split.X), before)


def test_the_attack_reaches_through_the_empirical_kernel(digits) -> None:
    split = digits.split(20, 5)
    kernel = EmpiricalKernel(SoftmaxAttention(8, 8, 3, 10))
    lam = Ridge("dof", 8).resolve(kernel(split.X))
    moved = attack_inputs(kernel, split.X, split.Y, lam, Attack(steps=3))

    def training_loss(X: torch.Tensor) -> float:
        K = kernel(X)
        return float(((K @ torch.linalg.solve(K + lam * torch.eye(20).double(), split.Y) - split.Y) ** 2).sum())

    assert training_loss(moved) > 1.05 * training_loss(split.X)
    assert float((moved - split.X).abs().max()) <= 0.3 + 1e-12


def test_sentences_are_balanced_and_distinct() -> None:
    texts, labels = sentences()
    assert len(set(texts)) == len(texts) == len(labels) and sum(labels) * 2 == len(labels)


def test_bad_input() -> None:
    with pytest.raises(ArgumentError, match="tokens, d, d_head"):
        SoftmaxAttention(0, 4, 2, 1)
    with pytest.raises(ShapeError, match=r"x: expected \(n, 3, 4\)"):
        SoftmaxAttention(3, 4, 2, 1)(torch.ones(2, 5).double())
