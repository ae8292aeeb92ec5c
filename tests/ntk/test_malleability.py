from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from attn_bounds.errors import ArgumentError, NotFiniteError, ShapeError
from attn_bounds.ntk import (
    Attack,
    AttendedKernel,
    LinearizedAttention,
    Ridge,
    flip_rate,
    malleability,
    rank_correlation,
    two_layer_ntk,
)
from attn_bounds.ntk.malleability import attack_inputs, fitted, ratios, saturation


def kernels() -> dict[str, AttendedKernel]:
    return {"relu": AttendedKernel(LinearizedAttention(power=0.0)), "attention": AttendedKernel()}


def test_flip_rate_counts_signs_of_the_most_influential() -> None:
    before = torch.tensor([[5.0], [-4.0], [1.0], [0.5]])
    after = torch.tensor([[-1.0], [-4.0], [-1.0], [-0.5]])
    assert flip_rate(before, after, fraction=0.25) == 1.0
    assert flip_rate(before, after, fraction=0.5) == 0.5
    assert flip_rate(before, before) == 0.0
    assert flip_rate(before[..., None].expand(4, 1, 3), after[..., None].expand(4, 1, 3), fraction=0.5) == 0.5


def test_rank_correlation_is_spearman() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 30, 4))
    expected = np.mean([pd.Series(a[:, j]).corr(pd.Series(b[:, j]), method="spearman") for j in range(4)])
    assert rank_correlation(torch.tensor(a), torch.tensor(b)) == pytest.approx(expected)
    assert np.isnan(rank_correlation(torch.ones(3, 2), torch.tensor(b[:3, :2])))


def test_bad_influences() -> None:
    with pytest.raises(ShapeError):
        flip_rate(torch.ones(3, 2), torch.ones(2, 3))
    with pytest.raises(NotFiniteError):
        flip_rate(torch.ones(3, 2), torch.full((3, 2), torch.nan))
    with pytest.raises(ArgumentError, match="fraction"):
        flip_rate(torch.ones(3, 2), torch.ones(3, 2), fraction=0.0)


@pytest.mark.parametrize(
    "attack",
    [Attack(norm="linf"), Attack(norm="l2", epsilon=1.0), Attack(bounds=(0.0, 1.0)), Attack(objective="fixed")],
)
def test_attack_stays_inside_and_raises_the_training_loss(digits, attack: Attack) -> None:
    split = digits.split(60, 5)
    kernel = AttendedKernel()
    lam = 0.5
    moved = attack_inputs(kernel, split.X, split.Y, lam, attack)
    noisy = attack.noise(split.X)
    for X in (moved, noisy):
        D = X - split.X
        size = D.abs().max() if attack.norm == "linf" else D.norm(dim=1).max()
        assert float(size) <= attack.epsilon * (1 + 1e-12)
        if attack.bounds is not None:
            assert float(X.min()) >= 0 and float(X.max()) <= 1

    def training_loss(X: torch.Tensor) -> float:
        if attack.objective == "fixed":
            K = fitted(kernel, split.X)
            alpha = torch.linalg.solve(K(split.X) + lam * torch.eye(60).double(), split.Y)
            return float(((K(X, split.X) @ alpha - split.Y) ** 2).sum())
        K = fitted(kernel, X)(X)
        return float(((K @ torch.linalg.solve(K + lam * torch.eye(60).double(), split.Y) - split.Y) ** 2).sum())

    assert training_loss(moved) > training_loss(noisy) > 0
    assert training_loss(moved) > 1.1 * training_loss(split.X)
    assert not hasattr(kernel.attention, "mean_")  # the caller's kernel is left alone


def test_frozen_attention_keeps_the_clean_matrix(digits) -> None:
    split = digits.split(50, 5)
    a, b = (attack_inputs(AttendedKernel(), split.X, split.Y, 0.5, Attack(steps=3), frozen=f) for f in (True, False))
    assert not torch.equal(a, b)


def test_flip_rates_at_small_scale(digits) -> None:
    table = malleability(kernels(), digits.split(300, 100), Ridge("dof", 50))
    assert set(table.condition) == {"adversarial", "random", "frozen"}
    assert (table.dof - 50).abs().max() < 1e-6
    hat = table[table.influence == "hat"].set_index(["model", "condition"]).flip_rate
    assert hat["attention", "adversarial"] > 2 * hat["relu", "adversarial"]
    assert hat["attention", "adversarial"] > hat["attention", "random"]
    assert saturation(table) is None


@pytest.mark.slow
def test_flip_rates_of_five_seeds(digits) -> None:
    tables = []
    for seed in range(5):
        table = malleability(kernels(), digits.split(1000, 300, seed), Ridge("dof", 50), conditions=("adversarial",))
        tables.append(table.assign(seed=seed))
    ratio = ratios(pd.concat(tables), "relu").set_index("influence").flip_ratio
    assert ratio["hat"] >= 2.5 and ratio["prediction"] >= 2 and ratio["loss"] >= 2


def test_ratios_over_seeds() -> None:
    rows = [
        {"model": m, "condition": "adversarial", "influence": "hat", "seed": s, "flip_rate": f, "max_influence": x}
        for m, s, f, x in (
            ("relu", 0, 0.1, 1.0),
            ("relu", 1, 0.2, 1.0),
            ("attention", 0, 0.4, 1.5),
            ("attention", 1, 0.4, 0.5),
        )
    ]
    row = ratios(pd.DataFrame(rows), "relu").iloc[0]
    assert (row.flip_ratio, row.flip_ratio_min, row.flip_ratio_max) == pytest.approx((3.0, 2.0, 4.0))
    assert (row.max_ratio_min, row.max_ratio_max) == pytest.approx((0.5, 1.5))
    with pytest.raises(ArgumentError, match="baseline"):
        ratios(pd.DataFrame(rows), "gru")


def test_a_saturating_epsilon_is_said(digits) -> None:
    table = malleability(
        kernels(), digits.split(100, 30), Ridge("dof", 20), Attack(epsilon=20.0), conditions=("adversarial",)
    )
    message = saturation(table)
    assert message is not None and "smaller epsilon" in message


def test_kernels_without_fit_have_no_frozen_condition(digits) -> None:
    table = malleability({"raw": two_layer_ntk}, digits.split(40, 5), Ridge("dof", 10), Attack(steps=2))
    assert set(table.condition) == {"adversarial", "random"}


@pytest.mark.parametrize(
    "options", [{"epsilon": 0.0}, {"norm": "l1"}, {"objective": "flip"}, {"steps": 0}, {"epsilon": float("nan")}]
)
def test_bad_attack(options) -> None:
    with pytest.raises(ArgumentError):
        Attack(**options)


def test_attack_needs_a_ridge(digits) -> None:
    split = digits.split(10, 2)
    with pytest.raises(ArgumentError, match="ridge"):
        attack_inputs(AttendedKernel(), split.X, split.Y, 0.0, Attack())
