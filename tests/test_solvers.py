"""The solver layer: one programme through every solver and path, the licence probe, failures as statuses."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from attn_bounds import solvers
from attn_bounds.bounds._centred import centre
from attn_bounds.bounds._cones import Programme
from attn_bounds.bounds.moment import moment
from attn_bounds.errors import ArgumentError
from attn_bounds.search import ascend
from tests.moment_cases import batch


def programme(order: int = 3) -> solvers.Conic:
    reduced = batch(0.3, count=1, query_moves=True)
    c = centre(reduced, *ascend(reduced)[:2])
    one = {name: value[0].numpy() for name, value in vars(c).items() if isinstance(value, torch.Tensor)}
    return Programme(one, c.box, c.own, order, False, True).conic


def check_dual(conic: solvers.Conic, z: np.ndarray, value: float, tolerance: float) -> None:
    """A^T z + q = 0 and -b . z = value, with z in the dual cone: signs and orders of the duals are as promised."""
    assert np.abs(conic.A.T @ z + conic.q).max() < tolerance
    assert -conic.b @ z == pytest.approx(value, abs=tolerance)
    start = 0
    for kind, dim in conic.cones:
        part = z[start : start + solvers.rows_of((kind, dim))]
        start += part.size
        if kind == "nonneg":
            assert part.min() > -tolerance
        elif kind == "soc":
            assert part[0] > np.linalg.norm(part[1:]) - tolerance
        elif kind == "exp":
            u, v, w = part
            assert u < tolerance and w > -tolerance
            assert u > -1e-9 or -u * np.exp(v / u) <= np.e * w * (1 + 1e-3) + 10 * tolerance
        elif kind == "psd":
            matrix = np.zeros((dim, dim))
            places = [(i, j) for j in range(dim) for i in range(j + 1)]
            for entry, (i, j) in zip(part, places, strict=True):
                matrix[i, j] = matrix[j, i] = entry * (1.0 if i == j else np.sqrt(0.5))
            assert np.linalg.eigvalsh(matrix)[0] > -tolerance


def test_duals_have_the_promised_signs_and_orders() -> None:
    conic = programme()
    assert {kind for kind, _ in conic.cones} == {"zero", "nonneg", "soc", "exp", "psd"}
    found = solvers.solve(conic, "clarabel")
    check_dual(conic, found.z, found.value, 1e-6)
    x, z, value, _ = solvers.through_cvxpy(conic, "CLARABEL")  # the path that MOSEK takes
    check_dual(conic, z, value, 1e-5)
    assert value == pytest.approx(found.value, abs=1e-6) and x.size == conic.q.size
    other = solvers.solve(conic, "scs")
    assert other.value == pytest.approx(found.value, abs=2e-3)
    check_dual(conic, other.z, found.value, 2e-3)


def test_every_solver_gives_a_sound_bound() -> None:
    reduced = batch(0.2, count=2)
    x, y, f = ascend(reduced)
    for name in ("clarabel", "scs", "mosek", None):
        assert (moment(reduced, 2, solver=name, point=(x, y)).upper >= f).all(), name


def test_an_infeasible_programme_is_a_status() -> None:
    conic = solvers.Conic(np.zeros(1), sp.csc_matrix([[1.0], [-1.0]]), np.array([-1.0, -1.0]), (("nonneg", 2),))
    for name in ("clarabel", "scs"):
        assert "olved" not in solvers.solve(conic, name).status.replace("Unsolved", "")
    x, z, _, status = solvers.through_cvxpy(conic, "CLARABEL")
    assert np.isnan(x).all() and np.isnan(z).all() and status == "infeasible"


def test_a_solver_that_cannot_run_through_cvxpy_is_a_status() -> None:
    x, _, _, status = solvers.through_cvxpy(programme(2), "NO SUCH SOLVER")
    assert np.isnan(x).all() and "SolverError" in status


def test_unknown_solvers_are_refused() -> None:
    with pytest.raises(ArgumentError, match="solver: expected one of clarabel, mosek, scs or None, got 'gurobi'"):
        solvers.resolve("gurobi")


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "_mosek_failure", lambda: "no licence")
    solvers._choice.cache_clear()
    solvers._announce.cache_clear()
    with caplog.at_level(logging.INFO, "attn_bounds.solvers"):
        for _ in range(3):
            assert solvers.resolve() == "clarabel"
    assert [r.getMessage() for r in caplog.records] == ["conic solver: clarabel (MOSEK is out: no licence)"]
    monkeypatch.setattr(solvers, "_mosek_failure", lambda: None)
    solvers._choice.cache_clear()
    assert solvers.resolve() == solvers.resolve("MOSEK") == "mosek"
    solvers._choice.cache_clear()
    solvers._announce.cache_clear()


@pytest.mark.parametrize("licence", [None, "/no/such/file.lic"])
def test_without_a_licence_clarabel_runs_with_one_line_of_log(licence: str | None) -> None:
    """In a process of its own: nothing on stderr but one line of log, whatever the licence variable says."""
    environment = {k: v for k, v in os.environ.items() if k != "MOSEKLM_LICENSE_FILE"}
    if licence is not None:
        environment["MOSEKLM_LICENSE_FILE"] = licence
    if licence is None and solvers._mosek_failure() is None:
        pytest.skip("a MOSEK licence is installed here")
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    code = """
        import logging
        logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
        from attn_bounds.bounds.moment import moment
        from tests.moment_cases import batch
        for _ in range(2):
            print(float(moment(batch(0.1, count=1), 2, solver="mosek").upper[0]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert all(np.isfinite(float(line)) for line in done.stdout.split())
    lines = [line for line in done.stderr.splitlines() if "attn_bounds" in line]
    assert len(lines) == 1 and lines[0].startswith("attn_bounds.solvers conic solver: clarabel"), done.stderr
    assert "Traceback" not in done.stderr
