from __future__ import annotations

import math

import numpy as np
import pytest

from attn_bounds.errors import ArgumentError, NotFiniteError, ShapeError
from attn_bounds.ntk import spectrum


def with_condition_number(kappa: float, n: int = 60, d: int = 12, seed: int = 0) -> np.ndarray:
    """X whose Gram matrix has non-zero eigenvalues spread evenly (in the logarithm) from kappa down to 1."""
    rng = np.random.default_rng(seed)
    U = np.linalg.qr(rng.normal(size=(n, d)))[0]
    V = np.linalg.qr(rng.normal(size=(d, d)))[0]
    return U * np.sqrt(np.geomspace(kappa, 1.0, d)) @ V.T


@pytest.mark.parametrize("kappa", [10.0, 1e2, 1e3, 1e4, 1e5, 1e6])
def test_exponent_on_synthetic_spectra(kappa: float) -> None:
    result = spectrum(with_condition_number(kappa), tol=1e-7)
    assert result.rank == 12
    assert result.kappa == pytest.approx(kappa, rel=1e-6)
    assert result.exponent == pytest.approx(3.0, abs=1e-3)


def naive_exponent(X: np.ndarray, rank: int) -> float:
    """The obvious way: eigenvalues of the formed matrix G^3."""
    G = X @ X.T
    w, w3 = (np.sort(np.linalg.eigvalsh(M))[::-1] for M in (G, G @ G @ G))
    return math.log(abs(w3[0] / w3[rank - 1])) / math.log(w[0] / w[rank - 1])


def test_naive_cube_is_right_at_small_and_wrong_at_large_condition_numbers() -> None:
    assert naive_exponent(with_condition_number(100.0), 12) == pytest.approx(3.0, abs=1e-3)
    for kappa in (1e6, 1e7):
        assert abs(naive_exponent(with_condition_number(kappa), 12) - 3.0) > 0.1
        assert spectrum(with_condition_number(kappa), tol=1e-8).exponent == pytest.approx(3.0, abs=1e-3)


def test_digits(digits) -> None:
    result = spectrum(digits.split(1000, 100).X, tol=1e-3)
    assert result.exponent == pytest.approx(3.0, abs=1e-3)
    assert result.exponent_normalized == pytest.approx(3.0, abs=0.05)
    assert abs(result.kappa - 952) <= 60
    assert result.width_kappa6 == pytest.approx(result.kappa**6)
    assert result.width_kappa6_n_log_n == pytest.approx(result.kappa**6 * 1000 * math.log(1000))
    assert 1.3 < result.exponent_ntk < 1.7  # what governs the NTK is not cubed
    assert result.notes == ()


def test_kappa_is_at_most_one_over_tol(digits) -> None:
    X = digits.split(300, 10).X
    kappas = [spectrum(X, tol=tol).kappa for tol in (1e-2, 1e-3, 1e-4)]
    assert all(kappa <= 1 / tol for kappa, tol in zip(kappas, (1e-2, 1e-3, 1e-4), strict=True))
    assert kappas == sorted(kappas)


def test_scale_and_rotation_change_nothing() -> None:
    X = with_condition_number(50.0)
    Q = np.linalg.qr(np.random.default_rng(1).normal(size=(12, 12)))[0]
    for other in (X * 1e-6, X * 1e100, X @ Q):
        assert spectrum(other).kappa == pytest.approx(spectrum(X).kappa, rel=1e-9)
        assert spectrum(other).exponent == pytest.approx(3.0, abs=1e-3)


def test_rank_one_says_that_there_is_no_exponent() -> None:
    result = spectrum(np.outer(np.arange(1.0, 6), np.ones(3)))
    assert result.rank == 1 and result.kappa == 1.0 and math.isnan(result.exponent)
    assert any("exponent is undefined" in note for note in result.notes)
    assert result.to_dict()["exponent"] is None


def test_equal_eigenvalues_have_no_exponent() -> None:
    result = spectrum(np.eye(4))
    assert result.kappa == pytest.approx(1.0) and math.isnan(result.exponent)
    assert any("exponent is undefined" in note for note in result.notes)


def test_duplicate_rows_are_named_in_the_notes(digits) -> None:
    X = digits.X[:20]
    result = spectrum(np.vstack([X, X]))
    assert math.isnan(result.kappa_ntk) and any("duplicate" in note for note in result.notes)
    assert result.exponent == pytest.approx(3.0, abs=1e-3)


def test_lost_precision_gives_no_figure() -> None:
    result = spectrum(with_condition_number(1e9), tol=1e-10)
    assert math.isnan(result.exponent) and any("rounding" in note for note in result.notes)


@pytest.mark.parametrize(
    ("X", "kwargs", "error", "names"),
    [
        (np.ones((1, 4)), {}, ShapeError, "at least 2 rows, got 1"),
        (np.ones(4), {}, ShapeError, "X: expected a matrix"),
        (np.zeros((3, 4)), {}, ArgumentError, "every entry is zero"),
        (np.ones((3, 4)), {"centre": True}, ArgumentError, "all rows are the same"),
        (np.array([[1.0, np.nan], [0, 1]]), {}, NotFiniteError, "NaN or infinity"),
        (np.eye(3), {"tol": 0.0}, ArgumentError, "tol: expected"),
        (np.eye(3), {"tol": 1.0}, ArgumentError, "tol: expected"),
        ([["a", "b"], ["c", "d"]], {}, ArgumentError, "X: expected numbers"),
        (np.eye(3) * 1j, {}, ArgumentError, "real numbers"),
    ],
)
def test_bad_input(X, kwargs, error, names) -> None:
    with pytest.raises(error, match=names):
        spectrum(X, **kwargs)


def test_integers_and_float32_are_converted() -> None:
    X = np.random.default_rng(0).integers(0, 17, size=(30, 6))
    assert spectrum(X).kappa == pytest.approx(spectrum(X.astype(np.float64)).kappa, rel=1e-12)
    assert spectrum(X.astype(np.float32)).kappa == pytest.approx(spectrum(X.astype(np.float64)).kappa, rel=1e-12)


def test_table_and_dict_have_the_figures(digits) -> None:
    result = spectrum(digits.X[:50])
    assert len(result.table()) == 10
    assert result.to_dict()["kappa"] == result.kappa
    assert len(result.eigenvalues) == len(result.eigenvalues_attended) == 50
