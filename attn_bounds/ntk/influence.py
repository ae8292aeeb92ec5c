"""Which training points decide a prediction: leave-one-out influence, closed form, for kernels and trained modules.

Sign convention, everywhere: prediction influence is f(z) - f_without_i(z), the part of the prediction that point i
brings; loss influence is loss_without_i - loss, positive if point i helps (leaving it out raises the loss
|f(z) - y|^2). Results are (train, test), or (train, test, outputs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp

from attn_bounds.errors import ArgumentError, MethodNotApplicableError, ShapeError
from attn_bounds.ntk._arrays import ArrayLike, choice, like, matrix, targets
from attn_bounds.ntk.empirical import empirical_ntk, module_function
from attn_bounds.ntk.kernels import Kernel
from attn_bounds.ntk.ridge import Ridge


class RidgeInfluence:
    """Exact leave-one-out quantities of kernel ridge regression, from kernel matrices.

        B = (K + lambda W^-1)^-1     S = K_z B     R_i = (B Y)_i / B_ii = y_i - f_without_i(x_i)
        hat S_ti      prediction S_ti R_i      loss -2 S_ti <f(z_t) - y_t, R_i> + S_ti^2 |R_i|^2

    K (n, n), K_test (t, n), Y (n, outputs), tensors in float64; weights (n,) of the squared errors (ones by default,
    kept fixed when a point is left out). Errors: ArgumentError if K + lambda W^-1 is singular in float64.
    Source: Koh and Liang 2017; the leave-one-out identity is classical.
    """

    def __init__(self, K: Tensor, K_test: Tensor, Y: Tensor, ridge: float, *, weights: Tensor | None = None) -> None:
        if K.ndim != 2 or K.shape[0] != K.shape[1]:
            raise ShapeError(f"K: expected a square matrix, got {tuple(K.shape)}")
        if K_test.ndim != 2 or K_test.shape[1] != len(K):
            raise ShapeError(f"K_test: expected (tests, {len(K)}), got {tuple(K_test.shape)}")
        if len(Y) != len(K) or Y.ndim != 2:
            raise ShapeError(f"Y: expected ({len(K)}, outputs), got {tuple(Y.shape)}")
        diagonal = torch.ones(len(K), dtype=K.dtype, device=K.device) if weights is None else 1 / weights
        self.ridge = float(ridge)
        self._B = _inverse(K + self.ridge * torch.diag(diagonal), self.ridge)
        self._S = K_test @ self._B
        self._R = (self._B @ Y) / self._B.diagonal()[:, None]
        self.predictions = self._S @ Y  # (t, outputs)
        self.leave_one_out = Y - self._R  # (n, outputs): f_without_i(x_i)
        self.degrees_of_freedom = len(K) - self.ridge * float((self._B.diagonal() * diagonal).sum())

    def hat(self) -> Tensor:
        """Return d f(z_t) / d y_i (train, test)."""
        return self._S.mT

    def prediction(self) -> Tensor:
        """Return f(z_t) - f_without_i(z_t) (train, test, outputs)."""
        return torch.einsum("ti,ic->itc", self._S, self._R)

    def loss(self, Y_test: Tensor) -> Tensor:
        """Return |f_without_i(z_t) - y_t|^2 - |f(z_t) - y_t|^2 (train, test)."""
        cross = (self.predictions - Y_test) @ self._R.mT
        return (-2 * self._S * cross + self._S**2 * (self._R**2).sum(1)).mT


def _inverse(A: Tensor, ridge: float) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(A)
    if int(info) != 0 or float(factor.diagonal().min() / factor.diagonal().max()) ** 2 < len(A) * 2.3e-16:
        raise ArgumentError(
            f"ridge: K + ridge I is singular in float64 at ridge = {ridge:g} (duplicate rows, or low rank); "
            "pass a larger ridge, e.g. Ridge('relative', 1e-6) or Ridge('dof', ...)"
        )
    return torch.cholesky_inverse(factor)


class KernelInfluence:
    """Leave-one-out influence of the training points in kernel ridge regression with any kernel function.

    fit(X, Y) then hat(Z), prediction(Z), loss(Z, Y_test), predict(Z). A kernel with a `fit` (AttendedKernel,
    GramKernel) is fitted on X and kept fixed when a point is left out. Arrays give arrays, tensors tensors.

    Args: kernel k(x1, x2=None); ridge: a Ridge rule, explicit on purpose. After fit: ridge_ (the number),
    degrees_of_freedom_.
    """

    def __init__(self, kernel: Kernel, ridge: Ridge) -> None:
        if not isinstance(ridge, Ridge):
            raise ArgumentError(f"ridge: expected a Ridge rule such as Ridge('dof', 50), got {ridge!r}")
        self.kernel = kernel
        self.ridge = ridge

    def fit(self, X: ArrayLike, Y: ArrayLike) -> KernelInfluence:
        self._X = matrix("X", X, min_rows=2)
        self._Y = targets("Y", Y, len(self._X)).to(self._X.device)
        fit: Callable[[Tensor], Any] | None = getattr(self.kernel, "fit", None)
        if fit is not None:
            fit(self._X)
        self._K = self.kernel(self._X)
        self.ridge_ = self.ridge.resolve(self._K, self._Y)
        self.degrees_of_freedom_ = self._solve(self._X[:1]).degrees_of_freedom
        return self

    def _solve(self, Z: ArrayLike) -> RidgeInfluence:
        if not hasattr(self, "_K"):
            raise ArgumentError("KernelInfluence: call fit(X, Y) first")
        test = matrix("Z", Z, columns=self._X.shape[1]).to(self._X.device)
        return RidgeInfluence(self._K, self.kernel(test, self._X), self._Y, self.ridge_)

    def predict(self, Z: ArrayLike) -> Any:
        """Return f(z) (test, outputs)."""
        return like(Z, self._solve(Z).predictions)

    def hat(self, Z: ArrayLike) -> Any:
        """Return d f(z_t) / d y_i (train, test)."""
        return like(Z, self._solve(Z).hat())

    def prediction(self, Z: ArrayLike) -> Any:
        """Return f(z_t) - f_without_i(z_t) (train, test, outputs)."""
        return like(Z, self._solve(Z).prediction())

    def loss(self, Z: ArrayLike, Y_test: ArrayLike) -> Any:
        """Return |f_without_i(z_t) - y_t|^2 - |f(z_t) - y_t|^2 (train, test)."""
        solved = self._solve(Z)
        labels = targets("Y_test", Y_test, len(solved.predictions)).to(self._X.device)
        if labels.shape[1] != solved.predictions.shape[1]:
            raise ShapeError(f"Y_test: expected {solved.predictions.shape[1]} outputs, got {labels.shape[1]}")
        return like(Z, solved.loss(labels))


class ModelInfluence:
    """Influence of training points on a trained torch module, from its linearisation at the trained parameters.

    method "ntk": exact leave-one-out of the linearised model with squared error and the damping as ridge, through the
        empirical NTK (n outputs)^2; correct also when the module is linear and was trained to the ridge optimum.
    method "cg": first-order influence J_z (J^T H J + damping)^-1 J_i^T r_i by conjugate gradients on Gauss-Newton
        products; no n x n matrix, any size. loss "squared" (H = I) or "cross_entropy" (H = diag p - p p^T).
        For squared error it equals the "ntk" result times 1 - hat_ii.

    Args: module (eval mode, output (n, outputs)); X (n, ...), Y (n, outputs) (for cross_entropy one-hot rows or class
        indices); damping: Ridge("value", ...) or Ridge("dof", ...) (the latter with method "ntk" only).
    Shapes and signs as in KernelInfluence: prediction(Z) (train, test, outputs), loss(Z, Y_test) (train, test).
    """

    def __init__(
        self,
        module: nn.Module,
        X: Tensor,
        Y: Tensor,
        damping: Ridge,
        *,
        method: str = "ntk",
        loss: str = "squared",
        iterations: int = 500,
        tolerance: float = 1e-10,
    ) -> None:
        choice("method", method, ("ntk", "cg"))
        choice("loss", loss, ("squared", "cross_entropy"))
        if not isinstance(damping, Ridge):
            raise ArgumentError(f"damping: expected a Ridge rule such as Ridge('value', 0.1), got {damping!r}")
        if method == "ntk" and loss != "squared":
            raise MethodNotApplicableError(
                "method='ntk' is exact for squared error only; use method='cg' for cross_entropy"
            )
        if method == "cg" and damping.kind != "value":
            raise MethodNotApplicableError(f"damping {damping}: method='cg' forms no kernel; pass Ridge('value', ...)")
        self._f, self._params = module_function(module)
        self._X, self.method, self.loss_name = X, method, loss
        self._iterations, self._tolerance = iterations, tolerance
        with torch.no_grad():
            F = module(X)
        if F.ndim != 2:
            raise ShapeError(f"module: expected output (n, outputs), got {tuple(F.shape)}")
        if loss == "cross_entropy" and Y.ndim == 1:
            Y = torch.nn.functional.one_hot(Y.long(), F.shape[1]).to(F.dtype)
        if Y.shape != F.shape:
            raise ShapeError(f"Y: expected {tuple(F.shape)}, got {tuple(Y.shape)}")
        self._P = F.softmax(1) if loss == "cross_entropy" else F
        self._residual = Y - self._P
        self._outputs = F.shape[1]
        if method == "ntk":
            K = _flat(empirical_ntk(self._f, self._params, X, reduce="full"))
            self.damping_ = damping.resolve(K)
            self._B = _inverse(K + self.damping_ * torch.eye(len(K), dtype=K.dtype, device=K.device), self.damping_)
        else:
            self.damping_ = damping.resolve(X)
            if self.damping_ == 0:
                raise ArgumentError("damping: method='cg' needs a damping > 0, got 0")

    def prediction(self, Z: Tensor) -> Tensor:
        """Return f(z_t) - f_without_i(z_t) of the linearised model (train, test, outputs)."""
        n, t, c = len(self._X), len(Z), self._outputs
        if self.method == "ntk":
            S = (_flat(empirical_ntk(self._f, self._params, Z, self._X, reduce="full")) @ self._B).view(t, c, n, c)
            alpha = (self._B @ self._residual.reshape(-1)).view(n, c)
            blocks = self._B.view(n, c, n, c)[torch.arange(n), :, torch.arange(n), :]
            R = torch.linalg.solve(blocks, alpha[..., None])[..., 0]  # leave-one-out residual, all outputs at once
            return torch.einsum("tcik,ik->itc", S, R)
        out = []
        for row in range(t):
            for k in range(c):
                direction = self._solve(self._gradient(Z[row : row + 1], k))
                # J_i (H + damping)^-1 J_z^T, contracted with the residual: one forward product for all i.
                pushed = jvp(lambda p: self._f(p, self._X), (self._params,), (direction,))[1]
                out.append((pushed * self._residual).sum(1))
        return torch.stack(out, 1).view(n, t, c)

    def loss(self, Z: Tensor, Y_test: Tensor) -> Tensor:
        """Return the loss at z_t without point i minus the loss with it (train, test).

        Squared error: exact for the linearised model. cross_entropy: first order.
        """
        moved = self.prediction(Z)
        with torch.no_grad():
            F = self._f(self._params, Z)
        if self.loss_name == "squared":
            gap = F - Y_test
            return -2 * (moved * gap).sum(2) + (moved**2).sum(2)
        if Y_test.ndim == 1:
            Y_test = torch.nn.functional.one_hot(Y_test.long(), F.shape[1]).to(F.dtype)
        return -(moved * (F.softmax(1) - Y_test)).sum(2)

    def _gradient(self, z: Tensor, output: int) -> dict[str, Tensor]:
        F, back = vjp(lambda p: self._f(p, z), self._params)[:2]
        seed = torch.zeros_like(F)
        seed[0, output] = 1
        return back(seed)[0]

    def _gauss_newton(self, v: dict[str, Tensor]) -> dict[str, Tensor]:
        def f(p: dict[str, Tensor]) -> Tensor:
            return self._f(p, self._X)

        Jv = jvp(f, (self._params,), (v,))[1]
        if self.loss_name == "cross_entropy":
            Jv = self._P * Jv - self._P * (self._P * Jv).sum(1, keepdim=True)
        back = vjp(f, self._params)[1]
        JtJv = back(Jv)[0]
        return {k: JtJv[k] + self.damping_ * v[k] for k in v}

    def _solve(self, b: dict[str, Tensor]) -> dict[str, Tensor]:
        """Conjugate gradients for (J^T H J + damping) x = b; ArgumentError if it does not converge."""
        x = {k: torch.zeros_like(v) for k, v in b.items()}
        r, p = dict(b), dict(b)
        size = square = _dot(r, r)
        for _ in range(self._iterations):
            if float(square) <= self._tolerance**2 * float(size):
                return x
            Ap = self._gauss_newton(p)
            step = square / _dot(p, Ap)
            x = {k: x[k] + step * p[k] for k in x}
            r = {k: r[k] - step * Ap[k] for k in r}
            new = _dot(r, r)
            p = {k: r[k] + (new / square) * p[k] for k in r}
            square = new
        if float(square) <= self._tolerance**2 * float(size):
            return x
        raise ArgumentError(
            f"iterations: conjugate gradients did not reach {self._tolerance:g} in {self._iterations} steps "
            f"(relative residual {float((square / size).sqrt()):.1e}); raise iterations or damping"
        )


def _flat(K: Tensor) -> Tensor:
    """(n, m, a, b) -> (n a, m b)."""
    n, m, a, b = K.shape
    return K.permute(0, 2, 1, 3).reshape(n * a, m * b)


def _dot(a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
    return torch.stack([(a[k] * b[k]).sum() for k in a]).sum()


def top_k(influence: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k training points of largest |influence| for each test point: indices and signed values (k, test)."""
    if influence.ndim != 2 or not 1 <= k <= len(influence):
        raise ArgumentError(
            f"k: expected 1..{len(influence)} and influence (train, test), got k={k}, {tuple(influence.shape)}"
        )
    indices = influence.abs().topk(k, dim=0).indices
    return indices, influence.gather(0, indices)
