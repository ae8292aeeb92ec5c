from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from attn_bounds.errors import ArgumentError, ShapeError
from attn_bounds.ntk import (
    AttendedKernel,
    GramKernel,
    InfiniteReLU,
    LinearizedAttention,
    TwoLayerReLU,
    empirical_ntk,
    two_layer_ntk,
)

X1 = np.array([[1.0, 0, 0], [0.5, -1.0, 2.0], [-0.3, 0.7, 0.1]])
X2 = np.array([[0.2, 0.4, -0.6], [-1.0, 2.0, 0.5]])

# Made with neural_tangents 0.6.5 (jax 0.4.30 with jax_enable_x64, numpy 1.26.4):
#   layers = [Dense(1, W_std=1.3, b_std=b), Relu()] * depth + [Dense(1, W_std=1.3, b_std=b)]
#   stax.serial(*layers)[2](X1, X2, ("nngp", "ntk")), and the diagonal of the NTK of (X1, X1).
REFERENCE = {
    (1, 0.0): (
        [[0.1650636612301129, 0.1427916860203636], [0.010918162224532771, 0.47116699427539954],
         [0.1285725934076738, 0.833136420540212]],
        [[0.22086411179661825, -0.026784782051183204], [-0.1040263139793076, 0.18000961345562405],
         [0.17349252446475857, 1.6379258929962148]],
        [0.9520333333333335, 4.998175000000002, 0.5616996666666668],
    ),
    (1, 0.4): (
        [[0.4503183307302364, 0.40815537972592447], [0.25140750376786447, 0.7294318116169992],
         [0.4136348191290145, 1.134725559825426]],
        [[0.6009851441463737, 0.26724746921324094], [0.07209482552577698, 0.48083618294764885],
         [0.5558694147522759, 1.98271454600351]],
        [1.3824333333333336, 5.428575000000001, 0.9920996666666669],
    ),
    (2, 0.0): (
        [[0.17603568956672722, 0.3562124221071051], [0.2241670052648117, 0.8832346451989506],
         [0.13620271505618056, 0.704087849975864]],
        [[0.29797289034669605, 0.34394995317184723], [0.1798415902879881, 0.9684720967394342],
         [0.23233062603000365, 2.041749625914518]],
        [1.2067022500000002, 6.3351868125000035, 0.7119543275000003],
    ),
    (3, 0.4): (
        [[0.659260323044344, 0.9116648083075672], [0.7983668097327149, 1.4489334083380117],
         [0.6198814916728927, 1.1275262725123838]],
        [[1.2930353402823958, 1.4102880638358748], [1.1578434377160791, 2.2815188503003943],
         [1.2272679790542802, 2.955663846194481]],
        [2.5188279216666674, 8.296920528750004, 1.9614119289833338],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("depth", "bias"), list(REFERENCE))
def test_matches_neural_tangents(depth: int, bias: float) -> None:
    nngp, ntk, diagonal = REFERENCE[depth, bias]
    kernel = InfiniteReLU(depth=depth, weight_std=1.3, bias_std=bias)
    got_nngp, got_ntk = kernel(X1, X2, get=("nngp", "ntk"))
    np.testing.assert_allclose(got_nngp, nngp, rtol=0, atol=1e-10)
    np.testing.assert_allclose(got_ntk, ntk, rtol=0, atol=1e-10)
    np.testing.assert_allclose(np.diag(kernel(X1)), diagonal, rtol=0, atol=1e-10)


def test_two_layer_kernel_against_integration() -> None:
    """E[x.x' 1(w.x > 0) 1(w.x' > 0)] in the plane of x and x', by a sum over directions of w."""
    phi = (np.arange(200_000) + 0.5) / 200_000 * 2 * math.pi
    W = np.stack([np.cos(phi), np.sin(phi)], 1)
    a, b = np.array([[1.0, 0.2]]), np.array([[-0.4, 0.9]])
    gates = ((W @ a.T > 0) & (W @ b.T > 0)).mean()
    assert two_layer_ntk(a, b)[0, 0] == pytest.approx(float((a @ b.T)[0, 0]) * gates, abs=1e-5)
    nngp = (np.maximum(W @ a.T, 0) * np.maximum(W @ b.T, 0)).mean() * 2  # E |w|^2 = 2 in the plane
    both = two_layer_ntk(a, b, train="both")[0, 0] - two_layer_ntk(a, b)[0, 0]
    assert both == pytest.approx(nngp, abs=1e-5)


def test_two_layer_kernel_is_the_depth_one_case_up_to_scale() -> None:
    full = InfiniteReLU(depth=1, weight_std=1.0)(X1, X2)
    np.testing.assert_allclose(two_layer_ntk(X1, X2, train="both") / 3, full, atol=1e-14)


def test_diagonal_and_duplicates_are_exact() -> None:
    X = np.random.default_rng(0).normal(size=(50, 20))
    K = two_layer_ntk(X)
    np.testing.assert_allclose(np.diag(K), (X**2).sum(1) / 2, rtol=1e-15)
    np.testing.assert_allclose(two_layer_ntk(X, X.copy())[range(50), range(50)], np.diag(K), rtol=1e-12)
    np.testing.assert_allclose(K, K.T, rtol=1e-12)
    assert np.linalg.eigvalsh(K)[0] > 0


def test_opposite_and_zero_rows() -> None:
    x = np.array([[1.0, 2.0]])
    assert two_layer_ntk(x, -x)[0, 0] == pytest.approx(0.0, abs=1e-7)
    assert two_layer_ntk(x, 0 * x)[0, 0] == 0.0
    t = torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(two_layer_ntk(t).sum(), t)
    assert bool(torch.isfinite(gradient).all())


def wide(module_width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(module_width, 3, dtype=torch.float64))
            self.a = nn.Parameter(torch.randn(module_width, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.relu(x @ self.w.T / 3**0.5) @ self.a / module_width**0.5)[:, None]

    return Net()


def test_empirical_kernel_of_a_wide_net_is_within_monte_carlo_error() -> None:
    width, repeats = 4000, 12
    x1, x2 = torch.tensor(X1), torch.tensor(X2)
    draws = torch.stack([empirical_ntk(wide(width, s), None, x1, x2) for s in range(repeats)])
    error = draws.std(0) / repeats**0.5
    exact = torch.tensor(InfiniteReLU(depth=1, weight_std=1.0)(X1, X2))
    assert bool(((draws.mean(0) - exact).abs() <= 4 * error).all())
    assert float(error.max()) < 0.02  # a test whose error bars were wide would pass with anything


def test_network_kernel_equals_empirical_kernel() -> None:
    net = TwoLayerReLU.initial(50, 3, 4, seed=1)

    def f(params, x):
        return torch.relu(x @ params["w"].mT) @ net.signs / 50**0.5

    x1, x2 = torch.tensor(X1), torch.tensor(X2)
    diagonal = empirical_ntk(f, {"w": net.weights}, x1, x2, reduce="diagonal")
    for k in range(4):
        torch.testing.assert_close(diagonal[..., k], net.ntk(x1, x2), rtol=0, atol=1e-14)


def test_empirical_kernel_reductions_chunks_and_plain_autograd() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x1, x2 = torch.tensor(X1), torch.tensor(X2)
    full = empirical_ntk(net, None, x1, x2, reduce="full")
    rows = []
    for x in (x1, x2):
        J = []
        for row in x:
            for k in range(2):
                grads = torch.autograd.grad(net(row[None])[0, k], list(net.parameters()))
                J.append(torch.cat([g.flatten() for g in grads]))
        rows.append(torch.stack(J).view(len(x), 2, -1))
    torch.testing.assert_close(full, torch.einsum("nap,mbp->nmab", *rows))
    diagonal = empirical_ntk(net, None, x1, x2, reduce="diagonal")
    torch.testing.assert_close(diagonal, full.diagonal(dim1=2, dim2=3))
    torch.testing.assert_close(empirical_ntk(net, None, x1, x2), diagonal.sum(2))
    tiny = empirical_ntk(net, None, x1, x2, reduce="full", memory_mib=1e-6)
    torch.testing.assert_close(tiny, full)
    torch.testing.assert_close(empirical_ntk(net, None, x1), empirical_ntk(net, None, x1, x1))


def test_empirical_kernel_of_a_convolution() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).double()
    x = torch.randn(4, 1, 4, 4, dtype=torch.float64)
    K = empirical_ntk(net, None, x)
    assert K.shape == (4, 4) and float(torch.linalg.eigvalsh(K)[0]) > 0


def test_empirical_kernel_refuses() -> None:
    x = torch.tensor(X1)
    with pytest.raises(ArgumentError, match="reduce: expected one of"):
        empirical_ntk(nn.Linear(3, 1).double(), None, x, reduce="mean")
    with pytest.raises(ArgumentError, match="Dropout in training mode"):
        empirical_ntk(nn.Sequential(nn.Linear(3, 1), nn.Dropout()).double(), None, x)
    with pytest.raises(ArgumentError, match="no trainable parameter"):
        empirical_ntk(nn.ReLU(), None, x)
    with pytest.raises(ShapeError, match="x2: expected rows of shape"):
        empirical_ntk(nn.Linear(3, 1).double(), None, x, torch.ones(2, 4).double())
    with pytest.raises(ArgumentError, match="params: expected"):
        empirical_ntk(lambda p, z: z, None, x)


def test_gram_and_attended_kernels_agree_with_their_definitions() -> None:
    X = np.random.default_rng(0).normal(size=(9, 4))
    z = np.random.default_rng(1).normal(size=(3, 4))
    G, phi = X @ X.T, X @ z.T
    np.testing.assert_allclose(GramKernel(1.0).fit(X)(z), phi.T @ G @ phi, rtol=1e-9)
    np.testing.assert_allclose(GramKernel(-1.0).fit(X)(z), z @ z.T, atol=1e-10)
    np.testing.assert_allclose(GramKernel(-1.0).fit(X)(z), phi.T @ np.linalg.pinv(G) @ phi, atol=1e-10)
    attended = AttendedKernel(
        LinearizedAttention(centre=False, normalize=False), lambda a, b=None: a @ (a if b is None else b).T
    )
    np.testing.assert_allclose(attended.fit(X)(z), phi.T @ G @ phi, rtol=1e-9)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: InfiniteReLU(depth=-1), "depth"),
        (lambda: InfiniteReLU(weight_std=0.0), "weight_std"),
        (lambda: InfiniteReLU()(X1, get="cov"), "get: expected one of"),
        (lambda: two_layer_ntk(X1, train="last"), "train: expected one of"),
        (lambda: GramKernel(-2.0), "power"),
        (lambda: GramKernel()(X1), "call fit"),
        (lambda: two_layer_ntk(X1, X2[:, :2]), "x2: expected 3 columns"),
        (lambda: TwoLayerReLU.initial(0, 3), "width"),
    ],
)
def test_bad_input(make, names) -> None:
    with pytest.raises(ArgumentError, match=names):
        make()
