"""`compare heads`: one table for all methods, the same whatever computes it, and what a missing verifier does."""

import builtins
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

import attn_bounds as ab
from attn_bounds import errors, runs
from attn_bounds.certify import certificates, search_many
from attn_bounds.cli import main
from attn_bounds.engines import run_on

UNITS = ["--token-ids", "1,2,3,4", "--token-ids", "9,8,7", "--queries", "1,2", "--radii", ".001,.1", "--no-progress"]
needs_verifier = pytest.mark.skipif(importlib.util.find_spec("auto_LiRPA") is None, reason="needs auto_LiRPA")


def heads(model: str, folder: Path, *more: str) -> int:
    return main(["compare", "heads", "--model", model, *UNITS, "--out", str(folder), *more])


def table(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "results.csv").drop(columns="seconds")


OWN = ["--methods", "exact,first-order,search,lagrangian"]


def test_all_methods_of_a_unit_share_one_attained_value(tmp_path, tiny_gpt2):
    assert heads(tiny_gpt2, tmp_path / "a", *OWN) == 0
    rows = table(tmp_path / "a")
    assert len(rows) == 2 * 3 * 2 * 2 * 2 * 2 * 4
    unit = ["prompt", "layer", "head", "query", "query_moves", "radius"]
    bounded = rows[rows["upper"].notna()]
    assert (bounded.groupby(unit)["lower"].nunique() == 1).all()
    assert (bounded["upper"] >= bounded["lower"]).all() and (bounded["lower"] >= bounded["nominal"]).all()
    found = rows[rows["method"] == "search"]
    assert found["upper"].isna().all() and found["lower"].notna().all()
    assert found["reason"].str.contains("proves no bound").all()
    exact = rows[(rows["method"] == "exact") & ~rows["query_moves"]]
    assert exact["is_exact"].all()
    assert (tmp_path / "a" / "report.html").exists()


def test_processes_give_the_same_table(tmp_path, tiny_gpt2, monkeypatch):
    monkeypatch.setattr(runs, "CHUNK", 4)
    few = ["--methods", "exact,first-order", "--layers", "1"]
    assert heads(tiny_gpt2, tmp_path / "one", *few) == 0
    assert heads(tiny_gpt2, tmp_path / "two", *few, "--jobs", "2") == 0
    assert table(tmp_path / "one").equals(table(tmp_path / "two"))


def test_float32_weights_give_other_tokens_and_float64_bounds(tmp_path, tiny_gpt2):
    assert heads(tiny_gpt2, tmp_path / "a", "--methods", "vertex") == 0
    assert heads(tiny_gpt2, tmp_path / "b", "--methods", "vertex", "--dtype", "float32") == 0
    a, b = table(tmp_path / "a"), table(tmp_path / "b")
    assert not a["nominal"].equals(b["nominal"])
    assert (a["nominal"] - b["nominal"]).abs().max() < 1e-5 and (a["upper"] - b["upper"]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--methods", "exact,magic"], "methods: expected some of search, exact"),
        (["--methods", ""], "methods: expected some of"),
        (["--jobs", "0"], "jobs: expected at least 1"),
        (["--engine", "dask"], "address: expected the Dask scheduler's"),
        (["--address", "tcp://localhost:1"], "address: expected none with engine 'local'"),
        (["--device", "nowhere"], "device: expected one that torch has here"),
    ],
)
def test_errors_are_one_line(capsys, tmp_path, tiny_gpt2, change, words):
    if "dask" in change:
        pytest.importorskip("distributed")
    code = heads(tiny_gpt2, tmp_path / "a", *OWN, *change)
    err = capsys.readouterr().err
    assert code == 2 and words in err and "Traceback" not in err


def test_a_missing_verifier_is_a_typed_error(capsys, tmp_path, tiny_gpt2, monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] in ("auto_LiRPA", "attn_bounds_lirpa")]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "auto_LiRPA":
            raise ImportError("No module named 'auto_LiRPA'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(errors.MissingDependencyError, match="needs auto_LiRPA"):
        runs.runner("crown")
    assert heads(tiny_gpt2, tmp_path / "a", "--methods", "crown") == 2
    assert "needs auto_LiRPA" in capsys.readouterr().err
    few = ["--layers", "0", "--heads", "0", "--queries", "1", "--radii", ".01"]
    assert heads(tiny_gpt2, tmp_path / "b", *few) == 0  # by default the rest is compared, and a line says so
    assert "without ibp, crown, alpha-crown" in capsys.readouterr().err
    assert set(table(tmp_path / "b")["method"]) == {
        "search", "exact", "first-order", "vertex", "moment2", "moment3", "lagrangian",
    }  # fmt: skip


def test_a_bound_from_elsewhere_is_checked_against_the_attained_value(rng):
    from attn_bounds.certify import UnsoundBoundWarning

    head = ab.AttentionHead(*rng.standard_normal((3, 2, 4)))
    tokens, readout = rng.standard_normal((3, 4)), rng.standard_normal(2)
    problems = [ab.HeadProblem(head, tokens, query, readout, ab.TokenBall(0.1)) for query in range(3)]
    found = [c.lower for c in search_many(problems)]
    with pytest.warns(UnsoundBoundWarning):
        low, none, good = certificates(
            problems, "other", [found[0] - 0.1, float("inf"), found[2] + 0.1], [0.0] * 3, [None, "it failed", None]
        )
    assert low.upper == float("inf") and "thrown away" in low.reason
    assert none.upper == float("inf") and none.reason == "it failed"
    assert good.upper == found[2] + 0.1 and good.lower == found[2] and good.reason is None


def _die(item: int) -> int:
    if item == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_a_dead_process_is_a_typed_error():
    with pytest.raises(errors.EngineError, match="--resume"):
        list(run_on("local", _die, [0, 1, 2], jobs=2))


@needs_verifier
@pytest.mark.lirpa
def test_verifiers_stand_in_the_same_table(tmp_path, tiny_gpt2):
    assert heads(tiny_gpt2, tmp_path / "a", "--methods", "search,first-order,ibp,crown", "--heads", "0") == 0
    rows = table(tmp_path / "a")
    theirs = rows[rows["method"].isin(["ibp", "crown"])]
    assert theirs["upper"].notna().all() and (theirs["upper"] >= theirs["lower"]).all()
    by = theirs.pivot(index=["prompt", "layer", "query", "query_moves", "radius"], columns="method", values="upper")
    small = by[by.index.get_level_values("radius") == 0.001]
    assert (small["crown"] <= small["ibp"]).all()
    report = (tmp_path / "a" / "report.md").read_text()
    assert "Verifiers' gap over that of first-order" in report


@pytest.mark.slow
def test_a_cluster_that_loses_a_worker_ends_in_the_same_table(tmp_path, tiny_gpt2, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(runs, "CHUNK", 4)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    note = tmp_path / "scheduler.json"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard",
             "--scheduler-file", str(note)],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
    ]  # fmt: skip
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and not note.exists():
            time.sleep(0.1)
        started += [
            subprocess.Popen(
                [sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(note), "--no-nanny",
                 "--nthreads", "1", "--no-dashboard"],
                env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            for _ in range(2)
        ]  # fmt: skip
        from distributed import Client

        with Client(scheduler_file=str(note)) as client:
            client.wait_for_workers(2, timeout=60)
            address = client.scheduler.address
        path = tmp_path / "cluster" / "results.csv"
        real = runs.Run._append

        def append(self, rows):
            real(self, rows)
            if started[-1].poll() is None and self.rows() > 100:  # in the middle, a worker dies
                started[-1].send_signal(signal.SIGKILL)

        more = [*OWN, "--radii", ".001,.002,.01,.02,.05,.1"]
        monkeypatch.setattr(runs.Run, "_append", append)
        assert heads(tiny_gpt2, tmp_path / "cluster", *more, "--engine", "dask", "--address", address) == 0
        assert started[-1].poll() == -signal.SIGKILL and path.exists()
        monkeypatch.setattr(runs.Run, "_append", real)
        assert heads(tiny_gpt2, tmp_path / "here", *more) == 0
        assert table(tmp_path / "cluster").equals(table(tmp_path / "here"))
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_the_box_around_substitutes_lies_above_the_exact_worst_case(tmp_path, tiny_gpt2, capsys):
    out = tmp_path / "a"
    command = ["compare", "substitutions", "--model", tiny_gpt2, "--token-ids", "1,2,3,4", "--query", "2"]
    assert main([*command, "--neighbours", "1,3", "--methods", "vertex", "--out", str(out), "--no-progress"]) == 0
    rows = pd.read_csv(out / "results.csv")
    lists, box = rows[rows["method"] == "exact (lists)"], rows[rows["method"] == "vertex (box)"]
    assert len(lists) == len(box) == 2 * 3
    assert (lists["relative_gap"] < 1e-9).all()
    assert (box["upper"].to_numpy() >= lists["upper"].to_numpy() - 1e-12).all()
    few, many = (lists[lists["neighbours"] == k]["exact"].to_numpy() for k in (1, 3))
    assert (many >= few - 1e-12).all()  # more substitutes can only do more
    assert "vertex (box)" in capsys.readouterr().out


def test_substitutes_hold_the_text_first(tiny_gpt2):
    from attn_bounds.models import load_model

    model = load_model(tiny_gpt2)
    lists = model.substitutes([1, 2, 3], 2)
    assert len(lists) == 3 and all(z.shape == (3, model.width) for z in lists)
    assert all((z[0] == t).all() for z, t in zip(lists, model.tokens([1, 2, 3], 0), strict=True))


def test_substitution_errors_are_one_line(capsys, tmp_path, tiny_gpt2):
    command = ["compare", "substitutions", "--model", tiny_gpt2, "--token-ids", "1,2", "--out", str(tmp_path)]
    for change, said in ((["--neighbours", "0"], "neighbours: expected"), (["--query", "2"], "query: expected 0..1")):
        assert main([*command, "--methods", "vertex", "--no-progress", *change]) == 2
        assert said in capsys.readouterr().err


def test_block_residual_writes_a_resumable_table(tmp_path, tiny_gpt2):
    out = tmp_path / "a"
    command = ["compare", "block-residual", "--model", tiny_gpt2, "--token-ids", "1,2,3,4", "--readouts", "2",
               "--radii", "1e-4", "--no-crown", "--out", str(out), "--no-progress"]  # fmt: skip
    assert main(command) == 0
    rows = pd.read_csv(out / "results.csv")
    assert len(rows) == 4 and rows["crown"].isna().all()
    assert (rows["second_order"] <= rows["per_operation"]).all() and (rows["attained"] > 0).all()
    path = out / "results.csv"
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text[:3]) + text[3][:20])  # killed in the middle of a row
    assert main(command) == 2
    assert main([*command, "--resume"]) == 0
    again = pd.read_csv(path)
    assert again.drop(columns="seconds").equals(rows.drop(columns="seconds"))
