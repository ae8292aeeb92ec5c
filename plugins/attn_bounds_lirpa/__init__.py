"""Verifier plug-in: custom auto_LiRPA bound operators for attention."""

from . import compat  # noqa: F401  (repairs an old auto_LiRPA before anything imports it)
from .best import best_bounds
from .fuse import attach, fuse_attention, repair_softmax
from .modules import AttentionHeads
from .optimise import optimised_lower_bound
from .options import OPTIONS
from .regions import PerturbationTokenBall
from .swap import swap_attention

__all__ = [
    "OPTIONS",
    "AttentionHeads",
    "PerturbationTokenBall",
    "attach",
    "best_bounds",
    "fuse_attention",
    "optimised_lower_bound",
    "repair_softmax",
    "swap_attention",
]
