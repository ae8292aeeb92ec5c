"""The verifier's runners on single heads against the plain graph in which every token is an input of its own."""

import numpy as np
import pytest
import torch
from attn_bounds_lirpa import OPTIONS, attach, heads, repair_softmax
from attn_bounds_lirpa.compat import IS_03
from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm

import attn_bounds as ab
from attn_bounds import errors

pytestmark = pytest.mark.lirpa


class PlainHead(torch.nn.Module):
    """A head of separate token inputs (1, d), written out with linear layers."""

    def __init__(self, problem: ab.HeadProblem, folded: bool) -> None:
        super().__init__()
        head, self.query = problem.head, problem.query_index
        mixed = head.W_O.T @ problem.readout
        self.q = self._linear(head.W_Q * head.scale, head.b_Q * head.scale)
        self.k = self._linear(head.W_K, head.b_K)
        self.v = (
            self._linear((mixed @ head.W_V)[None], (mixed @ head.b_V)[None])
            if folded
            else self._linear(head.W_V, head.b_V)
        )
        self.o = None if folded else self._linear(mixed[None], torch.zeros(1))

    @staticmethod
    def _linear(weight: torch.Tensor, bias: torch.Tensor) -> torch.nn.Linear:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight, layer.bias = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(bias.clone())
        return layer

    def forward(self, *tokens: torch.Tensor) -> torch.Tensor:
        k = torch.cat([self.k(z).unsqueeze(1) for z in tokens], 1).unsqueeze(1)
        v = torch.cat([self.v(z).unsqueeze(1) for z in tokens], 1).unsqueeze(1)
        q = self.q(tokens[self.query]).unsqueeze(1).unsqueeze(1)
        out = torch.matmul(torch.softmax(torch.matmul(q, k.transpose(2, 3)), -1), v).flatten(1)
        return out if self.o is None else self.o(out)


def problems(region: str, moves: bool) -> list[ab.HeadProblem]:
    rng = np.random.default_rng(1)
    draw = rng.standard_normal
    out = []
    for radius in (0.01, 0.1):  # two heads in one batch
        head = ab.AttentionHead(draw((3, 7)), draw((3, 7)), draw((2, 7)), draw((5, 2)), draw(3), draw(3), draw(2))
        z = draw((4, 7))
        where = ab.TokenBall(radius) if region == "ball" else ab.TokenBox.around(z, radius)
        out.append(ab.HeadProblem(head, z, 1, draw(5), where, moves))
    return out


def plain_bound(problem: ab.HeadProblem, method: str, variants: list[str]) -> float:
    tokens = [z[None] for z in problem.tokens]
    network = BoundedModule(
        PlainHead(problem, "unfolded" not in variants).eval(), tuple(tokens), bound_opts=OPTIONS, verbose=False
    )
    if "fused" in variants:
        attach(network)
    elif "stock" not in variants:
        repair_softmax(network)
    placed = problem.placed
    if hasattr(placed, "radius"):
        parts = [PerturbationLpNorm(norm=2, eps=float(r)) for r in placed.radius]
    else:
        parts = [
            PerturbationLpNorm(norm=np.inf, x_L=low[None], x_U=high[None])
            for low, high in zip(placed.lower, placed.upper, strict=True)
        ]
    x = tuple(BoundedTensor(z, part) for z, part in zip(tokens, parts, strict=True))
    return network.compute_bounds(x=x, method=heads.METHODS[method], bound_lower=False)[1].item()


@pytest.mark.parametrize("region", ["ball", "box"])
@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize(
    "name", ["ibp", "crown", "ibp:unfolded", "crown:unfolded", "crown:stock", "crown:stock+unfolded", "crown:fused"]
)
def test_the_batched_graph_gives_the_bounds_of_the_plain_one(region, moves, name):
    if IS_03 and "stock" in name:
        pytest.skip("the stock softmax of this version needs options of its own")
    method, _, tail = name.partition(":")
    variants = [part for part in tail.split("+") if part]
    units = problems(region, moves)
    answers = heads.runner(name)(units)
    for unit, answer in zip(units, answers, strict=True):
        assert answer.method == name and answer.upper >= answer.lower > answer.nominal
        assert answer.upper == pytest.approx(plain_bound(unit, method, variants), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("moves", [True, False])
def test_alpha_crown_is_no_worse_than_crown(moves):
    units = problems("ball", moves)
    crown, alpha = heads.runner("crown")(units), heads.runner("alpha-crown")(units)
    assert all(a.upper <= c.upper + 1e-9 and a.upper >= a.lower for a, c in zip(alpha, crown, strict=True))


def test_masks_and_outside_queries(rng):
    draw = rng.standard_normal
    head = ab.AttentionHead(draw((3, 5)), draw((3, 5)), draw((2, 5)))
    z, readout = draw((4, 5)), draw(2)
    masked = ab.HeadProblem(head, z, 0, readout, ab.TokenBall(0.05), keys=[False, True, True, False])
    less = ab.HeadProblem(head, z[1:3], z[0], readout, ab.TokenBall(0.05))
    a, b = heads.runner("crown")([masked, less])
    assert a.upper == pytest.approx(b.upper, rel=1e-10) and a.upper >= a.lower > a.nominal


def test_no_bound_below_an_attained_value(rng):
    from attn_bounds.certify import search_many

    units = []
    for _ in range(20):
        draw, size = rng.standard_normal, 10 ** rng.uniform(-0.5, 0.8)
        head = ab.AttentionHead(size * draw((2, 4)), draw((2, 4)), draw((2, 4)), b_V=draw(2))
        units.append(ab.HeadProblem(head, draw((3, 4)), 1, draw(2), ab.TokenBall(10 ** rng.uniform(-3, 0))))
    found = [c.lower for c in search_many(units)]
    for name in ("ibp", "crown", "alpha-crown"):
        answers = heads.runner(name)(units)
        assert all(a.upper >= low for a, low in zip(answers, found, strict=True)), name


def test_unknown_variants_are_named():
    for name in ("crown:magic", "zonotope", "crown:stock+fused"):
        with pytest.raises(errors.ArgumentError, match="method: "):
            heads.runner(name)


@pytest.fixture
def rng():
    return np.random.default_rng(0)
