"""Verifier plug-in: attention bounds inside alpha-beta-CROWN, by lines in its yaml and no edit of its code.

general:
  graph_optimizer: Customized("attn_bounds_abcrown", "fuse_attention")
model:
  onnx_loader: Customized("attn_bounds_abcrown", "load_onnx_and_vnnlib")   # only where onnx2pytorch needs repairs
"""

from .hooks import fuse_attention, load_onnx_and_vnnlib, repair_softmax

__all__ = ["fuse_attention", "load_onnx_and_vnnlib", "repair_softmax"]
