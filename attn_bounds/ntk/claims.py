"""The published claims about linearized attention, and a verdict on each from measured figures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from attn_bounds.ntk.studies import ATTENTION, BASELINE, Study

Figures = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A claim with the published figure, ours beside it, and whether it reproduced."""

    claim: str
    published: str
    measured: str
    verdict: str  # "reproduced", "partly" or "not reproduced"
    remark: str = ""


def verdicts(studies: Mapping[str, Study]) -> list[Verdict]:
    """Judge every claim whose study is among `studies` (names as in Study.name)."""
    out: list[Verdict] = []
    for needed, judge in _JUDGES:
        if needed in studies:
            out += judge(studies[needed].figures)
    return out


def _word(full: bool, part: bool = False) -> str:
    return "reproduced" if full else "partly" if part else "not reproduced"


def _spectrum(f: Figures) -> list[Verdict]:
    exponent, kappa, tol = f["exponent"], f["kappa"], f["tol"]
    low, high = f["width_kappa6"], f["width_kappa6_n_log_n"]
    return [
        Verdict(
            "attention cubes the condition number of the Gram matrix",
            "kappa -> kappa^3",
            f"exponent {exponent:.4f} (kappa {kappa:.0f} at tol {tol:g})",
            _word(abs(exponent - 3) <= 1e-2),
            f"training is governed by Theta_inf, whose condition number has exponent {f['exponent_ntk']:.2f} only",
        ),
        Verdict(
            "the kernel regime needs impractical widths",
            "> 1e24 (MNIST), > 1e29 (CIFAR-10)",
            f"kappa^6 = {low:.1e}, kappa^6 n log n = {high:.1e}",
            _word(low > 1e24, low > 1e9),
            "a sufficient width from a bound, not a measured need; it moves with tol to the sixth power",
        ),
    ]


def _convergence(f: Figures) -> list[Verdict]:
    uncentred, centred, relu = "attention uncentred", "attention centred", "relu"

    def span(model: str) -> str:
        return f"{f[f'distance_small {model}']:.3f} -> {f[f'distance_large {model}']:.3f}"

    def change(model: str) -> float:
        return f[f"distance_large {model}"] / f[f"distance_small {model}"] - 1

    slopes = {m: f[f"kernel_slope {m}"] for m in (relu, uncentred, centred)}
    plateau = abs(change(uncentred)) < 0.05 and f[f"distance_large {uncentred}"] > 0.3
    converges = f[f"distance_large {centred}"] < 0.5 * f[f"distance_small {centred}"]
    return [
        Verdict(
            "the ReLU network approaches its kernel as width grows",
            "distance falls",
            f"{span(relu)}; kernel slope {slopes[relu]:.2f}",
            _word(change(relu) < -0.3),
        ),
        Verdict(
            "linearized attention stays away from its kernel at every practical width",
            "no convergence",
            f"uncentred {span(uncentred)}; centred {span(centred)}",
            _word(plateau and not converges, plateau or not converges),
            "only without centring, where attended rows fall into a narrow cone; centred data converge",
        ),
        Verdict(
            "the kernel of the attention network itself does not converge",
            "no m^(-1/2) rate",
            f"slopes {slopes[uncentred]:.2f} (uncentred), {slopes[centred]:.2f} (centred)",
            _word(max(slopes[uncentred], slopes[centred]) > -0.2, max(slopes[uncentred], slopes[centred]) > -0.4),
            "Theta_m approaches Theta_inf as m^(-1/2) in all models, at the start",
        ),
        Verdict(
            "the distance of attention from its kernel RISES with width",
            "rising",
            f"change over widths: uncentred {change(uncentred):+.1%}, centred {change(centred):+.1%}",
            _word(min(change(uncentred), change(centred)) > 0.05, max(change(uncentred), change(centred)) > 0.05),
        ),
    ]


def _malleability(f: Figures) -> list[Verdict]:
    hat, prediction, loss = (f[f"flip_ratio {k}"] for k in ("hat", "prediction", "loss"))
    true_class = f.get("flip_ratio prediction, true class", math.nan)
    maxima = f["max_ratio hat"]
    rates = f"{f['flip_rate baseline']:.1%} -> {f['flip_rate attention']:.1%}"
    extra = "" if math.isnan(true_class) else f" ({true_class:.1f}x for the true class alone)"
    return [
        Verdict(
            "influence of attention flips sign 2 to 9 times as often under attacked training inputs",
            "3.3% -> 28.9% (MNIST), 3.1% -> 19.1% (CIFAR-10)",
            f"{rates}, {hat:.1f}x (hat); prediction {prediction:.1f}x{extra}, loss {loss:.1f}x",
            _word(min(hat, prediction, loss) >= 2, hat >= 1.5),
            f"at equal degrees of freedom; {f['lowest_rule_ratio']:.1f}x to {f['highest_rule_ratio']:.1f}x (hat) over "
            "the ridge rules and attacks listed below",
        ),
        Verdict(
            "the largest influence of attention is several times that of the ReLU network",
            "2 to 9 times (the other definition of malleability)",
            f"{maxima:.1f}x (hat), {f['max_ratio prediction']:.1f}x (prediction), {f['max_ratio loss']:.1f}x (loss)",
            _word(maxima >= 2, maxima >= 1.5),
        ),
    ]


def _poison(f: Figures) -> list[Verdict]:
    attention, relu = f[f"drop {ATTENTION}"], f[f"drop {BASELINE}"]
    return [
        Verdict(
            "flipping under 1% of the labels costs attention more than 15% accuracy and ReLU less than 5%",
            "> 15% against < 5%",
            f"{100 * attention:.1f} against {100 * relu:.1f} points (worst method and model)",
            _word(attention > 0.15 and relu < 0.05, attention > 0.05 and attention > 2 * relu),
            f"random flips cost {100 * f[f'random_drop {ATTENTION}']:.1f} and {100 * f[f'random_drop {BASELINE}']:.1f}",
        )
    ]


def _errors(f: Figures) -> list[Verdict]:
    network, gram = f[f"error {ATTENTION} network"], f["error Gram-induced kernel"]
    ntk, relu = f[f"error {ATTENTION} NTK"], f[f"error {BASELINE} NTK"]
    gain = min(ntk, gram) - network
    return [
        Verdict(
            "the trained attention network has 2-4% lower error than kernel methods",
            "2 to 4 points lower",
            f"network {network:.1%}; its NTK {ntk:.1%}, Gram-induced kernel {gram:.1%}, ReLU NTK {relu:.1%}",
            _word(gain >= 0.02, gram - network >= 0.01),
            "lower than the linear Gram-induced kernel only" if gram > network > ntk else "",
        )
    ]


_JUDGES: list[tuple[str, Callable[[Figures], list[Verdict]]]] = [
    ("spectrum", _spectrum),
    ("convergence", _convergence),
    ("malleability", _malleability),
    ("poison", _poison),
    ("errors", _errors),
]
