"""A small text transformer and an attention head with a readout, as models of alpha-beta-CROWN configs; their data.

model:
  name: Customized("attn_bounds_abcrown", "text_transformer", width=16, heads=2, blocks=2)
  path: text.pt
data:
  dataset: Customized("attn_bounds_abcrown", "token_data", path="text_tokens.pt")

The inputs are the tokens themselves (embeddings with positions added), so that a region is a set of tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from attn_bounds.errors import ModelLoadError, ShapeError


class _Attention(torch.nn.Module):
    """Multi-head attention of tokens (b, n, width) without a mask, written as the matrix products it is made of."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        if width % heads:
            raise ShapeError(f"heads: expected a divisor of width {width}, got {heads}")
        self.heads, self.size = heads, width // heads
        self.q, self.k, self.v, self.out = (torch.nn.Linear(width, width) for _ in range(4))

    def mix(self, x: Tensor) -> Tensor:
        """What each head gathers, (b, heads, n, width / heads)."""
        q, k, v = (
            layer(x).reshape(-1, x.shape[1], self.heads, self.size).permute(0, 2, 1, 3)
            for layer in (self.q, self.k, self.v)
        )
        return torch.softmax(q.matmul(k.transpose(-1, -2)) * self.size**-0.5, -1).matmul(v)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(x).permute(0, 2, 1, 3).reshape(-1, x.shape[1], self.heads * self.size))


class _Block(torch.nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = _Attention(width, heads)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.ReLU(), torch.nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class TextTransformer(torch.nn.Module):
    """Class scores (b, classes) of tokens (b, n, width): blocks of attention and MLP with residuals, mean, linear."""

    def __init__(self, width: int, heads: int, blocks: int, classes: int):
        super().__init__()
        self.blocks = torch.nn.Sequential(*(_Block(width, heads) for _ in range(blocks)))
        self.scores = torch.nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.blocks(x).mean(1))


class HeadReadout(torch.nn.Module):
    """`at_most` minus a readout of the attention at one query, (b, 1): positive where it stays below `at_most`."""

    def __init__(self, width: int, heads: int, at_most: float, query: int):
        super().__init__()
        self.attention = _Attention(width, heads)
        self.readout = torch.nn.Linear(width, 1, bias=False)
        self.at_most, self.query = at_most, query

    def forward(self, x: Tensor) -> Tensor:
        return self.at_most - self.readout(self.attention(x)[:, self.query])


def text_transformer(width: int = 16, heads: int = 2, blocks: int = 2, classes: int = 2) -> TextTransformer:
    """The transformer of a config, before its weights are loaded."""
    return TextTransformer(width, heads, blocks, classes)


def attention_head(width: int = 16, heads: int = 2, at_most: float = 0.0, query: int = 0) -> HeadReadout:
    """The attention of a config with one readout, before its weights are loaded."""
    return HeadReadout(width, heads, at_most, query)


def token_data(specification: dict, path: str) -> dict:
    """The verifier's data set: tokens (N, n, width) and labels (N,) of a file, radius and norm of the config."""
    if not Path(path).is_file():
        raise ModelLoadError(f"path: no file {path}; paths are relative to the folder that the verifier runs in")
    stored = torch.load(path, weights_only=True)
    dtype = torch.get_default_dtype()
    return {
        "X": stored["tokens"].to(dtype),
        "labels": stored["labels"],
        "eps": float(specification["epsilon"]),
        "norm": float(specification["norm"]),
    }
