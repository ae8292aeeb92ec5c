"""Make a GPT-2 on this machine: a small one trained on text that ships with Python, or a GPT-2-shaped random one.

    python comparisons/make_gpt2.py trained runs/small-gpt2      # 4 layers, 4 heads, width 128; minutes on two cores
    python comparisons/make_gpt2.py random runs/random-gpt2      # GPT-2 small's shape: 12 layers, 12 heads, width 768

Tokens are bytes, so prompts are given with --token-ids: `python comparisons/make_gpt2.py ids "some text"` prints them.
The weights are saved the way transformers does, for `--model FOLDER`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tqdm import trange
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

BYTES = 256


def training_text() -> torch.Tensor:
    """The bytes of Python's own language reference, as pydoc ships it."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.tensor(list(text.encode("utf-8", "ignore")))


def trained(steps: int, seed: int, context: int = 64, batch: int = 16) -> GPT2Model:
    """A small GPT-2 after `steps` steps of Adam on the training text; prints its loss on the last tenth."""
    torch.manual_seed(seed)
    config = GPT2Config(
        n_embd=128, n_layer=4, n_head=4, vocab_size=BYTES, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    text = training_text()
    cut = len(text) * 9 // 10
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)

    def loss_on(part: torch.Tensor, count: int) -> torch.Tensor:
        at = torch.randint(len(part) - context, (count,))
        ids = torch.stack([part[i : i + context] for i in at.tolist()])
        return model(input_ids=ids, labels=ids).loss

    for _ in trange(steps, unit="step"):
        optimiser.zero_grad()
        loss_on(text[:cut], batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        print(f"held-out loss {float(loss_on(text[cut:], 128)):.3f} nats a byte (uniform: 5.545)")
    return model.transformer


def random_gpt2(seed: int) -> GPT2Model:
    """GPT-2 small's shape with random weights, large enough that attention is not uniform."""
    torch.manual_seed(seed)
    return GPT2Model(
        GPT2Config(vocab_size=BYTES, n_positions=128, initializer_range=0.05, bos_token_id=0, eos_token_id=0)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("trained", "random"):
        one = kinds.add_parser(kind)
        one.add_argument("out", type=Path)
        one.add_argument("--seed", type=int, default=0)
        if kind == "trained":
            one.add_argument("--steps", type=int, default=1500)
    kinds.add_parser("ids").add_argument("text")
    options = parser.parse_args()
    if options.kind == "ids":
        print(",".join(str(byte) for byte in options.text.encode()))
        return
    model = trained(options.steps, options.seed) if options.kind == "trained" else random_gpt2(options.seed)
    model.save_pretrained(options.out)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million weights in {options.out}")


if __name__ == "__main__":
    main()
