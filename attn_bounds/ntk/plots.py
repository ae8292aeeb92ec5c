"""The pictures of the studies: each function takes a Study and returns a matplotlib figure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from attn_bounds.ntk.studies import Study

_COLOURS = ("#4269d0", "#d1495b", "#2e933c", "#efb118", "#7b5ea7", "#6b6b6b")


def _figure(columns: int = 1, width: float = 4.6, height: float = 3.4) -> tuple[Figure, list]:
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, columns)).tolist()
    for axis in axes:
        axis.grid(True, alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def spectrum_plot(study: Study) -> Figure:
    """Draw both spectra, scaled to start at 1, with the rank that `tol` keeps."""
    found = study.extra["spectrum"]
    figure, (axis,) = _figure(width=6)
    for values, label, colour in (
        (found.eigenvalues, "Gram matrix G", _COLOURS[0]),
        (found.eigenvalues_attended, "attended Gram matrix", _COLOURS[1]),
    ):
        scaled = np.array(values) / values[0]
        axis.plot(
            np.arange(1, len(scaled) + 1), np.where(scaled > 1e-20, scaled, np.nan), ".-", color=colour, label=label
        )
    axis.axvline(found.rank, color=_COLOURS[5], linestyle="--", label=f"rank {found.rank} at tol = {found.tol:g}")
    axis.set(
        yscale="log", xlabel="index", ylabel="eigenvalue / largest", title=f"Spectra, exponent {found.exponent:.4f}"
    )
    axis.legend(fontsize=8)
    return figure


def convergence_plot(study: Study) -> Figure:
    """Draw kernel distance at the start, prediction distance after training, and how far kernels move."""
    start, trained = study.extra["start"], study.extra["trained"]
    times = list(dict.fromkeys(trained.time))
    figure, axes = _figure(2 + len(times))
    for model, colour in zip(dict.fromkeys(start.model), _COLOURS, strict=False):
        _spread(axes[0], start[start.model == model], "width", "kernel_distance", model, colour)
        for axis, time in zip(axes[1:], times, strict=False):
            part = trained[(trained.model == model) & (trained.time == time) & (trained.fraction == 1)]
            _spread(axis, part, "width", "prediction_distance", model, colour)
        widest = trained[(trained.model == model) & (trained.time == times[0]) & (trained.width == trained.width.max())]
        _spread(axes[-1], widest, "fraction", "kernel_moved", model, colour)
    axes[0].set(
        xscale="log", yscale="log", xlabel="width m", ylabel="relative distance", title="Kernel distance at the start"
    )
    for axis, time in zip(axes[1:], times, strict=False):
        axis.set(xscale="log", yscale="log", xlabel="width m", ylabel="relative distance")
        axis.set_title(f"Prediction distance at time {time:g}")
    axes[-1].set(xlabel="fraction of training", ylabel="relative distance to the start")
    axes[-1].set_title(f"Kernel movement, m = {trained.width.max()}")
    axes[0].legend(fontsize=8)
    return figure


def _spread(axis, table, x: str, y: str, label: str, colour: str) -> None:
    grouped = table.groupby(x)[y]
    mean, low, high = grouped.mean(), grouped.min(), grouped.max()
    axis.plot(mean.index, mean, "o-", markersize=4, color=colour, label=label)
    axis.fill_between(mean.index, low, high, color=colour, alpha=0.2, linewidth=0)


def influence_plot(study: Study) -> Figure:
    """Draw test points beside their most influential training points (images), or the influences as bars."""
    split, tops = study.extra["split"], study.extra["tops"]
    side = round(split.X.shape[1] ** 0.5)
    models = list(dict.fromkeys(tops.model))
    points = sorted(tops["test point"].unique())
    if side * side != split.X.shape[1]:
        figure, axes = _figure(len(models))
        for axis, model, colour in zip(axes, models, _COLOURS, strict=False):
            part = tops[(tops.model == model) & (tops["test point"] == points[0])]
            axis.barh([str(i) for i in part["training point"]], part.hat, color=colour)
            axis.set(title=f"{model}, test point {points[0]}", xlabel="hat influence", ylabel="training point")
        return figure
    figure = Figure(figsize=(7.6, 1.25 * len(points) * len(models)), layout="constrained")
    grid = figure.subplots(len(points) * len(models), 6)
    for row, (model, t) in enumerate((m, t) for m in models for t in points):
        part = tops[(tops.model == model) & (tops["test point"] == t)]
        cells = [(split.X_test[t], f"{model}: test {part.label.iloc[0]}")]
        cells += [
            (split.X[i], f"{lab}: {hat:+.3f}")
            for i, lab, hat in zip(part["training point"], part["training label"], part.hat, strict=True)
        ]
        for axis in grid[row]:
            axis.axis("off")
        for axis, (pixels, title) in zip(grid[row], cells, strict=False):
            axis.imshow(pixels.reshape(side, side).cpu().numpy(), cmap="gray_r")
            axis.set_title(title, fontsize=7)
    return figure


def malleability_plot(study: Study) -> Figure:
    """Draw flip rates by condition with the spread over seeds, the ratios, and flip rates by epsilon."""
    table, sweep = study.extra["table"], study.extra["sweep"]
    figure, axes = _figure(3)
    conditions = list(dict.fromkeys(table.condition))
    models = list(dict.fromkeys(table.model))
    hat = table[table.influence == "hat"]
    for k, (model, colour) in enumerate(zip(models, _COLOURS, strict=False)):
        grouped = hat[hat.model == model].groupby("condition").flip_rate
        mean = grouped.mean()[conditions]
        error = [mean - grouped.min()[conditions], grouped.max()[conditions] - mean]
        axes[0].bar(
            np.arange(len(conditions)) + 0.4 * k - 0.2, mean, 0.38, yerr=error, color=colour, label=model, capsize=3
        )
    axes[0].set_xticks(range(len(conditions)), conditions)
    axes[0].set(ylabel="sign-flip rate (hat)", title=f"Flip rates, {hat.seed.nunique()} seeds")
    axes[0].legend(fontsize=8)
    ratio = study.tables["flip rates and ratios"]
    part = ratio[ratio.condition == "adversarial"]
    x = np.arange(len(part))
    for shift, column, label, colour in (
        (-0.2, "flip_ratio", "flip rates", _COLOURS[1]),
        (0.2, "max_ratio", "maxima", _COLOURS[3]),
    ):
        mean = part[column].to_numpy()
        error = [mean - part[f"{column}_min"], part[f"{column}_max"] - mean]
        axes[1].bar(x + shift, mean, 0.38, yerr=error, color=colour, label=label, capsize=3)
    axes[1].axhline(1, color="black", linewidth=0.8)
    axes[1].set_xticks(x, [name.replace(", ", ",\n") for name in part.influence])
    axes[1].set(title="Attention / ReLU baseline", ylabel="ratio")
    axes[1].legend(fontsize=8)
    for model, colour in zip(models, _COLOURS, strict=False):
        for condition, style in (("adversarial", "o-"), ("random", "s--")):
            part = sweep[(sweep.model == model) & (sweep.condition == condition) & (sweep.influence == "hat")]
            axes[2].plot(part.epsilon, part.flip_rate, style, markersize=4, color=colour, label=f"{model}, {condition}")
    axes[2].axhline(0.5, color="black", linewidth=0.8, linestyle=":")
    axes[2].set(xlabel="epsilon", ylabel="sign-flip rate (hat)", title="By size of the perturbation (dotted: chance)")
    axes[2].legend(fontsize=7)
    return figure


def poison_plot(study: Study) -> Figure:
    """Draw the accuracy lost by model and method."""
    table = study.tables["accuracy lost"]
    figure, (axis,) = _figure(width=7)
    methods = list(dict.fromkeys(table.method))
    models = list(dict.fromkeys(table.model))
    for k, (method, colour) in enumerate(zip(methods, _COLOURS, strict=False)):
        drops = table[table.method == method].set_index("model")["drop"][models]
        axis.bar(np.arange(len(models)) + 0.2 * (k - 1.5), 100 * drops, 0.19, color=colour, label=method)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(models)), models)
    axis.set(ylabel="accuracy lost (points)", title=f"{table.flips.iloc[0]} flipped labels")
    axis.legend(fontsize=8)
    return figure


def defence_plot(study: Study) -> Figure:
    """Draw clean accuracy against flip rate, one point a defence."""
    table = study.tables["defences"].sort_values("flip_rate")
    figure, (left, right) = _figure(2, width=5.2, height=5)
    colours = [_COLOURS[1] if n in ("none", "network: none") else _COLOURS[0] for n in table.defence]
    y = np.arange(len(table))
    left.barh(y, 100 * table.flip_rate, color=colours)
    left.axvline(50 * study.figures["flip_rate none"], color="black", linestyle="--", linewidth=0.8)
    left.set_yticks(y, table.defence, fontsize=8)
    left.set(xlabel="sign-flip rate (hat, %); dashed: half of the undefended", title="Malleability")
    right.barh(y - 0.2, 100 * (1 - table.clean), 0.38, color=_COLOURS[2], label="clean error (%)")
    right.barh(y + 0.2, 100 * table.poison_drop, 0.38, color=_COLOURS[3], label="lost to poisoning (points)")
    right.set_yticks(y, [])
    right.set(title="Accuracy", xlabel="percent")
    right.set_xlim(right=1.35 * 100 * float((1 - table.clean).max()))
    right.legend(fontsize=8, loc="center right")
    return figure


def softmax_plot(study: Study) -> Figure:
    """Draw flip rates of softmax attention beside the linearized and the plain model."""
    tables = list(study.tables.items())
    figure, axes = _figure(len(tables), width=6)
    for axis, (title, table) in zip(axes, tables, strict=True):
        kind = "hat" if title == "empirical NTK" else "loss"
        part = table[table.influence == kind]
        models = list(dict.fromkeys(part.model))
        for k, (condition, colour) in enumerate((("adversarial", _COLOURS[1]), ("random", _COLOURS[0]))):
            rates = part[part.condition == condition].set_index("model").flip_rate[models]
            axis.bar(np.arange(len(models)) + 0.4 * k - 0.2, rates, 0.38, color=colour, label=condition)
        axis.set_xticks(range(len(models)), models, fontsize=8)
        axis.set(ylabel=f"sign-flip rate ({kind})", title=title)
        axis.legend(fontsize=8)
    return figure


PLOTS: dict[str, Callable[[Study], Figure]] = {
    "spectrum": spectrum_plot,
    "convergence": convergence_plot,
    "influence": influence_plot,
    "malleability": malleability_plot,
    "poison": poison_plot,
    "defend": defence_plot,
    "softmax": softmax_plot,
}
