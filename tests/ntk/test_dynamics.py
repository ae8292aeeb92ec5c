from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from attn_bounds.errors import ArgumentError
from attn_bounds.ntk import (
    ConvergenceSettings,
    LinearizedAttention,
    TwoLayerReLU,
    convergence,
    gradient_flow_prediction,
    kernel_alignment,
    kernel_distance,
    train_network,
    two_layer_ntk,
)
from attn_bounds.ntk.dynamics import MODELS, slope


@pytest.fixture(scope="module")
def pair(digits):
    """3 against 8: 250 to train on, the other 107 to test on."""
    return digits.subset("3", "8").split(250, 107)


def test_gradient_flow_solves_its_equation() -> None:
    rng = torch.Generator().manual_seed(0)
    A = torch.randn(8, 5, generator=rng, dtype=torch.float64)
    K, Kz = A @ A.mT, A[:3] @ A.mT  # rank 5: three eigenvalues are 0
    Y, start = (torch.randn(8, 2, generator=rng, dtype=torch.float64) for _ in range(2))
    f, fz, h = start.clone(), torch.zeros(3, 2).double(), 1e-4
    for _ in range(5000):
        residual = Y - f
        f, fz = f + h * K @ residual, fz + h * Kz @ residual
    step = gradient_flow_prediction(K, Kz, Y, 0.5, start_train=start, learning_rate=h)
    torch.testing.assert_close(step, fz, rtol=0, atol=1e-10)
    flow = gradient_flow_prediction(K, Kz, Y, 0.5, start_train=start)
    torch.testing.assert_close(flow, fz, rtol=0, atol=1e-2)
    assert not torch.equal(flow, step)
    torch.testing.assert_close(
        gradient_flow_prediction(K + torch.eye(8), Kz, Y, 1e4), Kz @ torch.linalg.solve(K + torch.eye(8), Y)
    )
    with pytest.raises(ArgumentError, match="diverges"):
        gradient_flow_prediction(K, Kz, Y, 1.0, learning_rate=3.0 / float(torch.linalg.eigvalsh(K)[-1]))


def test_training_is_gradient_descent_on_the_stated_loss() -> None:
    rng = torch.Generator().manual_seed(1)
    X, Y = (torch.randn(6, k, generator=rng, dtype=torch.float64) for k in (3, 2))
    net = TwoLayerReLU.initial(7, 3, 2, seed=3)
    W = net.weights.clone().requires_grad_(True)
    loss = ((TwoLayerReLU(W, net.signs)(X) - net(X) - Y) ** 2).sum() / 2
    (gradient,) = torch.autograd.grad(loss, W)
    trained, copies = train_network(net, X, Y, steps=1, learning_rate=0.1, at=(1,))
    torch.testing.assert_close(trained.weights, net.weights - 0.1 * gradient)
    torch.testing.assert_close(copies[0].weights, trained.weights)
    clipped, _ = train_network(net, X, Y, steps=1, learning_rate=0.1, clip=1e-3)
    assert float((clipped.weights - net.weights).norm()) < 0.01 * float((trained.weights - net.weights).norm())


@pytest.mark.parametrize("model", list(MODELS))
def test_kernel_distance_falls_as_one_over_root_width(pair, model: str) -> None:
    attention: LinearizedAttention = MODELS[model]
    A = attention.fit(pair.X).transform(pair.X)
    K = two_layer_ntk(A)
    widths = (64, 256, 1024, 4096, 16384)
    distances = [
        np.mean([kernel_distance(TwoLayerReLU.initial(m, A.shape[1], seed=s).ntk(A), K) for s in range(6)])
        for m in widths
    ]
    assert slope(widths, distances) == pytest.approx(-0.5, abs=0.1)


def test_distances_of_a_kernel_to_itself() -> None:
    K = two_layer_ntk(torch.eye(4).double() + 0.1)
    assert kernel_distance(K, K) == 0.0 and kernel_alignment(K, 3 * K) == pytest.approx(1.0)
    assert kernel_distance(2 * K, K) == pytest.approx(1.0)


def test_prediction_distance_by_width(pair) -> None:
    """The published measure, relative: ReLU and centred attention converge, uncentred attention stays on a plateau."""
    settings = ConvergenceSettings(widths=(64, 4096), seeds=1, time=3.0, checkpoints=1)
    table = convergence(pair.X, pair.Y, pair.X_test, settings)
    last = table[table.fraction == 1].set_index(["model", "width"]).prediction_distance
    assert last["relu", 4096] < 0.04 < last["relu", 64]
    assert last["attention centred", 4096] < 0.03 < last["attention centred", 64]
    small, large = (last["attention uncentred", m] for m in (64, 4096))
    assert min(small, large) >= 0.6 and abs(large / small - 1) < 0.05
    first = table[table.fraction == 0]
    assert (first.kernel_moved == 0).all() and (first.kernel_distance > 0).all()
    assert first.prediction_distance.isna().all() and (first.prediction_rms == 0).all()


def test_finished_runs_are_not_repeated(pair, tmp_path, monkeypatch) -> None:
    path = tmp_path / "runs" / "convergence.jsonl"
    settings = ConvergenceSettings(widths=(8, 16), seeds=2, time=3.0, checkpoints=2, models=("attention centred",))
    data = (pair.X[:30], pair.Y[:30], pair.X_test[:5])
    first = convergence(*data, settings, resume=path)
    assert len(path.read_text().splitlines()) == 4 and len(first) == 4 * 3
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])  # interrupted while writing the last run
    again = convergence(*data, settings, resume=path)
    assert again.equals(first)

    def forbidden(*args, **kwargs):
        raise RuntimeError("trained again")

    monkeypatch.setattr("attn_bounds.ntk.dynamics.train_network", forbidden)
    path.write_text("\n".join(lines) + "\n")
    assert convergence(*data, settings, resume=path).equals(first)
    with pytest.raises(RuntimeError, match="trained again"):  # other data: other runs
        convergence(pair.X[:31], pair.Y[:31], pair.X_test[:5], settings, resume=path)
    path.write_text("not json\n" + json.dumps({"key": "k", "rows": []}) + "\n")
    with pytest.raises(ArgumentError, match="line 1 is not a finished run"):
        convergence(*data, settings, resume=path)


def test_settings_are_checked(pair) -> None:
    for settings, names in (
        (ConvergenceSettings(models=("gru",)), "models: expected"),
        (ConvergenceSettings(seeds=0), "at least one seed"),
    ):
        with pytest.raises(ArgumentError, match=names):
            convergence(pair.X, pair.Y, pair.X_test, settings)
