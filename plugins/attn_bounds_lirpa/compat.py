"""Which auto_LiRPA is installed, and what differs between the versions that are supported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.find_spec("auto_LiRPA")
IS_03 = _spec is not None and not (Path(_spec.origin).parent / "edit_graph.py").exists()
HAS_LSE_SOFTMAX = not IS_03
