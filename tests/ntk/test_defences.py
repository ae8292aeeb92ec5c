from __future__ import annotations

import pandas as pd
import pytest
import torch

from attn_bounds.errors import ArgumentError
from attn_bounds.ntk import Attack, AttendedKernel, LinearizedAttention, Ridge, TwoLayerReLU, two_layer_ntk
from attn_bounds.ntk.defences import AlignedKernel, Defence, best_defence, defences, huber_weights, standard_defences
from attn_bounds.ntk.influence import RidgeInfluence
from attn_bounds.ntk.poisoning import NetworkTraining


def test_some_defence_halves_the_flip_rate_at_no_loss(digits) -> None:
    split = digits.split(300, 300)
    candidates = [
        Defence("none", AttendedKernel()),
        Defence("power 1/4", AttendedKernel(LinearizedAttention(power=0.25))),
        Defence("rank 10", AttendedKernel(LinearizedAttention(rank=10))),
    ]
    table = defences(split, Ridge("dof", 50), candidates=candidates)
    good = best_defence(table)
    assert list(good.defence) == ["power 1/4"]


def test_best_defence_wants_both() -> None:
    table = pd.DataFrame(
        [("none", 0.2, 0.9), ("a", 0.1, 0.9), ("b", 0.05, 0.89), ("c", 0.11, 0.99)],
        columns=["defence", "flip_rate", "clean"],
    )
    assert list(best_defence(table).defence) == ["a"]
    with pytest.raises(ArgumentError, match="reference"):
        best_defence(table, "plain")


def test_aligned_kernel_is_the_limit_of_aligned_networks(digits) -> None:
    split = digits.split(40, 5)
    plain = AlignedKernel(LinearizedAttention(), split.Y, beta=0.0).fit(split.X)
    A = LinearizedAttention().fit(split.X).transform(split.X)
    torch.testing.assert_close(plain(split.X), two_layer_ntk(A), rtol=0, atol=1e-7)
    kernel = AlignedKernel(LinearizedAttention(), split.Y, beta=0.5).fit(split.X)
    draws = torch.stack(
        [TwoLayerReLU.initial(4000, 64, seed=s, covariance=kernel.covariance_).ntk(A) for s in range(8)]
    )
    error = draws.std(0) / 8**0.5
    assert float(((draws.mean(0) - kernel(split.X)).abs() - 5 * error).max()) < 1e-3

    def alignment(K: torch.Tensor) -> float:
        T = split.Y @ split.Y.mT
        return float((K * T).sum() / (K.norm() * T.norm()))

    assert alignment(kernel(split.X)) > alignment(plain(split.X))
    with pytest.raises(ArgumentError, match="beta"):
        AlignedKernel(LinearizedAttention(), split.Y, beta=1.0)


def test_huber_weights_lower_a_wrong_label(digits) -> None:
    split = digits.split(100, 5)
    K = two_layer_ntk(LinearizedAttention(power=0.0).fit(split.X).transform(split.X))
    Y = split.Y.clone()
    Y[7] = Y[7].roll(1)
    weights = huber_weights(K, Y, 0.2)
    assert float(weights.max()) == 1.0 and float(weights[7]) <= float(weights.quantile(0.2))
    assert float(huber_weights(K, split.Y, 0.2)[7]) > float(weights[7])
    residual = (Y - RidgeInfluence(K, K[:1], Y, 0.2, weights=weights).leave_one_out).norm(dim=1)
    small = residual < residual.quantile(0.3)
    assert bool((weights[small] > 0.99).all())


def test_every_standard_defence_runs(digits) -> None:
    split = digits.split(70, 20)
    network = NetworkTraining(width=64, time=2.0)
    table = defences(
        split, Ridge("dof", 20), Attack(steps=2), candidates=standard_defences(split, network), poison_fraction=0.03
    )
    assert len(table) == len(standard_defences(split)) + 4
    assert table.notna().all().all() and table.flip_rate.between(0, 1).all() and table.clean.between(0.3, 1).all()
    plain = table[~table.defence.str.contains("Huber")]
    assert (plain.dof - 20).abs().max() < 1e-6
