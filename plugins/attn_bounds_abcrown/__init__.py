"""Verifier plug-in: attention bounds inside alpha-beta-CROWN, by lines in its yaml and no edit of its code.

general:
  graph_optimizer: Customized("attn_bounds_abcrown", "fuse_attention")
model:
  onnx_loader: Customized("attn_bounds_abcrown", "load_onnx_and_vnnlib")   # only where onnx2pytorch needs repairs
"""

from .hooks import fuse_attention, load_onnx_and_vnnlib, repair_softmax
from .text import attention_head, text_transformer, token_data

__all__ = [
    "attention_head",
    "fuse_attention",
    "load_onnx_and_vnnlib",
    "repair_softmax",
    "text_transformer",
    "token_data",
]
