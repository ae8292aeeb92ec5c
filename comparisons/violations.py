"""Hunt for violations: random small heads, the certificate's upper bound against the best value that search attains.

    python comparisons/violations.py --count 200000 --seed 0

Draws saturated, tied and zero weights, one key, zero and huge radii, balls, boxes, fixed, moving and outside queries,
masks, and slopes. Prints one line per kind and the total; exits with 1 if any bound lies below an attained value.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from attn_bounds.affine import affine_upper_bounds, gradient_slope
from attn_bounds.bounds.lagrangian import lagrangian
from attn_bounds.exact import exact
from attn_bounds.head import AttentionHead
from attn_bounds.problem import HeadProblem
from attn_bounds.reduced import Reduced, reduce
from attn_bounds.regions import TokenBall, TokenBox
from attn_bounds.search import ascend, value_and_gradient

BATCH = 64


def random_problem(rng: np.random.Generator, kind: dict) -> HeadProblem:
    """One small head of the kind, its tokens and its region."""
    n, d, h = kind["n"], kind["d"], kind["h"]
    size = 10 ** rng.uniform(-1.5, 1.0)
    flavour = rng.integers(8)
    W_Q, W_K = size * rng.standard_normal((2, h, d))
    W_V = rng.standard_normal((2, d)) * 10 ** rng.uniform(-1, 1)
    tokens = rng.standard_normal((n, d)) + rng.standard_normal(d) * rng.integers(2)
    if flavour == 0:
        W_Q *= 0
    elif flavour == 1:
        W_V *= 0
    elif flavour == 2:
        tokens[:] = tokens[0]
    elif flavour == 3:
        W_Q, W_K = W_Q * 3, W_K * 3
    head = AttentionHead(W_Q, W_K, W_V, b_Q=rng.standard_normal(h) * rng.integers(2), b_K=rng.standard_normal(h))
    query = rng.standard_normal(d) if kind["outside"] else int(rng.integers(n))
    points = n + (kind["outside"] and kind["moves"])
    radius = 10 ** rng.uniform(-3, 1) if rng.integers(3) else 10 ** rng.uniform(-3, -1)
    radii = radius * (rng.random(points) + 0.1)
    if rng.integers(4) == 0:
        radii[rng.integers(points)] = 0.0
    if not kind["outside"] and kind["moves"]:
        radii[query] = radius
    elif kind["moves"]:
        radii[-1] = radius
    keys = None
    if kind["masked"]:
        keys = rng.random(n) < 0.6
        keys[query if kind["own"] and not kind["outside"] else rng.integers(n)] = True
        if not kind["outside"]:
            keys[query] = kind["own"]
        if not keys.any():
            keys[(query + 1) % n] = True
    if kind["box"]:
        centre = np.concatenate([tokens, query[None]]) if points > n else tokens
        half = radii[:, None] * rng.random((points, d))
        half[rng.random(half.shape) < 0.1] = 0.0
        if kind["moves"]:
            half[-1 if kind["outside"] else query, 0] = radius
        region = TokenBox(centre - half, centre + half)
    else:
        region = TokenBall(radii, relative=False)
    return HeadProblem(head, tokens, query, rng.standard_normal(2), region, query_moves=kind["moves"], keys=keys)


def random_batches(rng: np.random.Generator, count: int) -> Iterator[tuple[str, Reduced]]:
    """Batches of like problems until `count` are drawn."""
    drawn = 0
    while drawn < count:
        kind = {name: bool(rng.integers(2)) for name in ("outside", "moves", "masked", "own", "box")}
        kind |= {"n": int(rng.integers(1, 5)), "d": int(rng.integers(1, 6)), "h": int(rng.integers(1, 4))}
        kind["masked"] &= kind["n"] > 1
        groups: dict[tuple, list[HeadProblem]] = {}
        for _ in range(min(BATCH, count - drawn)):
            problem = random_problem(rng, kind)
            groups.setdefault((len(problem.key_order), problem.has_own_key, problem.query_is_fixed), []).append(problem)
            drawn += 1
        where = "outside" if kind["outside"] else "token"
        name = f"{'box' if kind['box'] else 'ball'}, {where} query {'moving' if kind['moves'] else 'fixed'}"
        for problems in groups.values():
            yield name, reduce(problems)


def linear_search(
    reduced: Reduced, keys: torch.Tensor, query: torch.Tensor, seed: int, steps: int = 25
) -> torch.Tensor:
    """The largest f - G.w (B,) seen on the way from several starts, each step half way to where the gradient points."""
    rx = reduced.key_radius[:, None, :, None] if reduced.kind == "ball" else reduced.key_radius[:, None]
    ry = reduced.query_radius[:, None, None] if reduced.kind == "ball" else reduced.query_radius[:, None]
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(reduced.size, 6, *keys.shape[1:], generator=draw, dtype=torch.float64)
    y = torch.randn(reduced.size, 6, query.shape[1], generator=draw, dtype=torch.float64)
    best = torch.full_like(reduced.nominal, -torch.inf)

    def onto(w: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
        if reduced.kind == "box":
            return torch.sign(w) * radius
        return w / torch.linalg.vector_norm(w, dim=-1, keepdim=True).clamp_min(1e-300) * radius

    x, y = onto(x, rx), onto(y, ry)
    for _ in range(steps):
        f, gx, gy = value_and_gradient(reduced, x, y)
        value = f - (x * keys[:, None]).flatten(2).sum(2) - (y * query[:, None]).sum(2)
        best = torch.maximum(best, value.amax(1))
        x = onto(onto(gx - keys[:, None], rx) + x, rx)
        y = onto(onto(gy - query[:, None], ry) + y, ry)
    return best


def slope_violations(reduced: Reduced, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Affine offsets at random slopes around the gradient, and the best attained value of the same quantity."""
    keys, query = gradient_slope(reduced)
    size = float(rng.choice([0.0, 0.3, 3.0])) * torch.cat([keys.flatten(), query.flatten()]).abs().mean()
    keys = keys + size * torch.as_tensor(rng.standard_normal(tuple(keys.shape)))
    query = query + size * torch.as_tensor(rng.standard_normal(tuple(query.shape)))
    return affine_upper_bounds(reduced, keys, query)[0], linear_search(reduced, keys, query, int(rng.integers(1 << 30)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(options.seed)
    torch.set_num_threads(1)
    tried: Counter = Counter()
    bounded: Counter = Counter()
    violated: Counter = Counter()

    def note(name: str, upper: torch.Tensor, attained: torch.Tensor) -> None:
        tried[name] += len(upper)
        bounded[name] += int(torch.isfinite(upper).sum())
        bad = (upper < attained) | torch.isnan(upper)
        violated[name] += int(bad.sum())
        for i in bad.nonzero()[:3, 0].tolist():
            figures = f"upper {float(upper[i]):.17g}, attained {float(attained[i]):.17g}"
            print(f"VIOLATION {name}: {figures}", file=sys.stderr)

    for name, reduced in random_batches(rng, options.count):
        attained = ascend(reduced, starts=8, seed=int(rng.integers(1 << 30)))[2]
        if reduced.query_fixed:  # the true maximum
            x, y = exact(reduced).point  # type: ignore[misc]
            attained = torch.maximum(attained, reduced.value(x[:, None], y[:, None])[:, 0])
        note(name, lagrangian(reduced, max_pieces=int(rng.choice([1, 1, 4]))).upper, attained)
        note(name + ", slope", *slope_violations(reduced, rng))
    for name in sorted(tried):
        print(f"{name:36s} {tried[name]:8d} tried {bounded[name]:8d} bounded {violated[name]:4d} violations")
    print(f"total {sum(tried.values())} tried, {sum(violated.values())} violations")
    return int(sum(violated.values()) > 0)


if __name__ == "__main__":
    sys.exit(main())
