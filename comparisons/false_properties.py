"""Write properties that are false on purpose, as VNN-LIB files with an instances.csv: no sound verifier answers unsat.

    python comparisons/false_properties.py vit --out false --count 6
    python comparisons/checkout.py path/to/alpha-beta-CROWN --csv false/instances.csv --timeout 20 --out runs
        --configs verify_configs/vit_stock.yaml verify_configs/vit_repaired.yaml verify_configs/vit.yaml

Each keeps an instance's box and claims that the runner-up at the box's centre always has the largest score, which the
centre itself refutes; that is checked with onnxruntime.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnxruntime
from attn_bounds_abcrown.onnx_route import input_shape, load_onnx
from attn_bounds_abcrown.vnnlib_reader import Property, read_vnnlib


def text_of(prop: Property, label: int, classes: int) -> str:
    """The property "class `label` has the largest score on the box", its negation as VNN-LIB asks for it."""
    lines = [f"(declare-const X_{i} Real)" for i in range(len(prop.lower))]
    lines += [f"(declare-const Y_{i} Real)" for i in range(classes)]
    for i, (low, high) in enumerate(zip(prop.lower.tolist(), prop.upper.tolist(), strict=True)):
        lines += [f"(assert (<= X_{i} {high!r}))", f"(assert (>= X_{i} {low!r}))"]
    others = [f"  (and (>= Y_{i} Y_{label}))" for i in range(classes) if i != label]
    return "\n".join([*lines, "(assert (or", *others, "))", ""])


def main() -> None:
    """Write the files and the csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with onnx/ and vnnlib/ of the benchmark")
    parser.add_argument("--models", nargs="+", default=["pgd_2_3_16", "ibp_3_3_8"])
    parser.add_argument("--count", type=int, default=6, help="properties of each model")
    parser.add_argument("--timeout", type=float, default=20)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in args.models:
        onnx = (args.data / "onnx" / f"{name}.onnx.gz").resolve()
        model = load_onnx(onnx)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        for path in sorted((args.data / "vnnlib").glob(f"{name}_*.vnnlib.gz"))[: args.count]:
            prop = read_vnnlib(path)
            centre = ((prop.lower + prop.upper) / 2).astype(np.float32).reshape(input_shape(model))
            scores = session.run(None, {session.get_inputs()[0].name: centre})[0].reshape(-1)
            label = int(np.argsort(scores)[-2])
            target = args.out / f"false_{path.name.removesuffix('.gz')}"
            target.write_text(text_of(prop, label, len(scores)))
            assert read_vnnlib(target).violated(scores.astype(np.float64)), f"{target}: the centre satisfies it"
            lines.append(f"{onnx},{target.name},{args.timeout:g}\n")
    (args.out / "instances.csv").write_text("".join(lines))
    print(f"{len(lines)} false properties in {args.out}")


if __name__ == "__main__":
    main()
