"""What auto_LiRPA 0.3 (the release on the package index, 2022) needs on today's torch and numpy, and what it lacks.

Nothing here touches a newer auto_LiRPA. For 0.3 the module repairs imports that fail, and adds to its BoundedModule the
few graph methods of newer releases that this package calls; its softmax becomes a node of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path

_spec = importlib.util.find_spec("auto_LiRPA")
IS_03 = _spec is not None and _spec.origin is not None and not (Path(_spec.origin).parent / "edit_graph.py").exists()
HAS_LSE_SOFTMAX = not IS_03


def _repair_imports() -> None:
    """Names that 0.3 imports and that today's numpy and torch no longer have."""
    import numpy
    import torch

    if "numpy.lib.arraysetops" not in sys.modules and importlib.util.find_spec("numpy.lib.arraysetops") is None:
        stand_in = types.ModuleType("numpy.lib.arraysetops")
        stand_in.isin = numpy.isin
        sys.modules["numpy.lib.arraysetops"] = stand_in
    symbolic_helper = importlib.import_module("torch.onnx.symbolic_helper")
    exporter = _exporter_globals()
    if not hasattr(symbolic_helper, "_set_opset_version"):

        def set_opset(version: int) -> None:
            exporter.export_onnx_opset_version = version

        symbolic_helper._set_opset_version = set_opset
    if hasattr(exporter, "autograd_inlining"):
        exporter.autograd_inlining = False
    if not hasattr(torch._C.Node, "__getitem__"):
        torch._C.Node.__getitem__ = symbolic_helper._node_get


def backward(network, node, rows):
    """Lower and upper bounds of rows . node, rows (b, s, ...), by the network's own backward pass."""
    if IS_03:
        return network.backward_general(C=rows, node=node, verbose=False)
    return network.backward_general(node, rows)


def _exporter_globals():
    """The settings object of torch's exporter, wherever this torch keeps it."""
    for name in ("torch.onnx._globals", "torch.onnx._internal.torchscript_exporter._globals"):
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name).GLOBALS
    raise ImportError("auto_LiRPA 0.3 needs torch's exporter settings, which this torch does not have")


def _add_graph_methods() -> None:
    """Methods of newer BoundedModules that this package calls."""
    from auto_LiRPA import BoundedModule

    named_members, parameters = BoundedModule._named_members, BoundedModule.parameters

    def parameters_or_inputs(self, recurse=True):
        """Its backward pass reads the dtype off the first parameter; a graph without any has that of its inputs."""
        found = list(parameters(self, recurse))
        return iter(found or [node.value for node in self.roots() if node.value is not None])

    def _named_members(self, get_members_fn, prefix="", recurse=True, remove_duplicate=True):
        return named_members(self, get_members_fn, prefix, recurse)

    def delete_node(self, node):
        for source in node.inputs:
            source.output_name.remove(node.name)
        self._modules.pop(node.name)
        self.optimizable_activations = [other for other in self.optimizable_activations if other is not node]

    def replace_node(self, old, new):
        for node in self._modules.values():
            node.inputs = [new if source is old else source for source in node.inputs]
            node.input_name = [new.name if name == old.name else name for name in node.input_name]
        new.output_name += old.output_name
        if self.final_name == old.name:
            self.final_name = new.name
        self.output_name = [new.name if name == old.name else name for name in self.output_name]
        self.delete_node(old)

    BoundedModule._named_members, BoundedModule.parameters = _named_members, parameters_or_inputs
    BoundedModule.nodes = lambda self: list(self._modules.values())
    BoundedModule.roots = lambda self: [self[name] for name in self.root_name]
    BoundedModule.delete_node, BoundedModule.replace_node = delete_node, replace_node


def _whole_softmax() -> None:
    """Convert softmax to the repaired operator instead of splitting it into exp, sum and division."""
    from auto_LiRPA import register_custom_op

    from .softmax import BoundRepairedSoftmax

    register_custom_op("onnx::Softmax", BoundRepairedSoftmax)


if IS_03:
    _repair_imports()
    _add_graph_methods()
    _whole_softmax()
