from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from attn_bounds.errors import ArgumentError, MethodNotApplicableError, NotFiniteError, ShapeError
from attn_bounds.ntk import (
    AttendedKernel,
    GramKernel,
    InfiniteReLU,
    KernelInfluence,
    LinearizedAttention,
    ModelInfluence,
    Ridge,
    top_k,
    two_layer_ntk,
)
from attn_bounds.ntk.influence import RidgeInfluence


def refit(kernel, X, Y, Z, ridge, leave_out=None):
    """Kernel ridge regression the obvious way; the kernel is used as it is (fitted on all of X)."""
    keep = np.arange(len(X)) != (-1 if leave_out is None else leave_out)
    K = kernel(X[keep])
    alpha = np.linalg.solve(K + ridge * np.eye(keep.sum()), Y[keep])
    return kernel(Z, X[keep]) @ alpha


# Kernels and degrees of freedom. The Gram kernel's eigenvalues fall with the cube: at 20 degrees of freedom the linear
# system itself loses more than the ten digits asked for.
KERNELS = {
    "relu": (two_layer_ntk, 20),
    "deep": (InfiniteReLU(depth=3, bias_std=0.2), 20),
    "attention": (AttendedKernel(LinearizedAttention()), 20),
    "root attention": (AttendedKernel(LinearizedAttention(power=0.5)), 20),
    "gram": (GramKernel(1.0), 6),
}


@pytest.mark.parametrize("name", list(KERNELS))
def test_leave_one_out_equals_refitting(digits, name) -> None:
    kernel, dof = KERNELS[name]
    split = digits.split(60, 7)
    X, Y, Z, Yz = (t.numpy() for t in (split.X, split.Y, split.X_test, split.Y_test))
    model = KernelInfluence(kernel, Ridge("dof", dof)).fit(X, Y)
    assert model.degrees_of_freedom_ == pytest.approx(dof, abs=1e-6)
    full = refit(kernel, X, Y, Z, model.ridge_)
    np.testing.assert_allclose(model.predict(Z), full, atol=1e-10)
    prediction, loss, hat = model.prediction(Z), model.loss(Z, Yz), model.hat(Z)
    assert prediction.shape == (60, 7, 10) and loss.shape == hat.shape == (60, 7)
    for i in range(60):
        without = refit(kernel, X, Y, Z, model.ridge_, leave_out=i)
        np.testing.assert_allclose(prediction[i], full - without, atol=1e-10)
        change = ((without - Yz) ** 2).sum(1) - ((full - Yz) ** 2).sum(1)
        np.testing.assert_allclose(loss[i], change, atol=1e-10)
        bumped = Y.copy()
        bumped[i, 3] += 1.0
        np.testing.assert_allclose(hat[i], (refit(kernel, X, bumped, Z, model.ridge_) - full)[:, 3], atol=1e-10)


def test_leave_one_out_predictions_of_the_training_points(digits) -> None:
    split = digits.split(40, 5)
    K = two_layer_ntk(split.X)
    solved = RidgeInfluence(K, K[:5], split.Y, 0.3)
    for i in (0, 17):
        keep = torch.arange(40) != i
        alpha = torch.linalg.solve(K[keep][:, keep] + 0.3 * torch.eye(39).double(), split.Y[keep])
        torch.testing.assert_close(solved.leave_one_out[i], K[i, keep] @ alpha, rtol=0, atol=1e-10)


def test_weights_are_weights_of_squared_errors(digits) -> None:
    split = digits.split(30, 4)
    K, Kz = two_layer_ntk(split.X), two_layer_ntk(split.X_test, split.X)
    weights = torch.linspace(0.2, 2, 30, dtype=torch.float64)
    solved = RidgeInfluence(K, Kz, split.Y, 0.5, weights=weights)
    # minimise sum_i w_i |f(x_i) - y_i|^2 + 0.5 |f|^2_K over f = K alpha:  (W K + 0.5) alpha = W Y
    alpha = torch.linalg.solve(weights[:, None] * K + 0.5 * torch.eye(30).double(), weights[:, None] * split.Y)
    torch.testing.assert_close(solved.predictions, Kz @ alpha, rtol=0, atol=1e-10)


def test_ridge_rules(digits) -> None:
    split = digits.split(80, 5)
    K = two_layer_ntk(split.X)
    assert Ridge("value", 0.25).resolve(K) == 0.25
    assert Ridge("relative", 0.1).resolve(K) == pytest.approx(0.1 * float(K.diagonal().mean()))
    lam = Ridge("dof", 30).resolve(K)
    assert float(torch.trace(K @ torch.linalg.inv(K + lam * torch.eye(80).double()))) == pytest.approx(30, abs=1e-6)
    lam = Ridge("accuracy", 0.8).resolve(K, split.Y)
    loo = RidgeInfluence(K, K, split.Y, lam).leave_one_out
    assert float((loo.argmax(1) == split.y).double().mean()) >= 0.8
    assert str(Ridge.parse("dof:50")) == "dof:50" and Ridge.parse("0.5") == Ridge("value", 0.5)
    for text in ("dof:x", "bogus:3", "dof:-1", "accuracy:2", "value:nan"):
        with pytest.raises(ArgumentError, match="ridge"):
            Ridge.parse(text)
    with pytest.raises(ArgumentError, match="fewer degrees of freedom than the rank"):
        Ridge("dof", 80).resolve(K)
    with pytest.raises(ArgumentError, match="no ridge reaches"):
        Ridge("accuracy", 1.0).resolve(K, split.Y.flip(0))
    with pytest.raises(ArgumentError, match="needs the targets"):
        Ridge("accuracy", 0.5).resolve(K)


def test_zero_ridge_on_a_singular_kernel_is_refused(digits) -> None:
    X = digits.X[:20].numpy()
    Y = np.sign(np.arange(40) - 19.5)
    with pytest.raises(ArgumentError, match="singular in float64 at ridge = 0"):
        KernelInfluence(two_layer_ntk, Ridge("value", 0.0)).fit(np.vstack([X, X]), Y)
    with pytest.raises(ArgumentError, match="singular"):
        KernelInfluence(GramKernel(0.0), Ridge("value", 0.0)).fit(np.outer(np.arange(1, 6), np.ones(3)), np.arange(5))


def test_zero_ridge_interpolates_where_the_kernel_is_regular(digits) -> None:
    X, Y = digits.X[:20].numpy(), digits.y[:20].numpy().astype(float)
    model = KernelInfluence(two_layer_ntk, Ridge("value", 0.0)).fit(X, Y)
    np.testing.assert_allclose(model.predict(X)[:, 0], Y, atol=1e-8)


def test_top_k_is_signed_and_sorted_by_size() -> None:
    indices, values = top_k(torch.tensor([[1.0, 0.0], [-3.0, 2.0], [2.0, -1.0]]), 2)
    assert indices.tolist() == [[1, 1], [2, 2]] and values.tolist() == [[-3.0, 2.0], [2.0, -1.0]]
    with pytest.raises(ArgumentError, match="k: expected"):
        top_k(torch.ones(3, 2), 4)


@pytest.mark.parametrize(
    ("X", "Y", "error", "names"),
    [
        (np.eye(1), np.ones(1), ShapeError, "X: expected at least 2 rows"),
        (np.eye(3), np.ones(2), ShapeError, "Y: expected"),
        (np.eye(3), np.array([1, np.nan, 0]), NotFiniteError, "Y: expected finite"),
    ],
)
def test_bad_input(X, Y, error, names) -> None:
    with pytest.raises(error, match=names):
        KernelInfluence(two_layer_ntk, Ridge("value", 1.0)).fit(X, Y)


def test_bad_calls() -> None:
    with pytest.raises(ArgumentError, match="expected a Ridge rule"):
        KernelInfluence(two_layer_ntk, 0.1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="call fit"):
        KernelInfluence(two_layer_ntk, Ridge("value", 1.0)).predict(np.eye(3))
    model = KernelInfluence(two_layer_ntk, Ridge("value", 1.0)).fit(np.eye(3), np.arange(3))
    with pytest.raises(ShapeError, match="Z: expected 3 columns"):
        model.hat(np.ones((2, 4)))
    with pytest.raises(ShapeError, match="Y_test: expected 1 outputs"):
        model.loss(np.eye(3), np.eye(3))
    for shapes in (((2, 3), (1, 2), (2, 1)), ((2, 2), (1, 3), (2, 1)), ((2, 2), (1, 2), (3, 1))):
        K, Kz, Y = (torch.ones(shape) for shape in shapes)
        with pytest.raises(ShapeError):
            RidgeInfluence(K, Kz, Y, 1.0)


def ridge_solution(X: torch.Tensor, Y: torch.Tensor, damping: float) -> torch.Tensor:
    return torch.linalg.solve(X.mT @ X + damping * torch.eye(X.shape[1]).double(), X.mT @ Y)


def linear_module(X: torch.Tensor, Y: torch.Tensor, damping: float) -> nn.Linear:
    module = nn.Linear(X.shape[1], Y.shape[1], bias=False).double()
    with torch.no_grad():
        module.weight.copy_(ridge_solution(X, Y, damping).mT)
    return module


def test_model_influence_of_a_linear_module_equals_refitting(generator) -> None:
    X, Y, Z = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((25, 6), (25, 2), (4, 6)))
    Yz = Z[:, :2] * 0.3
    module = linear_module(X, Y, 0.7)
    influence = ModelInfluence(module, X, Y, Ridge("value", 0.7))
    prediction, loss = influence.prediction(Z), influence.loss(Z, Yz)
    # The damping is taken around the trained weights, so refitting starts there too: Newton's step without point i.
    for i in range(25):
        keep = torch.arange(25) != i
        H = X[keep].mT @ X[keep] + 0.7 * torch.eye(6).double()
        W = module.weight.detach().mT
        # module.weight is the optimum of the full problem centred at 0; linearised at it, the penalty is on the change.
        step_all = torch.linalg.solve(X.mT @ X + 0.7 * torch.eye(6).double(), X.mT @ (Y - X @ W))
        step = torch.linalg.solve(H, X[keep].mT @ (Y[keep] - X[keep] @ W))
        torch.testing.assert_close(prediction[i], Z @ (step_all - step), rtol=0, atol=1e-10)
        moved = Z @ W - prediction[i]
        torch.testing.assert_close(loss[i], ((moved - Yz) ** 2 - (Z @ W - Yz) ** 2).sum(1), rtol=0, atol=1e-10)


def small_net(X: torch.Tensor, Y: torch.Tensor, steps: int = 4000) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(X.shape[1], 8), nn.Tanh(), nn.Linear(8, Y.shape[1])).double()
    fit_from(net, X, Y, steps)
    return net


def fit_from(net: nn.Module, X: torch.Tensor, Y: torch.Tensor, steps: int, anchor=None, damping: float = 0.0) -> None:
    optimiser = torch.optim.LBFGS(
        net.parameters(), lr=1, max_iter=steps, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = ((net(X) - Y) ** 2).sum()
        if anchor is not None:
            loss = loss + damping * sum(((p - a) ** 2).sum() for p, a in zip(net.parameters(), anchor, strict=True))
        loss.backward()
        return loss

    optimiser.step(closure)


def test_model_influence_ranks_points_as_retraining_does(generator) -> None:
    X = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    Y = torch.sin(X[:, :1]) + 0.3 * torch.randn(20, 1, generator=generator, dtype=torch.float64)
    Z = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    damping = 2.0
    net = small_net(X, Y, 60)
    anchor = [p.detach().clone() for p in net.parameters()]
    predicted = ModelInfluence(net, X, Y, Ridge("value", damping)).prediction(Z)[..., 0]

    def retrained(keep: torch.Tensor) -> torch.Tensor:
        fresh = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        with torch.no_grad():
            for p, a in zip(fresh.parameters(), anchor, strict=True):
                p.copy_(a)
        fit_from(fresh, X[keep], Y[keep], 500, anchor, damping)
        return fresh(Z).detach()[:, 0]

    full = retrained(torch.ones(20, dtype=torch.bool))
    true = torch.stack([full - retrained(torch.arange(20) != i) for i in range(20)])
    cosine = float((true * predicted).sum() / (true.norm() * predicted.norm()))
    assert cosine > 0.9


def test_conjugate_gradients_agree_with_the_kernel_form(generator) -> None:
    X = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    Y = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    Z = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    damping = Ridge("value", 0.5)
    cg = ModelInfluence(net, X, Y, damping, method="cg").prediction(Z)
    kernel = ModelInfluence(net, X, Y, damping)
    from attn_bounds.ntk import empirical_ntk

    K = empirical_ntk(net, None, X, reduce="full").permute(0, 2, 1, 3).reshape(24, 24)
    Kz = empirical_ntk(net, None, Z, X, reduce="full").permute(0, 2, 1, 3).reshape(4, 24)
    S = torch.linalg.solve(K + 0.5 * torch.eye(24).double(), Kz.mT).mT.view(2, 2, 12, 2)
    expected = torch.einsum("tcik,ik->itc", S, Y - net(X).detach())
    torch.testing.assert_close(cg, expected, rtol=1e-7, atol=1e-9)
    assert kernel.prediction(Z).shape == cg.shape


def test_cross_entropy_influence_matches_the_dense_formula(generator) -> None:
    X = torch.randn(15, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (15,), generator=generator)
    Z, yz = X[:2] + 0.1, y[:2]
    torch.manual_seed(2)
    net = nn.Linear(4, 3).double()
    influence = ModelInfluence(net, X, y, Ridge("value", 0.3), method="cg", loss="cross_entropy")
    from attn_bounds.ntk.empirical import jacobian, module_function

    J, Jz = (jacobian(*module_function(net), x) for x in (X, Z))
    P = net(X).softmax(1).detach()
    H = torch.diag_embed(P) - P[:, :, None] * P[:, None, :]
    A = torch.einsum("nap,nab,nbq->pq", J, H, J) + 0.3 * torch.eye(J.shape[2]).double()
    onehot = nn.functional.one_hot(y, 3).double()
    step = torch.linalg.solve(A, torch.einsum("nap,na->pn", J, onehot - P))  # (p, n)
    torch.testing.assert_close(influence.prediction(Z), torch.einsum("tcp,pn->ntc", Jz, step), rtol=1e-6, atol=1e-9)
    gap = net(Z).softmax(1).detach() - nn.functional.one_hot(yz, 3).double()
    expected = -torch.einsum("ntc,tc->nt", influence.prediction(Z), gap)
    torch.testing.assert_close(influence.loss(Z, yz), expected)


def test_model_influence_refuses() -> None:
    X, Y = torch.ones(3, 2).double(), torch.ones(3, 1).double()
    net = nn.Linear(2, 1).double()
    with pytest.raises(MethodNotApplicableError, match="use method='cg'"):
        ModelInfluence(net, X, Y, Ridge("value", 1.0), loss="cross_entropy")
    with pytest.raises(MethodNotApplicableError, match="forms no kernel"):
        ModelInfluence(net, X, Y, Ridge("dof", 1.0), method="cg")
    with pytest.raises(ArgumentError, match="damping > 0"):
        ModelInfluence(net, X, Y, Ridge("value", 0.0), method="cg")
    with pytest.raises(ShapeError, match="Y: expected"):
        ModelInfluence(net, X, torch.ones(3, 2).double(), Ridge("value", 1.0))
    with pytest.raises(ArgumentError, match="singular"):
        ModelInfluence(net, X, Y, Ridge("value", 0.0))
    with pytest.raises(ArgumentError, match="did not reach"):
        torch.manual_seed(0)
        big = ModelInfluence(nn.Linear(9, 1).double(), torch.randn(20, 9).double(), torch.ones(20, 1).double(),
                             Ridge("value", 1e-9), method="cg", iterations=2)  # fmt: skip
        big.prediction(torch.ones(1, 9).double())
