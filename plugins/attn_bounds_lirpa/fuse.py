"""Find attention in a converted graph and put the operators of this package in its place."""

from __future__ import annotations

import torch

from .attention import BoundAttentionMix, BoundScoreDifferences
from .compat import IS_03
from .forms import keep_forms
from .heads_op import MAX_GROUPS
from .local import BoundReadHeads, find_tokens
from .patch_conv import use_patch_convolutions
from .scaling import Scaling, constant_value
from .softmax import BoundRepairedSoftmax


def fuse_attention(
    network,
    max_rows: int = 1024,
    max_differences: int = 2000,
    certificate: dict | None = None,
    max_groups: int = MAX_GROUPS,
) -> dict:
    """Replace every MatMul -> scale -> mask -> Softmax -> MatMul of `network` (a BoundedModule) by two attention nodes.

    max_rows: largest number of extra backward rows that bound the values in a propagated direction (more: composition).
    max_differences: largest number of score differences that are bounded as rows of their own (more: the scores are).
    certificate: options of the LOCAL regime's certificates, as {"max_pieces": 64} for tighter and slower ones.
    max_groups: largest number of (row, head, query) with affine bounds of the library's engine, where attention reads
        the network's input and there are other paths beside it.
    Returns {"fused": [names of the softmax nodes], "skipped": {name: why not}}.
    """
    report = {"fused": [], "skipped": {}}
    for softmax in [
        node for node in network.nodes() if type(node).__name__ in ("BoundSoftmax", "BoundRepairedSoftmax")
    ]:
        match = _match(network, softmax)
        if isinstance(match, str):
            report["skipped"][softmax.name] = match
        else:
            _replace(network, softmax, max_rows, max_differences, certificate, max_groups, **match)
            report["fused"].append(softmax.name)
    mixes = [node for node in network.nodes() if isinstance(node, BoundAttentionMix)]
    if mixes and not IS_03:
        keep_forms(network, [node for mix in mixes for node in (*mix.inputs[0].inputs, mix.inputs[1])])
    return report


def repair_softmax(network) -> list[str]:
    """Replace every softmax of `network` by a sound one that cannot return NaN; returns the names of all of these."""
    names = [node.name for node in network.nodes() if isinstance(node, BoundRepairedSoftmax)]
    for old in [node for node in network.nodes() if type(node).__name__ == "BoundSoftmax"]:
        new = BoundRepairedSoftmax(
            {**old.attr, "axis": old.axis, "device": old.device}, list(old.inputs), 0, old.options
        )
        _place(network, new, f"{old.name}/repaired", old)
        network.replace_node(old, new)
        names.append(new.name)
    return names


def _place(network, node, name: str, like, shape=None) -> None:
    """Enter a new node into the graph with what auto_LiRPA expects to find on it."""
    node.name, node.batch_dim, node.from_input = name, 0, True
    node.output_shape = like.output_shape if shape is None else shape
    node.perturbed, node.used = like.perturbed, getattr(like, "used", True)
    if IS_03:  # newer releases derive it
        node.input_name = [source.name for source in node.inputs]
    network.add_nodes([node])


def _match(network, softmax):
    """The pieces around a softmax node, or a line that says why they are not an attention core."""
    users = [network[name] for name in softmax.output_name]
    if len(users) != 1 or type(users[0]).__name__ != "BoundMatMul" or users[0].inputs[0] is not softmax:
        return "its result is not the left factor of one MatMul"
    if softmax.axis not in (-1, len(softmax.output_shape) - 1):
        return f"softmax over axis {softmax.axis}, not the last"
    node, inner, steps = softmax.inputs[0], [], []
    while type(node).__name__ != "BoundMatMul":
        inner.append(node)
        if len(node.output_name) != 1:
            return f"{node.name} is used elsewhere too"
        kind = type(node).__name__
        if kind not in ("BoundMul", "BoundDiv", "BoundAdd"):
            return f"{kind} {node.name} between the scores and the softmax is not a scale or an added mask"
        index = _constant_operand(node)
        usable = index is not None and (kind == "BoundAdd" or constant_value(node.inputs[index]).numel() == 1)
        if not usable or (kind == "BoundDiv" and index == 0):
            return f"{kind} {node.name} has no constant operand"
        steps.append((kind, node.inputs[index]))
        node = node.inputs[1 - index]
    if len(node.output_name) != 1:
        return f"the scores {node.name} are used elsewhere too"
    q, k, v = node.inputs[0], node.inputs[1], users[0].inputs[1]
    shapes = [tuple(x.output_shape) for x in (q, k, v)]
    if any(len(shape) != 4 for shape in shapes):
        return f"q, k, v have shapes {shapes}; expected four dimensions (batch, head, token, feature)"
    if len({shape[1] for shape in shapes}) != 1:
        return f"q, k, v have shapes {shapes}: grouped heads are not supported"
    return {"scores": node, "between": inner, "output": users[0], "scaling": Scaling(steps)}


def _constant_operand(node) -> int | None:
    """The index of the operand of a binary node that does not depend on the input."""
    if len(node.inputs) != 2:
        return None
    return next((index for index, operand in enumerate(node.inputs) if not operand.from_input), None)


def _replace(network, softmax, max_rows, max_differences, certificate, max_groups, scores, between, output, scaling):
    attr, options = {"device": softmax.device}, softmax.options
    sources = [*scores.inputs[:2], output.inputs[1]]
    tokens = find_tokens(network, sources, *scaling.values())
    if tokens is not None:
        new = BoundReadHeads(attr, [tokens, *sources, *scaling.operands], 0, options, scaling, certificate, max_groups)
        _place(network, new, f"{softmax.name}/heads", softmax, output.output_shape)
    else:
        batch, heads, n_q, _ = scores.inputs[0].output_shape
        n_k = scores.inputs[1].output_shape[-1]
        count = n_k * (n_k - 1) // 2
        pairs = 0 < heads * n_q * count <= max_differences
        differences = BoundScoreDifferences(
            attr, [*sources[:2], *scaling.operands], 0, options, scaling, pairs, network
        )
        shape = torch.Size((batch, heads, n_q, count if pairs else n_k))
        _place(network, differences, f"{softmax.name}/differences", softmax, shape)
        new = BoundAttentionMix(attr, [differences, sources[2]], 0, options, network, max_rows, pairs)
        _place(network, new, f"{softmax.name}/mix", softmax, output.output_shape)
    network.replace_node(output, new)
    for node in (softmax, *between, scores):
        network.delete_node(node)


def attach(network, **options) -> dict:
    """The sensible whole: fuse attention, repair every softmax that is left, and speed up patch embeddings.

    The options are those of `fuse_attention`.

    Returns {"fused": [...], "skipped": {name: why}, "repaired": [...], "patches": [...]}.
    """
    report = fuse_attention(network, **options)
    return {**report, "repaired": repair_softmax(network), "patches": use_patch_convolutions(network)}
