"""A small attention network as an ONNX file, written node by node the way exporters write it (opset 9)."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def save_attention_network(path, tokens=4, d=6, heads=2, classes=3, seed=0, gain=2.0):
    """Write an input (batch, tokens, d) -> attention -> residual -> ReLU -> class scores network to `path`."""
    rng = np.random.default_rng(seed)
    weights, nodes = {}, []

    def weight(name, *shape):
        weights[name] = (rng.standard_normal(shape) * gain / np.sqrt(shape[0])).astype(np.float32)
        return name

    def node(kind, inputs, output, **attributes):
        nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    node("Shape", ["input"], "shape")
    weights["zero"] = np.array(0, dtype=np.int64)
    node("Gather", ["shape", "zero"], "batch", axis=0)
    node("Unsqueeze", ["batch"], "batch1", axes=[0])
    weights["split"] = np.array([-1, heads, d // heads], dtype=np.int64)
    weights["merge"] = np.array([-1, d], dtype=np.int64)
    node("Concat", ["batch1", "split"], "split_shape", axis=0)
    node("Concat", ["batch1", "merge"], "merge_shape", axis=0)
    for part, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        node("MatMul", ["input", weight(f"w_{part}", d, d)], f"{part}0")
        node("Add", [weight(f"b_{part}", d), f"{part}0"], f"{part}1")
        node("Reshape", [f"{part}1", "split_shape"], f"{part}2")
        node("Transpose", [f"{part}2"], f"{part}3", perm=order)
    weights["scale"] = np.array(0.5, dtype=np.float32)
    node("MatMul", ["q3", "k3"], "s0")
    node("Mul", ["s0", "scale"], "s1")
    node("Softmax", ["s1"], "p", axis=3)
    node("MatMul", ["p", "v3"], "o0")
    node("Transpose", ["o0"], "o1", perm=[0, 2, 1, 3])
    node("Reshape", ["o1", "merge_shape"], "o2")
    node("Add", ["o2", "input"], "h")
    node("MatMul", ["h", weight("w_1", d, 8)], "m0")
    node("Relu", ["m0"], "m1")
    node("ReduceMean", ["m1"], "m2", axes=[1], keepdims=0)
    node("MatMul", ["m2", weight("w_2", 8, classes)], "y0")
    node("Add", ["y0", weight("b_2", classes)], "output")
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", tokens, d])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", classes])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)])
    model.ir_version = 7
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def vnnlib_text(centre, radius, label, classes=3):
    """The property "some other class scores at least as high as `label`" on a box, as VNN-COMP writes it."""
    lines = [f"(declare-const X_{i} Real)" for i in range(centre.size)]
    lines += [f"(declare-const Y_{i} Real)" for i in range(classes)]
    for i, value in enumerate(centre.flatten()):
        low, high = float(value - radius), float(value + radius)
        lines += [f"(assert (<= X_{i} {high!r}))", f"(assert (>= X_{i} {low!r}))"]
    others = [f"  (and (>= Y_{i} Y_{label}))" for i in range(classes) if i != label]
    return "\n".join([*lines, "(assert (or", *others, "))", ""])
