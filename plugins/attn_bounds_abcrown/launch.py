"""Run an unmodified alpha-beta-CROWN checkout where onnx2pytorch needs repairs or torchvision is absent.

python -m attn_bounds_abcrown.launch CHECKOUT --config vit.yaml [the verifier's own options]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from attn_bounds.errors import ArgumentError

from .onnx_route import import_onnx2pytorch, torchvision_or_stand_in


def main(argv: list[str]) -> None:
    """Import onnx2pytorch with its repairs, then run the verifier's own entry point with the other arguments."""
    script = Path(argv[0], "complete_verifier", "abcrown.py") if argv else Path()
    if not script.is_file():
        raise ArgumentError(f"abcrown: expected a checkout with complete_verifier/abcrown.py, got {argv[:1]}")
    with torchvision_or_stand_in():
        import_onnx2pytorch()
        sys.path.insert(0, str(script.parent))
        sys.argv = [str(script), *argv[1:]]
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
