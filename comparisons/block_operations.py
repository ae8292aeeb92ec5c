"""What CROWN pays for each operation of a block by itself: every other operation is replaced by its linear part.

    python comparisons/block_operations.py --model minilm --layer 0 --tokens 4 --radius 0.001

Prints per operation its own second-order maximum, CROWN's bound with only that operation left nonlinear, and the ratio;
then CROWN's bound of the whole block. Needs auto_LiRPA 0.7 or newer.
"""

from __future__ import annotations

import argparse

import torch
from attn_bounds_lirpa import blocks

from attn_bounds.cli.compare import PROMPTS
from attn_bounds.models import load_model, seeded_readout
from attn_bounds.residual import UNIVARIATE, BlockReadout, block_of, second_order_terms

Tensors = tuple[torch.Tensor, ...]


class OnlyOne(BlockReadout):
    """A block whose operations, but `kept`, are replaced by their linear parts at the centre."""

    def __init__(self, whole: BlockReadout, kept: str) -> None:
        super().__init__(whole.block, whole.stream, whole.position, whole.readout)
        self.kept = kept
        self.centre: dict[str, tuple[Tensors, torch.Tensor]] = {}
        self.slope: dict[str, torch.Tensor] = {}

        def note(name: str, kind: str, inputs: Tensors, out: torch.Tensor) -> torch.Tensor:
            self.centre[name] = tuple(x.contiguous() for x in inputs), out.contiguous()
            if kind in UNIVARIATE:
                slope = torch.func.vmap(torch.func.grad(UNIVARIATE[kind]))(inputs[0].flatten())
                self.slope[name] = slope.reshape(inputs[0].shape)
            return out

        whole.traced(torch.zeros_like(whole.stream), note)

    def traced(self, w, tap):  # type: ignore[no-untyped-def]
        """As in BlockReadout, with the linear parts in place."""

        def linear(name: str, kind: str, inputs: Tensors, out: torch.Tensor) -> torch.Tensor:
            if name == self.kept:
                return tap(name, kind, inputs, out)
            at, value = self.centre[name]
            if kind == "product":
                return at[0] * inputs[1] + at[1] * inputs[0] - at[0] * at[1]
            moved = inputs[0] - at[0]
            if kind == "softmax":
                return value + value * moved - value * (value * moved).sum(-1, keepdim=True)
            return value + self.slope[name] * moved

        return super().traced(w, linear)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--radius", type=float, default=0.001)
    options = parser.parse_args()
    model = load_model(options.model)
    stream = model.stream(PROMPTS[0], options.layer, options.tokens)
    block = block_of(model.model, options.layer)
    whole = BlockReadout(block, stream, options.tokens - 1, seeded_readout(0, model.width))
    for name, terms in second_order_terms(whole).items():
        own = options.radius**2 * float(sum(term.maximum() for term in terms))
        bound = blocks.crown_upper(OnlyOne(whole, name), options.radius)
        print(
            f"{name:22s} own {own:.3e}  CROWN {bound:.3e}  ratio {bound / own if own else float('nan'):.2f}", flush=True
        )
    print(f"{'whole block':22s} CROWN {blocks.crown_upper(whole, options.radius):.3e}")


if __name__ == "__main__":
    main()
