"""Second-order terms of a whole transformer block: one joint maximum against the sum over its operations.

g maps a displacement w of the block's residual stream (each token in units of its own norm, one joint ball |w| <= r) to
a readout of the normalised token that the next block's heads read. Its remainder f(w) = g(w) - g(0) - g'(0).w is, to
second order, w^T H w / 2, and H is a sum over the operations on the way: each contributes its own second derivative,
weighted by the readout's derivative in its output and pulled back by the Jacobian of its inputs. Bound propagation
bounds each operation by itself and pays the sum of their maxima; the truth is the maximum of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch.func import grad, jvp, vmap

from ._arrays import as_float64
from .errors import ArgumentError, SolverError, UnsupportedModelError

CHUNK = 256  # tangents pushed through the block together


@dataclass(frozen=True)
class Norm:
    """A layer norm: scale (x - mean) / sqrt(var + eps) + shift."""

    scale: torch.Tensor
    shift: torch.Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """The layer norm of a torch module."""
        return cls(module.weight.detach().double(), module.bias.detach().double(), float(module.eps))


Linear = tuple[torch.Tensor, torch.Tensor]  # weight (out, in), bias


@dataclass(frozen=True)
class Block:
    """The weights of one block. `first` (pre-norm models) reads the stream; `last` gives the next block's tokens."""

    heads: int
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    up: Linear
    down: Linear
    first: Norm | None
    middle: Norm
    last: Norm
    tanh_gelu: bool

    @property
    def pre_norm(self) -> bool:
        """Whether the norms stand before attention and MLP (GPT-2), not after (BERT)."""
        return self.first is not None


def block_of(model: Any, layer: int) -> Block:
    """The block `layer` of a transformers BERT or GPT-2. Raises: UnsupportedModelError, ArgumentError."""
    kind = model.config.model_type
    if kind not in ("bert", "gpt2"):
        raise UnsupportedModelError(f"model: expected a BERT or a GPT-2, got {kind!r}")
    if not 0 <= layer < model.config.num_hidden_layers:
        raise ArgumentError(f"layer: expected 0..{model.config.num_hidden_layers - 1}, got {layer}")
    if kind == "bert":
        one = getattr(model, "bert", model).encoder.layer[layer]
        if model.config.hidden_act != "gelu":
            raise UnsupportedModelError(f"model: expected the activation 'gelu', got {model.config.hidden_act!r}")
        own = one.attention.self
        parts = (own.query, own.key, own.value, one.attention.output.dense, one.intermediate.dense, one.output.dense)
        q, k, v, o, up, down = ((m.weight.detach().double(), m.bias.detach().double()) for m in parts)
        middle, last = Norm.of(one.attention.output.LayerNorm), Norm.of(one.output.LayerNorm)
        return Block(model.config.num_attention_heads, q, k, v, o, up, down, None, middle, last, False)
    base = getattr(model, "transformer", model)
    if model.config.activation_function != "gelu_new":
        raise UnsupportedModelError(f"model: expected 'gelu_new', got {model.config.activation_function!r}")
    one = base.h[layer]
    fused = (one.attn.c_attn, one.attn.c_proj, one.mlp.c_fc, one.mlp.c_proj)
    qkv, o, up, down = ((m.weight.detach().double().T, m.bias.detach().double()) for m in fused)  # (in, out) there
    q, k, v = zip(qkv[0].chunk(3), qkv[1].chunk(3), strict=True)
    after = base.h[layer + 1].ln_1 if layer + 1 < len(base.h) else base.ln_f
    first, middle, last = Norm.of(one.ln_1), Norm.of(one.ln_2), Norm.of(after)
    return Block(model.config.num_attention_heads, q, k, v, o, up, down, first, middle, last, True)


class BlockReadout(torch.nn.Module):
    """g(w): readout . (the normalised token at `position`) for stream x (n, d) + |x_j| w_j.

    Takes w (..., n, d), returns (...,). Every operation is named on its way through `tap`, which does nothing here.
    """

    def __init__(self, block: Block, stream: Any, position: int, readout: Any) -> None:
        super().__init__()
        d = block.query[0].shape[1]
        self.block = block
        self.stream = as_float64("stream", stream, ("n", d))
        self.readout = as_float64("readout", readout, (d,))
        if not 0 <= position < self.stream.shape[0]:
            raise ArgumentError(f"position: expected 0..{self.stream.shape[0] - 1}, got {position}")
        self.position = position
        self.size = torch.linalg.vector_norm(self.stream, dim=-1, keepdim=True)

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        """g at w (..., n, d)."""
        return self.traced(w, lambda name, kind, inputs, out: out)

    def traced(self, w: torch.Tensor, tap: Callable[..., torch.Tensor]) -> torch.Tensor:
        """g at w, every operation's output passing through tap(name, kind, inputs, output)."""
        b, i = self.block, self.position
        x = self.stream + self.size * w
        u = x if b.first is None else self._norm("norm 1", x, b.first, tap)
        split = (-1, b.heads, b.query[0].shape[0] // b.heads)

        def project(part: Linear, z: torch.Tensor) -> torch.Tensor:
            y = z @ part[0].T + part[1]
            return y.reshape(*y.shape[:-1], *split[1:]).transpose(-2, -3)  # (..., heads, n, d_head)

        q, k, v = project(b.query, u[..., i : i + 1, :]), project(b.key, u), project(b.value, u)
        q = q / math.sqrt(split[2])
        scores = tap("scores", "product", (q.expand_as(k), k), q * k).sum(-1)  # (..., heads, n)
        p = tap("softmax", "softmax", (scores,), torch.softmax(scores, -1))
        p_full = p.unsqueeze(-1).expand_as(v)
        mixed = tap("mix", "product", (p_full, v), p_full * v).sum(-2)  # (..., heads, d_head)
        y = x[..., i, :] + mixed.flatten(-2) @ b.output[0].T + b.output[1]
        if b.pre_norm:
            y = y + self._mlp(self._norm("norm 2", y, b.middle, tap), tap)
        else:
            y = self._norm("norm 2", y, b.middle, tap)
            y = y + self._mlp(y, tap)
        return (self._norm("norm 3", y, b.last, tap) * self.readout).sum(-1)

    def _mlp(self, y: torch.Tensor, tap: Callable[..., torch.Tensor]) -> torch.Tensor:
        b = self.block
        h = y @ b.up[0].T + b.up[1]
        kind = "gelu tanh" if b.tanh_gelu else "gelu"
        return tap("activation", kind, (h,), ACTIVATIONS[kind](h)) @ b.down[0].T + b.down[1]

    @staticmethod
    def _norm(name: str, x: torch.Tensor, norm: Norm, tap: Callable[..., torch.Tensor]) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        squares = tap(f"{name}: square", "square", (centred,), centred * centred)
        variance = squares.mean(-1, keepdim=True) + norm.eps
        inverse = tap(f"{name}: inverse root", "inverse root", (variance,), variance**-0.5)
        full = inverse.expand_as(centred)
        return tap(f"{name}: product", "product", (centred, full), centred * full) * norm.scale + norm.shift


def _gelu(h: torch.Tensor) -> torch.Tensor:
    return h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))


def _gelu_tanh(h: torch.Tensor) -> torch.Tensor:
    return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h * h * h)))


ACTIVATIONS = {"gelu": _gelu, "gelu tanh": _gelu_tanh}
UNIVARIATE = ACTIVATIONS | {"square": torch.square, "inverse root": torch.rsqrt}


@dataclass(frozen=True)
class Product:
    """m products weight x y of inputs with Jacobians gx, gy (m, N): form weight (gx.w)(gy.w)."""

    weight: torch.Tensor
    gx: torch.Tensor
    gy: torch.Tensor

    def form(self, w: torch.Tensor) -> torch.Tensor:
        """The second-order term at w (N,)."""
        return (self.weight * (self.gx @ w) * (self.gy @ w)).sum()

    def maximum(self) -> torch.Tensor:
        """Sum over the products of their own maxima on the unit ball."""
        sizes = torch.linalg.vector_norm(self.gx, dim=-1) * torch.linalg.vector_norm(self.gy, dim=-1)
        return (self.weight.abs() * sizes + self.weight * (self.gx * self.gy).sum(-1)).sum() / 2


@dataclass(frozen=True)
class Bend:
    """m functions of one variable with second derivative times weight `bend` and Jacobians g (m, N)."""

    bend: torch.Tensor
    g: torch.Tensor

    def form(self, w: torch.Tensor) -> torch.Tensor:
        """The second-order term at w (N,)."""
        return (self.bend * (self.g @ w) ** 2).sum() / 2

    def maximum(self) -> torch.Tensor:
        """Sum over the functions of their own maxima on the unit ball."""
        return (self.bend.clamp_min(0.0) * self.g.square().sum(-1)).sum() / 2


@dataclass(frozen=True)
class Joint:
    """m vector operations with second derivatives H (m, k, k), weighted, and Jacobians g (m, k, N)."""

    hessian: torch.Tensor
    g: torch.Tensor

    def form(self, w: torch.Tensor) -> torch.Tensor:
        """The second-order term at w (N,)."""
        moved = self.g @ w
        return torch.einsum("mk,mkl,ml->", moved, self.hessian, moved) / 2

    def maximum(self) -> torch.Tensor:
        """Sum over the operations of their own maxima on the unit ball: largest eigenvalues of g^T H g."""
        values, vectors = torch.linalg.eigh(self.g @ self.g.transpose(1, 2))
        root = vectors * values.clamp_min(0.0).sqrt()[:, None]
        return torch.linalg.eigvalsh(root.transpose(1, 2) @ self.hessian @ root)[:, -1].clamp_min(0.0).sum() / 2


Term = Product | Bend | Joint


def second_order_terms(readout: BlockReadout, split_softmax: bool = False) -> dict[str, list[Term]]:
    """The terms of w^T H w / 2 by operation: their forms add up to it at every w.

    split_softmax: softmax as exponentials, one inverse and products, as verifiers that have no softmax see it.
    """
    n, d = readout.stream.shape
    zero = torch.zeros(n, d, dtype=torch.float64)
    kinds: dict[str, str] = {}
    outputs: dict[str, torch.Tensor] = {}

    def note(name: str, kind: str, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        kinds[name], outputs[name] = kind, out
        return out

    readout.traced(zero, note)

    def shifted(shifts: dict[str, torch.Tensor]) -> torch.Tensor:
        return readout.traced(zero, lambda name, kind, inputs, out: out + shifts[name])

    weights = grad(shifted)({name: torch.zeros_like(out) for name, out in outputs.items()})

    def inputs_at(w: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
        found: dict[str, tuple[torch.Tensor, ...]] = {}

        def keep(name: str, kind: str, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
            found[name] = inputs
            return out

        readout.traced(w, keep)
        return found

    values = inputs_at(zero)
    push = vmap(lambda w: jvp(inputs_at, (zero,), (w,))[1])
    eye = torch.eye(n * d, dtype=torch.float64).reshape(n * d, n, d)
    pieces = [push(eye[s : s + CHUNK]) for s in range(0, n * d, CHUNK)]
    terms: dict[str, list[Term]] = {}
    for name, kind in kinds.items():
        g = [
            torch.cat([p[name][a] for p in pieces]).flatten(1).T.reshape(*values[name][a].shape, n * d)
            for a in range(len(values[name]))
        ]
        terms[name] = list(_terms(kind, weights[name], values[name], g, split_softmax))
    return terms


def _terms(
    kind: str, weight: torch.Tensor, values: tuple[torch.Tensor, ...], g: list[torch.Tensor], split: bool
) -> Iterator[Term]:
    size = g[0].shape[-1]
    if kind == "product":
        yield Product(weight.flatten(), g[0].reshape(-1, size), g[1].reshape(-1, size))
    elif kind == "softmax":
        yield from _softmax_terms(weight, values[0], g[0], split)
    else:
        x = values[0].flatten()
        second = vmap(grad(grad(UNIVARIATE[kind])))(x)
        yield Bend(weight.flatten() * second, g[0].reshape(-1, size))


def _softmax_terms(weight: torch.Tensor, s: torch.Tensor, g: torch.Tensor, split: bool) -> Iterator[Term]:
    """weight, s (heads, n), g (heads, n, N): per head one operation, or p_j = e_j rho, rho = 1 / sum_k e_k."""
    p = torch.softmax(s, -1)
    mean = (p * weight).sum(-1, keepdim=True)
    if not split:  # second derivative of sum_j weight_j p_j in the scores
        tilt = p * (weight - mean)
        cross = tilt[:, :, None] * p[:, None] + p[:, :, None] * tilt[:, None]
        yield Joint(torch.diag_embed(tilt) - cross, g)
        return
    e = torch.exp(s - s.amax(-1, keepdim=True))
    rho = 1 / e.sum(-1, keepdim=True)
    g_e = e[..., None] * g
    g_z = g_e.sum(1)  # (heads, N)
    g_rho = -(rho**2) * g_z
    size = g.shape[-1]
    yield Product(weight.flatten(), g_e.reshape(-1, size), g_rho[:, None].expand_as(g_e).reshape(-1, size))
    down = (weight * e).sum(-1, keepdim=True)  # derivative in rho
    yield Bend((down * 2 * rho**3).flatten(), g_z)
    yield Bend(((weight * rho - down * rho**2) * e).flatten(), g.reshape(-1, size))


@dataclass(frozen=True)
class Residual:
    """One unit: what a readout of a block does beyond its linear part on |w| <= radius."""

    attained: float  # largest f found by ascent
    second_order: float  # radius^2 / 2 times the largest eigenvalue of H (at least 0)
    per_operation: float  # sum of the operations' own maxima, softmax one operation
    per_operation_split: float  # the same, softmax in its parts
    effective_rank: float  # |H|_F^2 / |H|_2^2
    by_operation: dict[str, float]

    @property
    def predicted(self) -> float:
        """Predicted looseness of bound propagation: per_operation / second_order."""
        return self.per_operation / self.second_order


def block_residual(readout: BlockReadout, radius: float, starts: int = 4, seed: int = 0, steps: int = 200) -> Residual:
    """Measure one unit: ascent, the second-order term (Lanczos on Hessian-vector products), the operations' terms.

    Raises: ArgumentError, SolverError where Lanczos does not converge.
    """
    if not (math.isfinite(radius) and radius > 0):
        raise ArgumentError(f"radius: expected a finite number above 0, got {radius}")
    n, d = readout.stream.shape
    zero = torch.zeros(n, d, dtype=torch.float64)
    slope = grad(readout)(zero)
    base = readout(zero)

    def remainder(w: torch.Tensor) -> torch.Tensor:
        return readout(w) - base - (slope * w).sum((-1, -2))

    def hessian(v: torch.Tensor) -> torch.Tensor:
        return jvp(grad(readout), (zero,), (v,))[1]

    top, direction = _extreme(hessian, (n, d), "LA")
    low, _ = _extreme(hessian, (n, d), "SA")
    draw = torch.Generator().manual_seed(seed)
    probes = torch.randn(32, n, d, generator=draw, dtype=torch.float64)
    frobenius = float(vmap(hessian)(probes).square().sum((1, 2)).mean())  # E |H z|^2
    first = torch.stack([direction, -direction])
    more = torch.randn(max(starts - 2, 0), n, d, generator=draw, dtype=torch.float64)
    attained = _ascend(remainder, torch.cat([first, more]), radius, max(-low, 0.0) + 0.1 * max(top, -low), steps)
    half = radius**2
    whole, parts = second_order_terms(readout), second_order_terms(readout, split_softmax=True)["softmax"]
    by = {name: half * float(sum(t.maximum() for t in terms)) for name, terms in whole.items()}
    split = half * float(sum(t.maximum() for t in parts))
    total = sum(by.values())
    return Residual(
        attained=attained,
        second_order=half * max(top, 0.0) / 2,
        per_operation=total,
        per_operation_split=total - by["softmax"] + split,
        effective_rank=frobenius / max(top, -low) ** 2 if max(top, -low) > 0 else 0.0,
        by_operation=by,
    )


def _extreme(
    product: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, int], which: str
) -> tuple[float, torch.Tensor]:
    """Largest (LA) or smallest (SA) eigenvalue of a symmetric operator, and its vector, by Lanczos."""
    size = shape[0] * shape[1]

    def apply(v: np.ndarray) -> np.ndarray:
        return product(torch.from_numpy(np.ascontiguousarray(v)).reshape(shape)).reshape(-1).numpy()

    start = np.random.default_rng(0).standard_normal(size)
    try:
        values, vectors = eigsh(
            LinearOperator((size, size), matvec=apply, dtype=np.float64), k=1, which=which, v0=start, tol=1e-6
        )
    except ArpackNoConvergence as error:
        raise SolverError(f"block residual: Lanczos did not converge ({error})") from None
    return float(values[0]), torch.from_numpy(np.ascontiguousarray(vectors[:, 0])).reshape(shape)


def _ascend(
    f: Callable[[torch.Tensor], torch.Tensor], starts: torch.Tensor, radius: float, shift: float, steps: int
) -> float:
    """Largest f on the ball by shifted power steps, w <- radius (f' + shift w) / |.|, from several starts."""
    size = torch.linalg.vector_norm
    w = radius * starts / size(starts, dim=(1, 2), keepdim=True)
    slope = vmap(grad(f))
    best = f(w)
    for _ in range(steps):
        moved = slope(w) + shift * w
        w = radius * moved / size(moved, dim=(1, 2), keepdim=True).clamp_min(1e-300)
        now = f(w)
        if bool((now <= best + 1e-9 * best.abs()).all()):
            best = torch.maximum(best, now)
            break
        best = torch.maximum(best, now)
    return max(float(best.max()), 0.0)
