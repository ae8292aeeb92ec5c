"""The command line: what it prints, how it fails, and that a killed sweep loses nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from attn_bounds.cli import main

SWEEP = [
    "--token-ids",
    "1,2,3,4",
    "--queries",
    "1,3",
    "--radii",
    ".001,.1",
    "--methods",
    "exact,vertex",
    "--no-progress",
]


def run(capsys, *args: str) -> tuple[int, str, str]:
    code = main(args)
    out, err = capsys.readouterr()
    return code, out, err


def test_certify_prints_one_json_object(capsys, minilm):
    code, out, _ = run(
        capsys, "certify", "--text", "The quick brown fox", "--layer", "0", "--head", "4", "--query", "2", "--radius",
        "0.01", "--fixed-query", "--readout", "3", "--json",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0 and found["method"] == "exact" and found["is_exact"]
    assert found["nominal"] < found["lower"] <= found["upper"]
    assert {"lower", "upper", "nominal", "relative_gap", "method", "seconds"} <= set(found)


def test_certify_prints_text(capsys, tiny_gpt2):
    code, out, _ = run(
        capsys, "certify", "--model", tiny_gpt2, "--token-ids", "1,2,3", "--layer", "1", "--head", "2", "--query", "2",
        "--radius", "0.05", "--region", "box", "--method", "vertex",
    )  # fmt: skip
    assert code == 0 and "proved by vertex" in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--query", "99"], "query: expected an index in 0..2"),
        (["--layer", "7"], "layer: expected 0..1, got 7"),
        (["--head", "3"], "head: expected 0..2, got 3"),
        (["--radius", "-1"], "radius: expected at least 0"),
        (["--radius", "nan"], "radius: expected finite"),
        (["--method", "magic"], "method: expected one of"),
        (["--tokens", "9"], "tokens: expected at most 3"),
        (["--token-ids", "70"], "token_ids: expected numbers in 0..49"),
        (["--token-ids", ",".join(["1"] * 17)], "text: expected at most 16 tokens"),
        (["--token-ids", "1,x"], "expected ints separated by commas"),
        (["--model", "/no/such/folder"], "no such folder"),
        (["--text", "both"], "expected --text or --token-ids, got both --text and --token-ids"),
        (["--readout", "-4"], "readout: expected a seed"),
        (["--radius", "wide"], "invalid float value"),
    ],
)
def test_user_errors_are_one_line_and_exit_2(capsys, tiny_gpt2, change, words):
    good = {
        "--model": tiny_gpt2, "--token-ids": "1,2,3", "--layer": "0", "--head": "0", "--query": "1", "--radius": "0.1",
    } | dict([change])  # fmt: skip
    code, out, err = run(capsys, "certify", *(part for pair in good.items() for part in pair))
    assert code == 2 and words in err and "Traceback" not in err and out == ""


def test_text_without_a_tokenizer_is_an_error(capsys, tiny_gpt2):
    code, _, err = run(
        capsys, "certify", "--model", tiny_gpt2, "--text", "a", "--layer", "0", "--head", "0", "--query", "0",
        "--radius", "1",
    )  # fmt: skip
    assert code == 2 and "has no tokenizer" in err


def sweep(folder: Path, model: str, *more: str) -> list[str]:
    return ["sweep", "--model", model, *SWEEP, "--out", str(folder), *more]


def table(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "results.csv").drop(columns="seconds")


def test_sweep_writes_table_summary_and_plot(capsys, tmp_path, tiny_gpt2):
    code, _, _ = run(capsys, *sweep(tmp_path / "a", tiny_gpt2, "--query-moves", "both", "--format", "parquet"))
    assert code == 0
    rows = table(tmp_path / "a")
    assert len(rows) == 2 * 3 * 2 * 2 * 2 * 2
    # `exact` does not apply where the query moves: no bound, and the reason beside.
    moving = rows[(rows["method"] == "exact") & rows["query_moves"]]
    assert moving["upper"].isna().all() and moving["reason"].str.contains("stands still").all()
    fixed = rows[(rows["method"] == "exact") & ~rows["query_moves"]]
    assert fixed["is_exact"].all() and (fixed["upper"] >= fixed["lower"]).all()
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["rows"] == len(rows) and len(summary["results"]) == 8
    assert (tmp_path / "a" / "gap.png").stat().st_size > 1000
    assert len(pd.read_parquet(tmp_path / "a" / "results.parquet")) == len(rows)


def test_moment_gaps_stand_beside_the_secant_slack(capsys, tmp_path, tiny_gpt2):
    more = ["--methods", "moment2,vertex", "--radii", "0.1", "--queries", "3", "--layers", "0", "--fixed-query"]
    assert run(capsys, *sweep(tmp_path / "a", tiny_gpt2, *more))[0] == 0
    ratios = pd.read_csv(tmp_path / "a" / "results.csv").groupby("method")["gap_over_slack"]
    assert ratios.count()["moment2"] == 3 and ratios.count()["vertex"] == 0
    assert 0 <= ratios.min()["moment2"] and ratios.max()["moment2"] < 2


def test_a_run_is_not_overwritten_or_mixed(capsys, tmp_path, tiny_gpt2):
    assert run(capsys, *sweep(tmp_path / "a", tiny_gpt2))[0] == 0
    code, _, err = run(capsys, *sweep(tmp_path / "a", tiny_gpt2))
    assert code == 2 and "--resume" in err
    code, _, err = run(capsys, *sweep(tmp_path / "a", tiny_gpt2, "--resume", "--readout", "5"))
    assert code == 2 and "other settings (readout)" in err
    before = table(tmp_path / "a")
    assert run(capsys, *sweep(tmp_path / "a", tiny_gpt2, "--resume"))[0] == 0
    assert table(tmp_path / "a").equals(before)


@pytest.mark.parametrize("cut", [0, 1, 30, 2000, 20_000])
def test_a_table_cut_anywhere_resumes_to_the_same(capsys, tmp_path, tiny_gpt2, cut, monkeypatch):
    monkeypatch.setattr("attn_bounds.runs.CHUNK", 7)
    assert run(capsys, *sweep(tmp_path / "a", tiny_gpt2))[0] == 0
    whole = table(tmp_path / "a")
    path = tmp_path / "a" / "results.csv"
    path.write_bytes(path.read_bytes()[:cut])
    assert run(capsys, *sweep(tmp_path / "a", tiny_gpt2, "--resume"))[0] == 0
    assert table(tmp_path / "a").equals(whole)


def test_a_killed_sweep_resumes_to_the_same(tmp_path, tiny_gpt2):
    more = ["--radii", ",".join(str(0.001 * k) for k in range(1, 60)), "--queries", "1,2,3"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    }

    def command(folder: str, *extra: str) -> list[str]:
        return [sys.executable, "-m", "attn_bounds.cli", *sweep(tmp_path / folder, tiny_gpt2, *more, *extra)]

    subprocess.run(command("whole"), check=True, env=environment, capture_output=True)
    killed = subprocess.Popen(command("killed"), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path = tmp_path / "killed" / "results.csv"
    until = time.monotonic() + 120
    while time.monotonic() < until and not (path.exists() and path.stat().st_size > 40_000):
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    cut = len(table(tmp_path / "killed"))
    subprocess.run(command("killed", "--resume"), check=True, env=environment, capture_output=True)
    whole = table(tmp_path / "whole")
    assert 0 < cut < len(whole) and table(tmp_path / "killed").equals(whole)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--methods", "exact,magic"], "methods: expected some of"),
        (["--layers", "0,9"], "layers: expected 0..1, got 9"),
        (["--heads", "x"], "heads: expected 'all' or numbers"),
        (["--queries", "8"], "queries: expected indices in 0..3"),
        (["--radii", "-1"], "radii: expected finite numbers of at least 0"),
        (["--radii", "nan"], "radii: expected finite numbers of at least 0"),
        (["--readout", "-1"], "readout: expected a seed of at least 0"),
        (["--device", "abacus"], "device: expected one that torch has here"),
        (["--prompts", "/no/such/file"], "expected --prompts or --token-ids, got both --prompts and --token-ids"),
    ],
)
def test_sweep_errors_are_one_line(capsys, tmp_path, tiny_gpt2, change, words):
    code, _, err = run(capsys, *sweep(tmp_path / "a", tiny_gpt2), *change)
    assert code == 2 and words in err and "Traceback" not in err and not (tmp_path / "a").exists()


def test_an_unwritable_folder_is_an_error(capsys, tmp_path, tiny_gpt2):
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, *sweep(tmp_path / "file" / "a", tiny_gpt2))
    assert code == 2 and "out: expected a folder that can be written" in err


def test_demo_prints_the_table(capsys, minilm):
    code, out, _ = run(capsys, "demo")
    assert code == 0 and sum("exact" in line for line in out.splitlines()) >= 36
