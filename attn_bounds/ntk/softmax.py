"""Softmax attention: a small trainable QKV model, one head of a pretrained model, and their empirical NTK."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attn_bounds.errors import ArgumentError, ShapeError
from attn_bounds.head import AttentionHead
from attn_bounds.ntk.empirical import empirical_ntk, module_function


class SoftmaxAttention(nn.Module):
    """One softmax attention head over tokens, averaged over positions, with a linear readout.

        f(X) = mean_i softmax_j(q_i.k_j * scale) v_j R + b,   q = x W_Q + b_Q,  k = x W_K + b_K,  v = x W_V + b_V
        x = token + P, P a trainable position embedding (without it the model cannot tell where a token stands)

    Input (n, tokens * d) or (n, tokens, d), float64; output (n, outputs). All weights are trainable.
    """

    def __init__(self, tokens: int, d: int, d_head: int, outputs: int, *, seed: int = 0) -> None:
        super().__init__()
        if min(tokens, d, d_head, outputs) < 1:
            raise ArgumentError(f"tokens, d, d_head, outputs: expected >= 1, got {tokens}, {d}, {d_head}, {outputs}")
        self.tokens, self.d, self.scale = tokens, d, d_head**-0.5
        generator = torch.Generator().manual_seed(seed)

        def normal(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=generator, dtype=torch.float64) / math.sqrt(rows))

        self.w_q, self.w_k, self.w_v = (normal(d, d_head) for _ in range(3))
        self.b_q, self.b_k, self.b_v = (nn.Parameter(torch.zeros(d_head, dtype=torch.float64)) for _ in range(3))
        self.position = nn.Parameter(torch.randn(tokens, d, generator=generator, dtype=torch.float64))
        self.readout = normal(d_head, outputs)
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float64))

    @classmethod
    def from_head(cls, head: AttentionHead, tokens: int, outputs: int, *, seed: int = 0) -> SoftmaxAttention:
        """Start from a pretrained head's query, key and value weights.

        W_O is absorbed by the readout, and P starts at 0: hidden states hold their positions already.
        """
        out = cls(tokens, head.d, head.d_head, outputs, seed=seed)
        with torch.no_grad():
            out.position.zero_()
            for mine, theirs in ((out.w_q, head.W_Q.mT), (out.w_k, head.W_K.mT), (out.w_v, head.W_V.mT)):
                mine.copy_(theirs)
            for bias, source in ((out.b_q, head.b_Q), (out.b_k, head.b_K), (out.b_v, head.b_V)):
                bias.copy_(source)
        out.scale = float(head.scale)
        return out

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:].numel() != self.tokens * self.d:
            raise ShapeError(f"x: expected (n, {self.tokens}, {self.d}) or flattened, got {tuple(x.shape)}")
        x = x.reshape(len(x), self.tokens, self.d) + self.position
        q, k, v = x @ self.w_q + self.b_q, x @ self.w_k + self.b_k, x @ self.w_v + self.b_v
        weights = torch.softmax(q @ k.mT * self.scale, -1)
        return (weights @ v).mean(1) @ self.readout + self.bias


def fit_module(module: nn.Module, X: Tensor, Y: Tensor, *, steps: int = 300, rate: float = 1e-2) -> float:
    """Train a module in place with Adam on the mean squared error (full batch); return the final error."""
    optimiser = torch.optim.Adam(module.parameters(), lr=rate)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = ((module(X) - Y) ** 2).sum(1).mean()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        return float(((module(X) - Y) ** 2).sum(1).mean())


class EmpiricalKernel:
    """The empirical NTK of a module at its present parameters, averaged over outputs, as a kernel k(x1, x2=None)."""

    def __init__(self, module: nn.Module, *, memory_mib: float = 1024.0) -> None:
        self._f, self._params = module_function(module)
        self._memory = memory_mib

    def __call__(self, x1: Tensor, x2: Tensor | None = None) -> Tensor:
        K = empirical_ntk(self._f, self._params, x1, x2, memory_mib=self._memory)
        with torch.no_grad():
            outputs = self._f(self._params, x1[:1]).numel()
        return K / outputs


# Two classes of sentences that differ in one sentiment word and share everything else.
_SUBJECTS = ("food", "room", "film", "book", "game", "song", "tea", "bread", "garden", "show")
_GOOD = ("great", "good", "lovely", "perfect", "wonderful", "excellent")
_BAD = ("bad", "awful", "poor", "terrible", "horrible", "boring")
_TIMES = ("today", "tonight")


def sentences() -> tuple[list[str], list[int]]:
    """Return template sentences and their sentiment: 1 for praise, 0 for blame."""
    texts, labels = [], []
    for label, adjectives in ((1, _GOOD), (0, _BAD)):
        for subject in _SUBJECTS:
            for adjective in adjectives:
                for time in _TIMES:
                    texts.append(f"the {subject} was really {adjective} {time}")
                    labels.append(label)
    return texts, labels


def token_features(model: Any, tokenizer: Any, texts: Sequence[str], layer: int) -> tuple[Tensor, list[int]]:
    """Compute the hidden states that enter a layer of a BERT-like model, (n, tokens, d) in float64.

    Only texts with the most common token count are kept, so that no padding is attended to; their indices come too.
    """
    ids = [tokenizer(text)["input_ids"] for text in texts]
    lengths = [len(row) for row in ids]
    common = max(set(lengths), key=lengths.count)
    kept = [i for i, length in enumerate(lengths) if length == common]
    with torch.no_grad():
        states = model(input_ids=torch.tensor([ids[i] for i in kept]), output_hidden_states=True).hidden_states
    if not 0 <= layer < len(states) - 1:
        raise ArgumentError(f"layer: expected 0..{len(states) - 2}, got {layer}")
    return states[layer].double(), kept
