"""Small random problems that the tests of the moment bounds, the slack and the solvers share."""

from __future__ import annotations

import numpy as np

from attn_bounds.head import AttentionHead
from attn_bounds.problem import HeadProblem
from attn_bounds.reduced import Reduced, reduce
from attn_bounds.regions import TokenBall, TokenBox


def small_problem(seed: int, radius: float, box: bool = False, n: int = 4, d: int = 6, **more: object) -> HeadProblem:
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((3, 2, d)) / np.sqrt(d)
    tokens = rng.standard_normal((n, d))
    region = TokenBox(tokens - radius, tokens + radius) if box else TokenBall(radius)
    head = AttentionHead(2 * W[0], W[1], W[2], b_Q=rng.standard_normal(2))
    return HeadProblem(head, tokens, more.pop("query", 1), rng.standard_normal(2), region, **more)


def batch(radius: float, count: int = 6, box: bool = False, **more: object) -> Reduced:
    return reduce([small_problem(seed, radius, box, **more) for seed in range(count)])
