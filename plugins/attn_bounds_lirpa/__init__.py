"""Verifier plug-in: custom auto_LiRPA bound operators for attention."""

from .fuse import fuse_attention, repair_softmax

__all__ = ["fuse_attention", "repair_softmax"]
