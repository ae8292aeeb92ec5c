"""Sign flips of influence under attacked training inputs, over seeds, with controls."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
from tqdm import tqdm

from attn_bounds.errors import ArgumentError
from attn_bounds.ntk.data import Dataset, Split
from attn_bounds.ntk.influence import RidgeInfluence
from attn_bounds.ntk.malleability import (
    accuracy,
    attack_inputs,
    compare,
    fitted,
    influences,
    malleability,
    ratios,
    saturation,
)
from attn_bounds.ntk.poisoning import NetworkTraining
from attn_bounds.ntk.ridge import Ridge
from attn_bounds.ntk.settings import Settings
from attn_bounds.ntk.studies._base import ATTENTION, BASELINE, Study, kernels


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
        "other ridge rules, another attack, the trained network (seed 0)": pd.DataFrame(rules),
    }
    adversarial = ratio[ratio.condition == "adversarial"].set_index("influence")
    for kind in adversarial.index:
        out.figures[f"flip_ratio {kind}"] = float(adversarial.flip_ratio[kind])
        out.figures[f"max_ratio {kind}"] = float(adversarial.max_ratio[kind])
    others = [r["ratio hat"] for r in rules if "ratio hat" in r]
    out.figures |= {"lowest_rule_ratio": min(others), "highest_rule_ratio": max(others)}
    out.figures["flip_rate attention"] = float(adversarial.flip_rate["hat"])
    out.figures["flip_rate baseline"] = float(adversarial.flip_rate_base["hat"])
    out.extra = {"table": table, "sweep": pd.concat(sweep, ignore_index=True)}
    out.notes = [
        f"ridge rule: {settings.ridge}, resolved on each model's clean inputs and kept; others below",
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
        adversarial = part[part.condition == "adversarial"]
        rates = adversarial.set_index(["influence", "model"]).flip_rate
        hat = adversarial[adversarial.influence == "hat"].set_index("model")
        return {
            "rule": rule,
            "hat ReLU": rates["hat", BASELINE],
            "hat attention": rates["hat", ATTENTION],
            **{f"ratio {kind}": _ratio(rates[kind]) for kind in ("hat", "prediction", "loss")},
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
    fixed = dataclasses.replace(settings.attack, objective="fixed")
    part = malleability(kernels(), split, settings.ridge, fixed, conditions=("adversarial",))
    rows.append(row(f"{settings.ridge}, attack on the clean model (objective fixed)", part))
    rows.append(row("kernel of the trained network, m = 1024", _trained_networks(split, settings)))
    return rows


def _ratio(rates: pd.Series) -> float:
    return float(rates[ATTENTION] / rates[BASELINE]) if rates[BASELINE] > 0 else float("nan")


def _trained_networks(split: Split, settings: Settings) -> pd.DataFrame:
    """Flip rates of the empirical NTK of trained networks, under the attack on their infinite-width kernel."""
    training = NetworkTraining(width=1024, time=settings.network_time)
    rows = []
    for name, kernel in kernels().items():
        clean = fitted(kernel, split.X)
        lam = settings.ridge.resolve(clean(split.X), split.Y)
        moved = attack_inputs(kernel, split.X, split.Y, lam, settings.attack)
        found: list[RidgeInfluence] = []
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
