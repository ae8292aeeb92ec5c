"""Train the small text transformer of verify_configs/text.yaml, and write it, its tokens and one of its heads.

    python comparisons/make_text_model.py verify_configs

The task: six words, some good, some bad, some that turn the next word round; is there more good than bad?
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from attn_bounds_abcrown.text import attention_head, text_transformer

GOOD, BAD, TURN, PLAIN = range(8), range(8, 16), range(16, 18), range(18, 24)
WORDS, LENGTH, WIDTH = 24, 6, 16


def sentences(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Word numbers (count, LENGTH) and classes (count,), those without a majority left out."""
    words = torch.randint(WORDS, (count, LENGTH), generator=generator)
    worth = torch.zeros(WORDS)
    worth[list(GOOD)], worth[list(BAD)] = 1, -1
    turned = torch.cat([torch.zeros(count, 1, dtype=torch.bool), (words >= 16)[:, :-1] & (words < 18)[:, :-1]], 1)
    total = torch.where(turned, -worth[words], worth[words]).sum(1)
    return words[total != 0], (total[total != 0] > 0).long()


def main() -> None:
    """Train, say how well it does, write text.pt, text_tokens.pt and head.pt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = text_transformer(WIDTH, 2, 2)
    words = torch.nn.Embedding(WORDS, WIDTH)
    places = torch.nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
    optimiser = torch.optim.AdamW([*model.parameters(), *words.parameters(), places], lr=3e-3, weight_decay=0.05)
    for _ in range(args.steps):
        batch, label = sentences(128, generator)
        tokens = words(batch) + places
        noise = torch.randn(tokens.shape, generator=generator)  # margins, as an adversary would ask for them
        loss = torch.nn.functional.cross_entropy(model(tokens + 0.1 * noise), label)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    batch, label = sentences(2000, torch.Generator().manual_seed(1))
    with torch.no_grad():
        tokens = words(batch) + places
        right = model(tokens).argmax(1) == label
    print(f"accuracy on {len(label)} new sentences: {right.float().mean():.3f}")
    chosen = right.nonzero().flatten()[:4]
    torch.save(model.state_dict(), args.folder / "text.pt")
    torch.save({"tokens": tokens[chosen], "labels": label[chosen]}, args.folder / "text_tokens.pt")
    head = attention_head(WIDTH, 2)
    head.attention = model.blocks[0].attention
    head.readout.weight.data = (model.scores.weight[1] - model.scores.weight[0]).detach()[None]
    torch.save(head.state_dict(), args.folder / "head.pt")
    with torch.no_grad():
        print("head's readout at the four sentences:", (-head(tokens[chosen]))[:, 0].tolist())


if __name__ == "__main__":
    main()
