"""Graph optimisers and the ONNX loader that alpha-beta-CROWN configs name with Customized(...)."""

from __future__ import annotations

import gzip
import math
import tempfile
import time
from pathlib import Path

import attn_bounds_lirpa
import torch
from attn_bounds_lirpa.optimise import optimised_lower_bound

from attn_bounds.errors import ArgumentError

from .guard import box_of, install_guard
from .onnx_route import input_shape, load_onnx, onnx_to_torch
from .token_balls import use_token_balls


def fuse_attention(
    network,
    *,
    regime: str = "wide",
    rows: int = 1024,
    iterations: int = 0,
    rows_iterations: int = 0,
    seconds: float = math.inf,
    lr: float = 0.2,
    token_balls: bool = False,
    guard: bool = True,
) -> None:
    """Give a converted network the attention operators, a sound softmax, and a guard against unsound verdicts.

    regime: "wide" (value-aware relaxation). rows: largest number of extra backward rows for the values' range.
    rows_iterations: Adam steps for each intermediate row at the root, iterations: the same for the final rows (both 0:
    only what the verifier itself optimises); nothing new is started after `seconds` of it. token_balls: the config's
    L2 ball is one around each token. The options may also stand in the verifier's bound options,
    `model: bound_opts: "{'attn_bounds': {...}}"`, which win.
    """
    options = {"regime": regime, "rows": rows, "iterations": iterations, "rows_iterations": rows_iterations}
    options.update(seconds=seconds, lr=lr, token_balls=token_balls, guard=guard)
    given = network.bound_opts.get("attn_bounds", {})
    unknown = set(given) - set(options)
    if unknown:
        raise ArgumentError(f"attn_bounds: unknown options {sorted(unknown)}; known are {sorted(options)}")
    options.update(given)
    if options["regime"] != "wide":
        raise ArgumentError(f"regime: expected 'wide', got {options['regime']!r}")
    report = attn_bounds_lirpa.attach(network, max_rows=options["rows"])
    for name in report["fused"]:
        print(f"attn-bounds: attention at {name} fused")
    for name, reason in report["skipped"].items():
        print(f"attn-bounds: softmax {name} repaired but not fused: {reason}")
    if options["iterations"] or options["rows_iterations"]:
        _optimise_at_root(network, options)
    if options["token_balls"]:
        use_token_balls(network)
    if options["guard"]:
        install_guard(network)


def repair_softmax(network, *, guard: bool = True) -> None:
    """Soundness only: a softmax relaxation without the stock faults, and the guard."""
    for name in attn_bounds_lirpa.repair_softmax(network):
        print(f"attn-bounds: {name}")
    if guard:
        install_guard(network)


def _optimise_at_root(network, options: dict) -> None:
    """Make the verifier's first pass use intermediate bounds that were optimised row by row.

    The bounds are kept for the region they were computed on: later passes at the root without bounds of their own get
    them, and branch and bound starts from them.
    """
    init_alpha, compute_bounds = network.init_alpha, network.compute_bounds
    known: dict = {}

    def bounds_for(x):
        here = box_of(x)
        if here is None or not known or any(not torch.equal(a, b) for a, b in zip(here, known["at"], strict=True)):
            return None
        return known["bounds"]

    def optimised_init_alpha(x, *args, interm_bounds=None, **kwargs):
        c = kwargs.get("c")
        if interm_bounds is None and c is not None and box_of(x) is not None:
            network.compute_bounds = compute_bounds
            network.init_alpha = init_alpha
            try:
                _, bounds, _ = optimised_lower_bound(
                    network,
                    x,
                    c,
                    options["rows_iterations"],
                    options["iterations"],
                    options["lr"],
                    time.monotonic() + options["seconds"],
                    stop_above=0.0,
                )
            finally:
                network.compute_bounds = with_known_bounds
                network.init_alpha = optimised_init_alpha
            known.update(at=[t.detach().clone() for t in box_of(x)], bounds=bounds)
            interm_bounds = bounds
        return init_alpha(x, *args, interm_bounds=interm_bounds, **kwargs)

    def with_known_bounds(x=None, *args, interm_bounds=None, **kwargs):
        if not interm_bounds and x is not None and kwargs.get("final_node_name") in (None, network.final_name):
            interm_bounds = bounds_for(x) or interm_bounds
        return compute_bounds(x, *args, interm_bounds=interm_bounds, **kwargs)

    network.init_alpha = optimised_init_alpha
    network.compute_bounds = with_known_bounds


def load_onnx_and_vnnlib(file_root, onnx_path, vnnlib_path):
    """The verifier's onnx_loader with this package's ONNX route: (torch model, input shape, VNN-LIB as it reads it)."""
    from read_vnnlib import read_vnnlib  # the verifier's own module

    model = load_onnx(Path(file_root, onnx_path))
    path = Path(file_root, vnnlib_path)
    with tempfile.TemporaryDirectory() as folder:
        if path.suffix == ".gz":
            plain = Path(folder, path.stem)
            plain.write_bytes(gzip.decompress(path.read_bytes()))
            path = plain
        return onnx_to_torch(model), (-1, *input_shape(model)[1:]), read_vnnlib(str(path))
