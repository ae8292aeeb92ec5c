"""auto_LiRPA's own methods on single heads: ibp, crown and alpha-crown, as runners for tables beside our bounds.

The score and the value of a token are linear in it, and backward bounds pass through linear layers exactly. So the
graph starts at (query, keys, values) and the region is the image of the tokens' balls or boxes under the head's
weights: the bounds are those of the graph with every token an input of its own, and a whole batch of heads shares one.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from auto_LiRPA import BoundedModule, BoundedTensor
from auto_LiRPA.linear_bound import LinearBound
from auto_LiRPA.perturbations import PerturbationLpNorm
from torch import Tensor

from attn_bounds.certificate import Certificate
from attn_bounds.certify import certificates
from attn_bounds.errors import ArgumentError
from attn_bounds.problem import HeadProblem
from attn_bounds.reduced import centre_and_spread, group_key
from attn_bounds.regions import Balls

from .fuse import attach, repair_softmax
from .options import OPTIONS

METHODS = {"ibp": "IBP", "crown": "CROWN", "alpha-crown": "CROWN-optimized"}
VARIANTS = ("stock", "unfolded", "fused")
CHUNK = 48  # heads in one call
MARGIN = 1e-12  # of the output's size, for the rounding that auto_LiRPA does not bound


def runner(name: str, iterations: int = 20) -> Callable[[Sequence[HeadProblem]], list[Certificate]]:
    """The runner of `ibp`, `crown` or `alpha-crown`, with variants after a colon, as in `crown:stock+unfolded`.

    stock: auto_LiRPA's own softmax, whose upper bound is unsound for wide score ranges (default: the repaired one).
    unfolded: the values stay vectors (default: the readout is folded into the value projection).
    fused: the attention operators of this package take the place of softmax and product.
    Raises: ArgumentError for an unknown method or variant.
    """
    method, _, tail = name.partition(":")
    variants = [part for part in tail.split("+") if part]
    if method not in METHODS or any(variant not in VARIANTS for variant in variants):
        raise ArgumentError(
            f"method: expected {', '.join(METHODS)}, with variants as in crown:stock+unfolded "
            f"({', '.join(VARIANTS)}), got {name!r}"
        )
    if "stock" in variants and "fused" in variants:
        raise ArgumentError(f"method: 'stock' and 'fused' name two operators for one place, got {name!r}")

    def run(problems: Sequence[HeadProblem]) -> list[Certificate]:
        groups: dict[tuple, list[int]] = {}
        for index, problem in enumerate(problems):
            fixed = problem.query_is_fixed
            groups.setdefault((*group_key(problem), problem.head.W_V.shape[0], fixed), []).append(index)
        uppers, seconds = [math.inf] * len(problems), [0.0] * len(problems)
        for members in groups.values():
            for start in range(0, len(members), CHUNK):
                chunk = members[start : start + CHUNK]
                started = time.perf_counter()
                found = upper_bounds([problems[i] for i in chunk], method, variants, iterations)
                each = (time.perf_counter() - started) / len(chunk)
                for i, upper in zip(chunk, found.tolist(), strict=True):
                    uppers[i], seconds[i] = upper, each
        return certificates(problems, name, uppers, seconds)

    return run


def upper_bounds(
    problems: Sequence[HeadProblem], method: str, variants: Sequence[str] = (), iterations: int = 20
) -> Tensor:
    """Upper bounds (B,) of f for problems with one `group_key`; infinity where auto_LiRPA's is not finite."""
    folded = "unfolded" not in variants
    images = [_image(problem, folded) for problem in problems]
    region = {name: torch.stack([image[name] for image in images]) for name in images[0]}
    with double_precision():
        graph = _Core(problems[0].head.d_head).eval()
        network = BoundedModule(
            graph, region["centre"], bound_opts=OPTIONS, verbose=False, device=region["centre"].device
        )
        if "fused" in variants:
            attach(network)
        elif "stock" not in variants:
            repair_softmax(network)
        x = BoundedTensor(region["centre"], TokenImage(region))
        network.set_bound_opts({"optimize_bound_args": {"iteration": iterations, "lr_alpha": 0.1}})
        upper = network.compute_bounds(
            x=(x,), C=region["readout"].unsqueeze(1), method=METHODS[method], bound_lower=False, bound_upper=True
        )[1].detach()
        value = (network(region["centre"]) * region["readout"]).sum(-1)
    upper = upper.squeeze(1)
    upper = upper + MARGIN * (value.abs() + (upper - value).abs())
    return torch.where(torch.isfinite(upper), upper, torch.full_like(upper, math.inf)).cpu()


class _Core(torch.nn.Module):
    """softmax(q K^T) V of rows (b, 1, n + 1, d_head + d_v): n rows (key, value), then one row (query, -)."""

    def __init__(self, d_head: int) -> None:
        super().__init__()
        self.d_head = d_head

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x[:, :, -1:, : self.d_head], x[:, :, :-1, : self.d_head], x[:, :, :-1, self.d_head :]
        p = torch.softmax(torch.matmul(q, k.transpose(2, 3)), -1)
        return torch.matmul(p, v).flatten(1)


class TokenImage(PerturbationLpNorm):
    """Rows (key, value) and (query) of a batch of heads as the linear images of their tokens' balls or boxes.

    max A.x = A.x0 + sum_j R_j |W^T A_j|, where the query's row joins its own token's: R_i |W^T A_i + W_Q^T A_q|.
    Interval propagation starts from the rows' exact ranges.
    """

    def __init__(self, region: dict[str, Tensor]) -> None:
        super().__init__(norm=math.inf, eps=0.0)
        self.keys, self.query, self.radius = region["keys"], region["query"], region["radius"]
        self.own = region["own"]  # (B, n) 1 at the key that moves with the query

    def _reach(self, moved: Tensor) -> Tensor:
        """max of moved . displacement: moved (B, S, p, m) -> (B, S)."""
        if self.radius.ndim == 2:
            return (moved.norm(dim=-1) * self.radius[:, None]).sum(-1)
        return (moved.abs() * self.radius[:, None]).sum((-1, -2))

    def _pulled(self, A: Tensor) -> Tensor:
        """Gradients (B, S, n + 1, m) in the tokens' displacements, of rows A (B, S, n + 1, d_head + d_v)."""
        keys = A[:, :, :-1] @ self.keys[:, None]
        query = A[:, :, -1, : self.query.shape[1]] @ self.query
        query = query + torch.einsum("bsnm,bn->bsm", keys, self.own)
        return torch.cat([keys * (1 - self.own)[:, None, :, None], query.unsqueeze(2)], 2)

    def concretize(self, x, A, sign=-1, aux=None):
        """max (sign 1) or min (sign -1) of A . x over the region; A (B, S, ...) of x's shape, result (B, S)."""
        if A is None:
            return None
        if not isinstance(A, Tensor):
            size = x[0].numel()
            A = torch.eye(size, dtype=x.dtype, device=x.device).expand(x.shape[0], size, size)
        A = A.reshape(x.shape[0], -1, *x.shape[2:])
        return torch.einsum("bsnm,bnm->bs", A, x[:, 0]) + sign * self._reach(self._pulled(A))

    def init(self, x, aux=None, forward=False):
        if self.radius.ndim == 2:
            keys, query = self.keys.norm(dim=-1), self.query.norm(dim=-1)  # (B, h + d_v), (B, h)
            half_keys = self.radius[:, :-1, None] * keys[:, None]
            own = self.radius[:, -1:, None] * keys[:, None]
            half_query = self.radius[:, -1:] * query
        else:
            half_keys = self.radius[:, :-1] @ self.keys.abs().transpose(1, 2)
            own = self.radius[:, -1:] @ self.keys.abs().transpose(1, 2)
            half_query = (self.radius[:, -1:] @ self.query.abs().transpose(1, 2))[:, 0]
        half_keys = torch.where(self.own[..., None] > 0, own, half_keys)
        half_query = torch.nn.functional.pad(half_query, (0, x.shape[-1] - half_query.shape[-1]))
        half = torch.cat([half_keys, half_query[:, None]], 1).unsqueeze(1)
        self.x_L, self.x_U = x - half, x + half
        return LinearBound(None, None, None, None, self.x_L, self.x_U), x, None


def _image(problem: HeadProblem, folded: bool) -> dict[str, Tensor]:
    """One head's rows at the centre, the maps from displacements to rows, radii (n + 1, last the query's), readout."""
    head, row = problem.head, problem.query_place
    centres, spread = centre_and_spread(problem)
    order = problem.key_order
    z = centres[order]
    zq = problem.query_point if row is None else centres[row]
    mixed = problem.readout if head.W_O is None else head.W_O.T @ problem.readout
    values, bias = ((head.W_V.T @ mixed)[None], (head.b_V @ mixed)[None]) if folded else (head.W_V, head.b_V)
    keys = torch.cat([head.W_K, values])  # (h + d_v, d)
    query = head.scale * head.W_Q
    q = head.scale * (head.W_Q @ zq + head.b_Q)
    # The key bias is common to all scores, but a relaxation of the products sees it: it stays, as in the model.
    rows = torch.cat([z @ keys.T + torch.cat([head.b_K, bias]), torch.nn.functional.pad(q, (0, values.shape[0]))[None]])
    still = problem.query_is_fixed
    query_radius = torch.zeros_like(spread[0]) if still or row is None else spread[row]
    own = torch.zeros(len(order), dtype=torch.float64, device=z.device)
    if problem.has_own_key:
        own[-1] = 1.0
    if isinstance(problem.placed, Balls):  # a ball's image depends on the maps' Gram matrix only: the R of a QR will do
        factor = torch.linalg.qr(torch.cat([keys, query]).T, mode="r")[1].T
        keys, query = factor[: keys.shape[0]], factor[keys.shape[0] :]
    return {
        "centre": rows.unsqueeze(0),
        "keys": keys,
        "query": query,
        "radius": torch.cat([spread[order], query_radius[None]]),
        "own": own,
        "readout": torch.ones(1, dtype=torch.float64, device=z.device) if folded else mixed,
    }


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """auto_LiRPA builds constants in the default dtype, and warns of what its users cannot change."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.onnx.*")
            yield
    finally:
        torch.set_default_dtype(before)
