"""Look for a counterexample by projected gradient ascent, and check it in onnxruntime with the box tested exactly."""

from __future__ import annotations

import numpy as np
import torch

from .vnnlib_reader import Property


def find_counterexample(
    module: torch.nn.Module, model, prop: Property, shape: tuple[int, ...], restarts: int = 20, steps: int = 40
) -> tuple[np.ndarray, np.ndarray] | None:
    """(x, y) with x in the box and y = onnxruntime's output unsafe, or None; the centre of the box is always tried."""
    generator = torch.Generator().manual_seed(0)
    dtype = next(module.parameters()).dtype
    low, high = (torch.as_tensor(end, dtype=dtype).reshape(shape) for end in (prop.lower, prop.upper))
    centre = (low + high) / 2
    random = low + torch.rand(restarts, *shape[1:], generator=generator, dtype=dtype) * (high - low)
    session = _session(model)
    for a, b in prop.unsafe:
        rows, limits = torch.as_tensor(a, dtype=dtype), torch.as_tensor(b, dtype=dtype)
        x = torch.cat([centre, random])
        for step in range(steps + 1):
            x.requires_grad_(True)
            distance = (module(x) @ rows.T - limits).amax(1)  # <= 0 where the output is unsafe
            hits = (distance <= 0).nonzero().flatten()
            for hit in hits[:3]:
                found = _check(session, x[hit].detach(), prop, shape)
                if found is not None:
                    return found
            if step == steps:
                break
            (gradient,) = torch.autograd.grad(distance.sum(), x)
            size = 0.5 * (1 - step / steps) ** 2 + 0.02
            x = torch.clamp(x.detach() - size * (high - low) * gradient.sign(), low, high)
    return None


def _check(session, x: torch.Tensor, prop: Property, shape) -> tuple[np.ndarray, np.ndarray] | None:
    """The pair in float32, moved inside the box where rounding left it, if onnxruntime calls it unsafe."""
    point = x.double().flatten().numpy().astype(np.float32)
    below, above = point.astype(np.float64) < prop.lower, point.astype(np.float64) > prop.upper
    point[below] = np.nextafter(point[below], np.float32(np.inf))
    point[above] = np.nextafter(point[above], np.float32(-np.inf))
    exact = point.astype(np.float64)
    if (exact < prop.lower).any() or (exact > prop.upper).any():
        return None
    y = session.run(None, {session.get_inputs()[0].name: point.reshape(shape)})[0].reshape(-1).astype(np.float64)
    return (exact, y) if prop.violated(y) else None


def _session(model):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
