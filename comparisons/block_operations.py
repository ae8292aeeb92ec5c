"""What CROWN pays for each operation of a block by itself: every other operation is replaced by its linear part.

    python comparisons/block_operations.py --model minilm --units 8
    python comparisons/block_operations.py --model minilm --units 48 --linear activation

The first prints, per operation, CROWN's bound with only that operation left nonlinear over the operation's own
second-order maximum, and its share of the sum of those bounds: median (range) over units that spread evenly over
prompts, blocks and readouts. The second asks whether one operation spoils the prediction: rank correlation of predicted
and measured looseness of the whole block, and of the block with that operation linear. Needs auto_LiRPA 0.7 or newer.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Collection, Iterator
from itertools import product

import pandas as pd
import torch
from attn_bounds_lirpa import blocks

from attn_bounds.cli.compare import PROMPTS
from attn_bounds.models import load_model, seeded_readout
from attn_bounds.residual import UNIVARIATE, BlockReadout, block_of, block_residual, second_order_terms

Tensors = tuple[torch.Tensor, ...]
READOUTS = 4
FORMS = {"softmax one operation": False, "softmax in parts": True}


class Partly(BlockReadout):
    """A block whose operations, but those of `kept`, are replaced by their linear parts at the centre."""

    def __init__(self, whole: BlockReadout, kept: Collection[str]) -> None:
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
            if name in self.kept:
                return tap(name, kind, inputs, out)
            at, value = self.centre[name]
            if kind == "product":
                return at[0] * inputs[1] + at[1] * inputs[0] - at[0] * at[1]
            moved = inputs[0] - at[0]
            if kind == "softmax":
                return value + value * moved - value * (value * moved).sum(-1, keepdim=True)
            return value + self.slope[name] * moved

        return super().traced(w, linear)


def units(options: argparse.Namespace) -> Iterator[tuple[str, BlockReadout]]:
    """`--units` readouts of blocks, spread evenly over prompts, blocks and readouts."""
    model = load_model(options.model)
    prompts = PROMPTS if options.token_ids is None else options.token_ids
    every = list(product(range(len(prompts)), range(model.layers), range(READOUTS)))
    count = min(options.units, len(every))
    for prompt, layer, readout in (every[i * len(every) // count] for i in range(count)):
        stream = model.stream(prompts[prompt], layer, options.tokens)
        c = seeded_readout(readout, model.width)
        yield f"{prompt}-{layer}-{readout}", BlockReadout(block_of(model.model, layer), stream, len(stream) - 1, c)


def by_operation(options: argparse.Namespace) -> pd.DataFrame:
    """One row a unit and operation: own maximum, CROWN's bound with nothing else left nonlinear."""
    rows = []
    for unit, whole in units(options):
        for name, terms in second_order_terms(whole).items():
            own = options.radius**2 * float(sum(term.maximum() for term in terms))
            bound = blocks.crown_upper(Partly(whole, [name]), options.radius)
            rows.append({"unit": unit, "operation": name, "own": own, "crown": bound})
        print(f"unit {unit}", flush=True)
    table = pd.DataFrame(rows)
    # Operations whose own maximum is zero (they only bend downwards here) have no ratio.
    table["ratio"] = (table["crown"] / table["own"]).where(table["own"] > 0)
    table["share"] = table["crown"] / table.groupby("unit")["crown"].transform("sum")
    return table


def ranks(options: argparse.Namespace) -> pd.DataFrame:
    """One row a unit, block (whole, or one operation linear) and form of softmax: predicted and measured looseness."""
    rows = []
    for unit, whole in units(options):
        names = list(second_order_terms(whole))
        if options.linear not in names:
            raise SystemExit(f"--linear: expected one of {', '.join(names)}, got {options.linear!r}")
        kept = [name for name in names if name != options.linear]
        for label, readout in (("whole", whole), (f"{options.linear} linear", Partly(whole, kept))):
            found = block_residual(readout, options.radius)
            sums = {False: found.per_operation, True: found.per_operation_split}
            for form, split in FORMS.items():
                bound = blocks.crown_upper(readout, options.radius, split_softmax=split)
                rows.append({
                    "unit": unit, "block": label, "form": form, "predicted": sums[split] / found.second_order,
                    "measured": bound / found.attained, "crown / sum": bound / sums[split],
                })  # fmt: skip
        print(f"unit {unit}", flush=True)
    return pd.DataFrame(rows)


def spread(values: pd.Series) -> str:
    """Median (least to greatest)."""
    return f"{values.median():.3g} ({values.min():.3g} to {values.max():.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm")
    parser.add_argument(
        "--token-ids", action="append", type=lambda text: [int(i) for i in text.split(",")], metavar="I,J,...",
        help="repeatable; for models without a tokenizer",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--radius", type=float, default=0.001)
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--linear", metavar="OPERATION", help="compare ranks with this operation linear")
    parser.add_argument("--out", metavar="CSV", help="write every unit's figures there")
    options = parser.parse_args()
    if options.units < 1 or not (math.isfinite(options.radius) and options.radius > 0):
        parser.error("--units: expected at least 1; --radius: expected a finite number above 0")
    warnings.filterwarnings("ignore")  # auto_LiRPA's tracing warns of constants, which they are
    table = by_operation(options) if options.linear is None else ranks(options)
    if options.out:
        table.to_csv(options.out, index=False)
    if options.linear is None:
        for name, part in table.groupby("operation", sort=False):
            print(f"{name:22s} CROWN / own {spread(part['ratio']):28s} share {spread(part['share'])}")
        return
    for (label, form), part in table.groupby(["block", "form"], sort=False):
        rank = part[["predicted", "measured"]].corr(method="spearman").iloc[0, 1]
        print(f"{label:18s} {form:22s} Spearman {rank:.2f}  CROWN / sum {spread(part['crown / sum'])}")


if __name__ == "__main__":
    main()
