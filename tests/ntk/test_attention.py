from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import RidgeClassifier
from sklearn.pipeline import make_pipeline

from attn_bounds.errors import ArgumentError, NotFiniteError, ShapeError
from attn_bounds.ntk import LinearizedAttention


@pytest.fixture
def X() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(40, 7)) * np.linspace(0.3, 2, 7)


def test_is_linear_attention_without_parameters(X) -> None:
    out = LinearizedAttention(centre=False, normalize=False).fit_transform(X)
    np.testing.assert_allclose(out, (X @ X.T) @ X, rtol=1e-12)


def test_new_rows_use_the_training_inputs_only(X) -> None:
    model = LinearizedAttention(normalize=False).fit(X)
    Xc = X - X.mean(0)
    z = np.random.default_rng(1).normal(size=(5, 7))
    np.testing.assert_allclose(model.transform(z), (z - X.mean(0)) @ Xc.T @ Xc, rtol=1e-12)
    np.testing.assert_allclose(model.transform(z)[:2], model.transform(z[:2]), rtol=1e-12)


def test_rows_have_unit_length_and_scale_is_then_without_effect(X) -> None:
    outs = [LinearizedAttention(scale=s).fit_transform(X) for s in ("none", "samples", "trace")]
    np.testing.assert_allclose(np.linalg.norm(outs[0], axis=1), 1, rtol=1e-12)
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], atol=1e-12)
    a, b = (LinearizedAttention(scale=s, normalize=False).fit_transform(X) for s in ("none", "samples"))
    np.testing.assert_allclose(a, 40 * b, rtol=1e-12)


def spectral(X: np.ndarray, g) -> np.ndarray:
    Xc = X - X.mean(0)
    w, V = np.linalg.eigh(Xc.T @ Xc)
    return Xc @ (V * g(w)) @ V.T


@pytest.mark.parametrize(
    ("options", "g"),
    [
        ({"power": 0.5}, lambda w: w**0.5),
        ({"power": 2.0}, lambda w: w**2),
        ({"clip": 1.5}, lambda w: np.minimum(w, 1.5 * np.sort(w)[3])),
        ({"rank": 2}, lambda w: np.where(w >= np.sort(w)[-2], w, 0)),
        ({"power": 0.0}, lambda w: w**0),
        ({"shrinkage": 0.3}, lambda w: 0.7 * w + 0.3 * w.mean()),
    ],
)
def test_spectral_options(X, options, g) -> None:
    out = LinearizedAttention(normalize=False, **options).fit_transform(X)
    np.testing.assert_allclose(out, spectral(X, g), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    "options", [{}, {"power": 0.5}, {"clip": 2.0}, {"rank": 3}, {"shrinkage": 0.2}, {"power": 1.5}]
)
def test_gradients_through_fit_match_finite_differences(X, options) -> None:
    def f(data: torch.Tensor) -> torch.Tensor:
        return (LinearizedAttention(**options).fit(data).transform(data)[:3] * torch.arange(7.0).double()).sum()

    x = torch.tensor(X, requires_grad=True)
    (gradient,) = torch.autograd.grad(f(x), x)
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    h = 1e-6
    with torch.no_grad():
        slope = (f(x + h * direction) - f(x - h * direction)) / (2 * h)
    # The clipping level moves with the median eigenvalue; its gradient is not followed (it only steers attacks).
    tolerance = 0.5 if "clip" in options else 1e-5
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=tolerance)


def test_gradient_is_finite_at_repeated_and_zero_eigenvalues() -> None:
    x = torch.eye(6, dtype=torch.float64)[:4].requires_grad_(True)
    for options in ({"power": 0.5}, {"rank": 2}, {"clip": 1.0}):
        out = LinearizedAttention(**options).fit(x).transform(x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert bool(torch.isfinite(gradient).all())


def test_rotating_the_features_rotates_the_result(X) -> None:
    Q = np.linalg.qr(np.random.default_rng(2).normal(size=(7, 7)))[0]
    for power in (0.5, 1.0):
        a = LinearizedAttention(power=power).fit_transform(X)
        np.testing.assert_allclose(LinearizedAttention(power=power).fit_transform(X @ Q), a @ Q, atol=1e-10)


def test_scikit_learn_conventions(X) -> None:
    y = (X[:, -1] > 0).astype(int)
    model = make_pipeline(LinearizedAttention(power=0.5), RidgeClassifier()).fit(X, y)
    assert model.score(X, y) > 0.8
    copied = clone(LinearizedAttention(rank=3, centre=False))
    assert copied.get_params()["rank"] == 3 and not hasattr(copied, "mean_")
    assert LinearizedAttention().fit(X).n_features_in_ == 7


def test_types_follow_the_input(X) -> None:
    assert isinstance(LinearizedAttention().fit_transform(X), np.ndarray)
    assert isinstance(LinearizedAttention().fit_transform(torch.tensor(X)), torch.Tensor)
    single = LinearizedAttention().fit(X).transform(X.astype(np.float32))
    assert single.dtype == np.float64
    integers = np.random.default_rng(0).integers(0, 9, (10, 3))
    np.testing.assert_allclose(
        LinearizedAttention().fit_transform(integers), LinearizedAttention().fit_transform(integers.astype(float))
    )


def test_constant_features_and_duplicates_are_fine(X) -> None:
    out = LinearizedAttention().fit_transform(np.hstack([np.vstack([X, X]), np.full((80, 2), 3.0)]))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[:, -2:], 0, atol=1e-12)


def test_a_row_equal_to_the_mean_stays_zero() -> None:
    out = LinearizedAttention().fit_transform(np.array([[1.0, 0], [-1, 0], [0, 0]]))
    np.testing.assert_array_equal(out[2], 0)


@pytest.mark.parametrize(
    ("options", "data", "error", "names"),
    [
        ({}, np.ones((1, 3)), ShapeError, "at least 2 rows"),
        ({}, np.ones((4, 3)), ArgumentError, "every row is the same"),
        ({"centre": False}, np.zeros((4, 3)), ArgumentError, "nothing is left"),
        ({}, np.full((4, 3), np.inf), NotFiniteError, "X: expected finite"),
        ({"scale": "n"}, np.eye(3), ArgumentError, "scale: expected one of"),
        ({"power": -1.0}, np.eye(3), ArgumentError, "power: expected"),
        ({"rank": 9}, np.eye(3), ArgumentError, "rank: expected an integer in 1..3"),
        ({"clip": 0.0}, np.eye(3), ArgumentError, "clip: expected"),
        ({"shrinkage": 2.0}, np.eye(3), ArgumentError, "shrinkage: expected"),
    ],
)
def test_bad_input(options, data, error, names) -> None:
    with pytest.raises(error, match=names):
        LinearizedAttention(**options).fit(data)


def test_transform_checks(X) -> None:
    with pytest.raises(NotFittedError, match="call fit"):
        LinearizedAttention().transform(X)
    with pytest.raises(ShapeError, match="expected 7 columns, got 3"):
        LinearizedAttention().fit(X).transform(X[:, :3])
