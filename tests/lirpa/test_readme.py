"""The custom operator of plugins/README.md runs as printed, and its bounds hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.lirpa


def test_the_readme_operator_is_sound_and_optimisable():
    text = (Path(__file__).parents[2] / "plugins" / "README.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "class BoundSquare" in block]
    names: dict = {}
    exec(compile(code, "plugins/README.md", "exec"), names)
    x, model = names["x"], names["model"]
    y = model(x + 0.3 * (2 * torch.rand(2000, 3) - 1))
    for lower in (names["lower"], names["tighter"]):
        assert (lower <= y + 1e-9).all()
    assert (names["upper"] >= y - 1e-9).all()
    assert (names["tighter"] >= names["lower"] - 1e-9).all()
