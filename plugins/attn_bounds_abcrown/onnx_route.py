"""Load an ONNX network as a torch module that bound propagation can trace with any batch size.

The graph is converted by the package onnx2pytorch after a few repairs: the target shapes of its Reshape nodes become
constants (with "copy this dimension" for the batch), Shape reads the traced tensor instead of a Python tuple, and
Softmax over the last axis keeps its shape, so that the converted graph is not frozen at the batch size of its example.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import sys
import types
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from attn_bounds.errors import AttnBoundsError, MissingDependencyError, ModelLoadError, UnsupportedModelError


def load_onnx(path: str | Path):
    """Parse an ONNX file, `.onnx` or `.onnx.gz`, and check that it is a valid graph with one input."""
    onnx = _need("onnx")
    path = Path(path)
    try:
        raw = path.read_bytes()
        model = onnx.load_model_from_string(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        onnx.checker.check_model(model)
    except OSError as error:
        raise ModelLoadError(f"onnx: cannot read {path}: {error}") from error
    except Exception as error:
        raise ModelLoadError(f"onnx: {path} is not a valid ONNX file: {str(error).splitlines()[0]}") from error
    if len(real_inputs(model)) != 1:
        raise UnsupportedModelError(f"onnx: {path} has {len(real_inputs(model))} inputs; networks with one are read")
    return model


def real_inputs(model) -> list:
    """Graph inputs that are not weights."""
    weights = {initializer.name for initializer in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def input_shape(model) -> tuple[int, ...]:
    """Shape of the network's input with the batch dimension set to 1."""
    dims = [dim.dim_value for dim in real_inputs(model)[0].type.tensor_type.shape.dim]
    return tuple([1, *dims[1:]])


def onnx_to_torch(model) -> torch.nn.Module:
    """Convert a parsed ONNX model to a torch module in evaluation mode, its outputs compared with onnxruntime's."""
    converter = import_onnx2pytorch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = converter.ConvertModel(_with_constant_shapes(model), experimental=True).eval()
            difference = _largest_difference(module, model)
        except AttnBoundsError:
            raise
        except Exception as error:  # the converter fails in many ways on what it does not know
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UnsupportedModelError(f"onnx: an operator cannot be converted: {reason}") from error
    if not difference < 1e-3:
        raise UnsupportedModelError(f"onnx: outputs of the converted network are off by {difference:.2g}")
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module


def _largest_difference(module: torch.nn.Module, model) -> float:
    """Largest difference of the outputs at two random inputs, relative to the largest output."""
    ort = _need("onnxruntime")
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    worst = 0.0
    for seed in (0, 1):
        x = np.random.default_rng(seed).standard_normal(input_shape(model)).astype(np.float32)
        y = session.run(None, {session.get_inputs()[0].name: x})[0]
        with torch.no_grad():
            mine = module(torch.from_numpy(x)).numpy().reshape(y.shape)
        worst = max(worst, float(np.abs(mine - y).max() / (1 + np.abs(y).max())))
    return worst


def _with_constant_shapes(model):
    """Replace the computed target shape of every Reshape by a constant, 0 standing for the copied batch dimension.

    The shapes are read off two evaluations, at batch sizes 2 and 3: an entry that follows the batch becomes 0.
    """
    onnx, ort = _need("onnx"), _need("onnxruntime")
    computed = {node.output[0] for node in model.graph.node}
    reshapes = [node for node in model.graph.node if node.op_type == "Reshape"]
    targets = list(dict.fromkeys(node.input[1] for node in reshapes if node.input[1] in computed))
    if not targets:
        return model
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    probe.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None) for name in targets
    )
    session = ort.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = session.get_inputs()[0].name
    shapes = []
    for batch in (2, 3):
        example = np.zeros((batch, *input_shape(model)[1:]), dtype=np.float32)
        shapes.append(dict(zip(targets, session.run(targets, {feed: example}), strict=True)))
    new = onnx.ModelProto()
    new.CopyFrom(model)
    for name in targets:
        at2, at3 = (shape[name] for shape in shapes)
        if len(at2) and at2[0] == 2 and at3[0] == 3 and (at2[1:] == at3[1:]).all():
            target = np.concatenate([[0], at2[1:]])
        elif (at2 == at3).all():
            target = at2
        else:
            continue
        constant = f"{name}/constant"
        new.graph.initializer.append(onnx.numpy_helper.from_array(target.astype(np.int64), constant))
        for node in new.graph.node:
            if node.op_type == "Reshape" and node.input[1] == name:
                node.input[1] = constant
    return _without_dead_nodes(new)


def _without_dead_nodes(model):
    """Drop the nodes whose outputs nobody reads any more."""
    while True:
        read = {name for node in model.graph.node for name in node.input} | {out.name for out in model.graph.output}
        dead = [node for node in model.graph.node if not read.intersection(node.output)]
        if not dead:
            return model
        for node in dead:
            model.graph.node.remove(node)


def import_onnx2pytorch():
    """Import onnx2pytorch, where torchvision is absent with a stand-in for it, and make its Shape traceable."""
    if importlib.util.find_spec("onnx2pytorch") is None:
        raise MissingDependencyError("onnx2pytorch: not installed; pip install 'attn-bounds[verify]'")
    with torchvision_or_stand_in():
        package = importlib.import_module("onnx2pytorch")
        shape = importlib.import_module("onnx2pytorch.operations.shape")
    reshape = importlib.import_module("onnx2pytorch.operations.reshape")
    shape.Shape.forward = _traced_shape
    reshape.Reshape.forward = _plain_reshape
    softmax = importlib.import_module("onnx2pytorch.operations.softmax")
    softmax.NormalizingOperator.forward = _softmax_in_place
    return package


@contextmanager
def torchvision_or_stand_in():
    """Where torchvision is absent or does not load, something that can be imported in its place but does nothing."""
    names = ["torchvision", *(f"torchvision.{part}" for part in _StandIn.parts)]
    absent = not _importable("torchvision")
    if absent:
        sys.modules.update({name: _StandIn(name) for name in names})
    try:
        yield
    finally:
        if absent:
            for name in names:
                sys.modules.pop(name, None)


def _traced_shape(self, input: torch.Tensor) -> torch.Tensor:
    start, end = getattr(self, "start", 0), getattr(self, "end", None)
    shape = torch._shape_as_tensor(input)
    return shape if (start, end) == (0, None) else shape[start:end]


def _plain_reshape(self, input: torch.Tensor, shape=None) -> torch.Tensor:
    target = shape if shape is not None else self.shape
    return input.reshape([input.size(i) if int(size) == 0 else int(size) for i, size in enumerate(target)])


def _softmax_in_place(self, input: torch.Tensor) -> torch.Tensor:
    if self.dim not in (-1, input.ndim - 1):
        raise UnsupportedModelError(f"onnx: Softmax over axis {self.dim} of {input.ndim}; only the last axis is read")
    return self.normalize(input, -1)


class _StandIn(types.ModuleType):
    """Takes the place of torchvision at import: the detection operators that need it are never reached."""

    __path__ = ()
    parts = ("ops", "io", "datasets", "transforms")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules[f"torchvision.{name}"] if name in self.parts else _unavailable


def _unavailable(*args, **kwargs):
    raise MissingDependencyError("torchvision: needed for this ONNX operator; install a build that matches torch")


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError, OSError):
        return False
    return True


def _need(name: str):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(f"{name}: not installed; pip install 'attn-bounds[verify]'") from error
