"""Label flips: how much accuracy do a few wrong labels cost, chosen at random, by influence, or greedily?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from attn_bounds.errors import ArgumentError
from attn_bounds.ntk._arrays import choice
from attn_bounds.ntk.data import Split, encode_labels
from attn_bounds.ntk.influence import RidgeInfluence
from attn_bounds.ntk.kernels import two_layer_ntk
from attn_bounds.ntk.malleability import accuracy, fitted
from attn_bounds.ntk.networks import TwoLayerReLU, train_network
from attn_bounds.ntk.ridge import Ridge

METHODS = ("random", "influence", "greedy", "greedy margin")


@dataclasses.dataclass(frozen=True)
class NetworkTraining:
    """How finite networks are trained: full-batch gradient descent with momentum, to the training time `time`.

    time is that of gradient flow on sum |f - y|^2 / 2; the step is 1/lambda_max of the infinite-width kernel. clip
    shortens each example's residual to this length.
    """

    width: int = 512
    time: float = 30.0
    momentum: float = 0.9
    clip: float | None = None
    seed: int = 0

    def train(self, A: Tensor, Y: Tensor, covariance: Tensor | None = None) -> tuple[TwoLayerReLU, TwoLayerReLU]:
        """Train on features A (n, d) and targets Y (n, outputs); return the network at the start and at the end."""
        rate = 1.0 / float(torch.linalg.eigvalsh(two_layer_ntk(A))[-1])
        start = TwoLayerReLU.initial(self.width, A.shape[1], Y.shape[1], seed=self.seed, covariance=covariance)
        start = start.to(A.device)
        steps = max(1, round(self.time * (1 - self.momentum) / rate))
        end, _ = train_network(start, A, Y, steps=steps, learning_rate=rate, momentum=self.momentum, clip=self.clip)
        return start, end


def choose_flips(solved: RidgeInfluence, split: Split, budget: int, method: str, *, seed: int = 0) -> Tensor:
    """Return training labels (n,) with `budget` of them flipped to other classes, chosen against the test points.

    Kernel ridge predictions are linear in the targets, so a flip's effect on all test points is known in closed form:
        f(z_t) moves by S_ti (e_new - e_old)
    method "random": points and new labels at random. "influence": the flips that raise the test loss most, each
    judged alone. "greedy": one at a time, judged after the earlier ones. "greedy margin": greedy in the softened
    number of errors instead of the squared loss (to first order). The attacker sees the test points: a worst case.
    """
    choice("method", method, METHODS)
    classes = 2 if split.Y.shape[1] == 1 else split.Y.shape[1]
    if not 1 <= budget < len(split.y):
        raise ArgumentError(f"budget: expected 1..{len(split.y) - 1} flips, got {budget}")
    y = split.y.clone()
    if method == "random":
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(y), generator=generator)[:budget].to(y.device)
        shift = torch.randint(1, classes, (budget,), generator=generator).to(y.device)
        y[rows] = (y[rows] + shift) % classes
        return y
    codes = encode_labels(torch.arange(classes, device=y.device), classes)  # (classes, outputs)
    S, F = solved.hat(), solved.predictions.clone()  # (train, test), (test, outputs)
    power = (S**2).sum(1)
    used = torch.zeros(len(y), dtype=torch.bool, device=y.device)
    rounds = 1 if method == "influence" else budget
    for _ in range(rounds):
        delta = codes[None] - codes[y][:, None]  # (train, classes, outputs)
        pull = S @ _loss_gradient(F, split, margin=method == "greedy margin")  # (train, outputs)
        gain = torch.einsum("no,nco->nc", pull, delta)
        if method != "greedy margin":
            gain = gain + power[:, None] * (delta**2).sum(2)
        gain[used] = -torch.inf
        gain.scatter_(1, y[:, None], -torch.inf)
        best, label = gain.max(1)
        rows = best.topk(budget if method == "influence" else 1).indices
        F = F + S[rows].mT @ (codes[label[rows]] - codes[y[rows]])
        y[rows] = label[rows]
        used[rows] = True
    return y


def _loss_gradient(F: Tensor, split: Split, *, margin: bool) -> Tensor:
    if not margin:
        return 2 * (F - split.Y_test)
    temperature = 0.25 * float(F.std())
    if F.shape[1] == 1:
        return -split.Y_test * torch.sigmoid(-split.Y_test * F / temperature)
    return torch.softmax(F / temperature, 1) - torch.nn.functional.one_hot(split.y_test, F.shape[1])


def poisoning(
    kernels: Mapping[str, Any],
    split: Split,
    ridge: Ridge,
    *,
    fraction: float = 0.01,
    methods: tuple[str, ...] = METHODS,
    repeats: int = 3,
    network: NetworkTraining | None = None,
) -> pd.DataFrame:
    """Measure the accuracy lost to flipping a fraction of the training labels, for kernels and trained networks.

    kernels: AttendedKernel (attention; power=0: ReLU baseline). With `network`, a finite network on the same features
    is trained on the same flipped labels (chosen on its kernel). "random" is repeated `repeats` times and averaged.
    Returns one row per model and method: flips, clean (accuracy), poisoned, drop (all as fractions).
    """
    if not 0 < fraction < 0.5:
        raise ArgumentError(f"fraction: expected a number in (0, 0.5), got {fraction!r}")
    budget = max(1, round(fraction * len(split.y)))
    classes = 2 if split.Y.shape[1] == 1 else split.Y.shape[1]
    rows = []
    for name, kernel in kernels.items():
        clean = fitted(kernel, split.X)
        K, K_test = clean(split.X), clean(split.X_test, split.X)
        lam = ridge.resolve(K, split.Y)
        solved = RidgeInfluence(K, K_test, split.Y, lam)
        S = solved.hat().mT
        predictors = {f"{name} kernel": lambda Y, S=S: S @ Y}
        if network is not None:
            A, B = (clean.attention.transform(x) for x in (split.X, split.X_test))

            def trained(Y: Tensor, A: Tensor = A, B: Tensor = B) -> Tensor:
                start, end = network.train(A, Y)
                return end(B) - start(B)

            predictors[f"{name} network"] = trained
        for model, predict in predictors.items():
            base = accuracy(predict(split.Y), split)
            for method in methods:
                seeds = range(repeats if method == "random" else 1)
                after = []
                for seed in seeds:
                    y = choose_flips(solved, split, budget, method, seed=seed)
                    after.append(accuracy(predict(encode_labels(y, classes)), split))
                poisoned = sum(after) / len(after)
                rows.append(
                    {
                        "model": model,
                        "method": method,
                        "flips": budget,
                        "clean": base,
                        "poisoned": poisoned,
                        "drop": base - poisoned,
                    }
                )
    return pd.DataFrame(rows)
