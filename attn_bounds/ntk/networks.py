"""Two-layer ReLU networks of finite width, with the first layer trained: the models that the kernels are limits of."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from attn_bounds.errors import ArgumentError
from attn_bounds.ntk._arrays import positive, whole


@dataclasses.dataclass
class TwoLayerReLU:
    """f(x) = m^(-1/2) sum_r a_r relu(w_r.x), w trained, a = +-1 fixed; one column of `signs` an output.

    weights (m, d), signs (m, outputs), both float64.
    """

    weights: Tensor
    signs: Tensor

    @classmethod
    def initial(
        cls, width: int, inputs: int, outputs: int = 1, *, seed: int = 0, covariance: Tensor | None = None
    ) -> TwoLayerReLU:
        """Draw w_r ~ N(0, covariance) (identity by default) and random signs."""
        whole("width", width)
        generator = torch.Generator().manual_seed(seed)
        W = torch.randn(width, inputs, generator=generator, dtype=torch.float64)
        signs = torch.randint(0, 2, (width, outputs), generator=generator).to(torch.float64) * 2 - 1
        if covariance is not None:
            W = W.to(covariance.device) @ torch.linalg.cholesky(covariance).mT
            signs = signs.to(covariance.device)
        return cls(W, signs)

    def to(self, device: torch.device) -> TwoLayerReLU:
        """Return the same network on `device`."""
        return TwoLayerReLU(self.weights.to(device), self.signs.to(device))

    def __call__(self, x: Tensor) -> Tensor:
        """Compute f at the rows of x (n, d): (n, outputs)."""
        return torch.relu(x @ self.weights.mT) @ self.signs / len(self.weights) ** 0.5

    def ntk(self, x1: Tensor, x2: Tensor | None = None) -> Tensor:
        """Compute the empirical NTK averaged over outputs: <x, x'> #{r: w_r.x > 0 and w_r.x' > 0} / m.

        All diagonal blocks of the full kernel are equal to it, and its off-diagonal blocks vanish as m grows.
        """
        second = x1 if x2 is None else x2
        gates1, gates2 = ((x @ self.weights.mT > 0).to(x1.dtype) for x in (x1, second))
        return (x1 @ second.mT) * (gates1 @ gates2.mT) / len(self.weights)


def train_network(
    network: TwoLayerReLU,
    X: Tensor,
    Y: Tensor,
    *,
    steps: int,
    learning_rate: float,
    clip: float | None = None,
    momentum: float = 0.0,
    at: tuple[int, ...] = (),
) -> tuple[TwoLayerReLU, list[TwoLayerReLU]]:
    """Run full-batch gradient descent on sum_i |f(x_i) - f_0(x_i) - y_i|^2 / 2 from `network` (which is kept).

    f_0 is the network at the start: subtracting it is what makes f_m and the closed-form prediction comparable.
    X (n, d), Y (n, outputs), float64. clip: each example's residual is shortened to this length (clipping its
    gradient up to the factor of its Jacobian). momentum: heavy ball, in [0, 1); 0 keeps to the
    closed form. at: steps after which copies are returned as well.
    """
    positive("learning_rate", learning_rate)
    if not 0 <= momentum < 1:
        raise ArgumentError(f"momentum: expected a number in [0, 1), got {momentum!r}")
    if clip is not None:
        positive("clip", clip)
    W, s, root = network.weights.clone(), network.signs, len(network.weights) ** 0.5
    target = network(X) + Y
    velocity, gradient = torch.zeros_like(W), torch.zeros_like(W)
    # Buffers of n x m, reused: allocating them anew costs more than the products on large networks.
    Z = torch.empty(len(X), len(W), dtype=W.dtype, device=W.device)
    hidden, gates = torch.empty_like(Z), torch.empty_like(Z, dtype=torch.bool)
    copies = []
    for step in range(1, steps + 1):
        torch.mm(X, W.mT, out=Z)
        torch.gt(Z, 0, out=gates)
        residual = Z.mul_(gates) @ s / root - target
        if clip is not None:
            residual = residual * (clip / residual.norm(dim=1, keepdim=True).clamp(min=1e-300)).clamp(max=1)
        torch.mm(residual, s.mT, out=hidden)
        torch.mm(hidden.mul_(gates).mT, X, out=gradient)
        velocity.mul_(momentum).add_(gradient, alpha=learning_rate / root)
        W.sub_(velocity)
        if step in at:
            copies.append(TwoLayerReLU(W.clone(), s))
    return TwoLayerReLU(W, s), copies
