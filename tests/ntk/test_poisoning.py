from __future__ import annotations

import pytest
import torch

from attn_bounds.errors import ArgumentError
from attn_bounds.ntk import AttendedKernel, LinearizedAttention, Ridge
from attn_bounds.ntk.data import encode_labels
from attn_bounds.ntk.influence import RidgeInfluence
from attn_bounds.ntk.malleability import fitted
from attn_bounds.ntk.poisoning import METHODS, NetworkTraining, choose_flips, poisoning


@pytest.fixture(scope="module")
def problem(digits):
    split = digits.split(80, 40)
    kernel = fitted(AttendedKernel(), split.X)
    return RidgeInfluence(kernel(split.X), kernel(split.X_test, split.X), split.Y, 0.3), split


def loss_after(solved, split, y) -> float:
    F = solved.hat().mT @ encode_labels(y, 10)
    return float(((F - split.Y_test) ** 2).sum())


@pytest.mark.parametrize("method", METHODS)
def test_exactly_the_budget_is_flipped(problem, method: str) -> None:
    solved, split = problem
    y = choose_flips(solved, split, 7, method)
    assert int((y != split.y).sum()) == 7
    assert int(y.min()) >= 0 and int(y.max()) <= 9


def test_one_greedy_flip_is_the_best_of_all(problem) -> None:
    solved, split = problem
    best = max(
        loss_after(solved, split, split.y.index_fill(0, torch.tensor([i]), c)) for i in range(80) for c in range(10)
    )
    for method in ("greedy", "influence"):
        assert loss_after(solved, split, choose_flips(solved, split, 1, method)) == pytest.approx(best, rel=1e-12)


def test_chosen_flips_beat_random_ones(problem) -> None:
    solved, split = problem
    losses = {m: loss_after(solved, split, choose_flips(solved, split, 6, m)) for m in METHODS}
    assert losses["greedy"] >= losses["influence"] > losses["random"]


def test_two_classes(digits) -> None:
    split = digits.subset("3", "8").split(60, 30)
    kernel = fitted(AttendedKernel(), split.X)
    solved = RidgeInfluence(kernel(split.X), kernel(split.X_test, split.X), split.Y, 0.3)
    for method in METHODS:
        assert int((choose_flips(solved, split, 5, method) != split.y).sum()) == 5


def test_table(digits) -> None:
    split = digits.split(120, 60)
    kernels = {"ReLU": AttendedKernel(LinearizedAttention(power=0.0)), "attention": AttendedKernel()}
    table = poisoning(kernels, split, Ridge("dof", 40), fraction=0.02, network=NetworkTraining(width=32, time=2.0))
    assert len(table) == 4 * 4 and (table.flips == 2).all()
    assert set(table.model) == {"ReLU kernel", "ReLU network", "attention kernel", "attention network"}
    assert (table["drop"] - (table.clean - table.poisoned)).abs().max() < 1e-12
    assert table["drop"].max() < 0.15  # the published drop does not reproduce


def test_momentum_reaches_the_same_training_time(digits) -> None:
    split = digits.split(60, 10)
    A = AttendedKernel().fit(split.X).attention.transform(split.X)
    ends = [NetworkTraining(width=64, time=20.0, momentum=m).train(A, split.Y)[1](A) for m in (0.0, 0.9)]
    assert float((ends[0] - ends[1]).norm() / ends[0].norm()) < 0.15


def test_bad_input(problem) -> None:
    solved, split = problem
    with pytest.raises(ArgumentError, match="method: expected one of"):
        choose_flips(solved, split, 1, "best")
    with pytest.raises(ArgumentError, match="budget: expected"):
        choose_flips(solved, split, 80, "greedy")
    with pytest.raises(ArgumentError, match="fraction: expected"):
        poisoning({}, split, Ridge("dof", 10), fraction=0.7)
    with pytest.raises(ArgumentError, match="momentum"):
        NetworkTraining(momentum=1.0).train(split.X, split.Y)
