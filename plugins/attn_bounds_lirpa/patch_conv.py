"""Backward bounds of a patch embedding (a convolution whose stride is its kernel) as one matrix product."""

from __future__ import annotations

import torch
from auto_LiRPA.bound_ops import BoundConv
from torch import Tensor


class BoundPatchConv(BoundConv):
    """A convolution over disjoint patches; same bounds as BoundConv, without its transposed convolution."""

    def bound_backward(self, last_lA, last_uA, *x, **kwargs):
        constant = all(not node.perturbed for node in x[1:])
        if not constant or not all(a is None or isinstance(a, Tensor) for a in (last_lA, last_uA)):
            return super().bound_backward(last_lA, last_uA, *x, **kwargs)
        weight, bias = x[1].lower, x[2].lower if len(x) == 3 else None
        (lower, lbias), (upper, ubias) = (_side(a, weight, bias, self.input_shape) for a in (last_lA, last_uA))
        return [(lower, upper), *[(None, None)] * (len(x) - 1)], lbias, ubias


def _side(last, weight, bias, shape):
    if last is None:
        return None, 0
    spec, batch = last.shape[:2]
    channels, (high, wide) = weight.shape[1], weight.shape[2:]
    rows, columns = last.shape[-2:]
    a = last.permute(0, 1, 3, 4, 2) @ weight.flatten(1)  # (s, b, rows, columns, channels * high * wide)
    a = a.view(spec, batch, rows, columns, channels, high, wide).permute(0, 1, 4, 2, 5, 3, 6)
    a = a.reshape(spec, batch, channels, rows * high, columns * wide)
    if a.shape[-2:] != shape[-2:]:
        a = torch.nn.functional.pad(a, (0, shape[-1] - a.shape[-1], 0, shape[-2] - a.shape[-2]))
    return a, 0 if bias is None else torch.einsum("sbchw,c->sb", last, bias)


def use_patch_convolutions(network) -> list[str]:
    """Give every convolution over disjoint patches its matrix form; returns their names."""
    done = []
    for node in network.nodes():
        if type(node) is BoundConv and len(node.attr["kernel_shape"]) == 2 and node.groups == 1:
            disjoint = list(node.stride) == list(node.attr["kernel_shape"]) and not any(node.padding)
            if disjoint and all(size == 1 for size in node.dilation):
                node.__class__ = BoundPatchConv
                done.append(node.name)
    return done
