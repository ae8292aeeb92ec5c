"""`compare heads`: one table for all methods, the same whatever computes it, and what a missing verifier does."""

import builtins
import dataclasses
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import attn_bounds as ab
from attn_bounds import errors, runs, tables
from attn_bounds.certify import certificates, search_many
from attn_bounds.cli import main
from attn_bounds.engines import run_on
from attn_bounds.models import load_model, seeded_readout

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
        real = tables.Run._append

        def append(self, rows):
            real(self, rows)
            if started[-1].poll() is None and self.rows() > 100:  # in the middle, a worker dies
                started[-1].send_signal(signal.SIGKILL)

        more = [*OWN, "--radii", ".001,.002,.01,.02,.05,.1"]
        monkeypatch.setattr(tables.Run, "_append", append)
        assert heads(tiny_gpt2, tmp_path / "cluster", *more, "--engine", "dask", "--address", address) == 0
        assert started[-1].poll() == -signal.SIGKILL and path.exists()
        monkeypatch.setattr(tables.Run, "_append", real)
        assert heads(tiny_gpt2, tmp_path / "here", *more) == 0
        assert table(tmp_path / "cluster").equals(table(tmp_path / "here"))
    finally:
        for process in started:
            process.kill()
            process.wait()


LISTS = ["compare", "substitutions", "--token-ids", "1,2,3,4", "--token-ids", "7,8,9", "--query", "2", "--neighbours",
         "1,3", "--methods", "vertex", "--no-progress"]  # fmt: skip


def test_the_box_around_substitutes_lies_above_the_exact_worst_case(tmp_path, tiny_gpt2):
    out = tmp_path / "a"
    assert main([*LISTS, "--model", tiny_gpt2, "--out", str(out), "--format", "parquet"]) == 0
    rows = pd.read_csv(out / "results.csv")
    lists, box = rows[rows["method"] == "exact (lists)"], rows[rows["method"] == "vertex (box)"]
    assert len(lists) == len(box) == 2 * 2 * 3
    assert (lists["relative_gap"] < 1e-9).all()
    assert (box["upper"].to_numpy() >= lists["upper"].to_numpy() - 1e-12).all()
    few, many = (lists[lists["neighbours"] == k]["exact"].to_numpy() for k in (1, 3))
    assert (many >= few - 1e-12).all()  # more substitutes can only do more
    assert len(pd.read_parquet(out / "results.parquet")) == len(rows)
    report = (out / "report.md").read_text()
    assert "vertex (box)" in report and "figures/substitutions.png" in report
    summary = pd.read_csv(out / "figures" / "substitutions-table.csv").set_index(["neighbours", "method"])
    median = box[box["neighbours"] == 3]["relative_gap"].median()
    assert summary.loc[(3, "vertex (box)"), "median"] == pytest.approx(median)


def test_substitutions_cut_anywhere_resume_to_the_same(tmp_path, tiny_gpt2, capsys):
    command = [*LISTS, "--model", tiny_gpt2, "--out", str(tmp_path)]
    assert main(command) == 0
    whole, path = table(tmp_path), tmp_path / "results.csv"
    path.write_bytes(path.read_bytes()[:1500])
    assert main(command) == 2 and "add --resume" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert table(tmp_path).equals(whole)
    (tmp_path / "report.md").unlink()
    assert main(["compare", "report", str(tmp_path)]) == 0 and (tmp_path / "report.md").exists()


def test_a_box_bound_below_the_lists_is_thrown_away(tmp_path, tiny_gpt2, monkeypatch):
    real = runs.runner

    def low(method):
        def run(problems):
            return [dataclasses.replace(c, lower=c.nominal, upper=c.nominal) for c in real(method)(problems)]

        return run

    monkeypatch.setattr("attn_bounds.cli._substitutions.runner", low)
    assert main([*LISTS, "--model", tiny_gpt2, "--out", str(tmp_path)]) == 0
    box = table(tmp_path).query("method == 'vertex (box)'")
    assert box["upper"].isna().all() and box["reason"].str.contains("below an attained value").all()


def test_substitutes_hold_the_text_first(tiny_gpt2):
    model = load_model(tiny_gpt2)
    lists = model.substitutes([1, 2, 3], 2)
    assert len(lists) == 3 and all(z.shape == (3, model.width) for z in lists)
    assert all((z[0] == t).all() for z, t in zip(lists, model.tokens([1, 2, 3], 0), strict=True))


def test_substitution_errors_are_one_line(capsys, tmp_path, tiny_gpt2):
    command = ["compare", "substitutions", "--model", tiny_gpt2, "--token-ids", "1,2", "--out", str(tmp_path)]
    for change, said in ((["--neighbours", "0"], "neighbours: expected"), (["--query", "2"], "query: expected 0..1"),
                         (["--neighbours", "50"], "neighbours: expected 1..49")):  # fmt: skip
        assert main([*command, "--methods", "vertex", "--no-progress", *change]) == 2
        assert said in capsys.readouterr().err


def test_block_residual_writes_a_resumable_table(tmp_path, tiny_gpt2):
    out = tmp_path / "a"
    command = ["compare", "block-residual", "--model", tiny_gpt2, "--token-ids", "1,2,3,4", "--readouts", "2",
               "--radii", "1e-4", "--no-crown", "--out", str(out), "--no-progress", "--format", "parquet"]  # fmt: skip
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
    assert len(pd.read_parquet(out / "results.parquet")) == 4
    assert main([*command[:-2], "--resume", "--radii", "1e-3"]) == 2  # another run's table is not continued
    for change in (["--position", "-5"], ["--position", "4"]):
        assert main([*command, "--out", str(tmp_path / "b"), *change]) == 2 and not (tmp_path / "b").exists()


@pytest.mark.parametrize("what", ["heads", "substitutions", "block-residual"])
def test_parquet_without_its_package_is_refused_early(tmp_path, tiny_gpt2, what, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    command = ["compare", what, "--model", tiny_gpt2, "--token-ids", "1,2", "--out", str(tmp_path / "a")]
    assert main([*command, "--format", "parquet", *(["--no-crown"] if what == "block-residual" else [])]) == 2
    assert "pip install pyarrow" in capsys.readouterr().err and not (tmp_path / "a").exists()


@pytest.fixture(scope="module")
def tiny_vit(tmp_path_factory):
    """A small ViT with random weights, saved the way transformers saves models, and two images."""
    from PIL import Image
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vit")
    config = ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=24, image_size=16, patch_size=8
    )
    ViTModel(config).save_pretrained(folder)
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (20, 30, 3), dtype=np.uint8)).save(folder / "a.png")
    np.save(folder / "b.npy", rng.standard_normal((3, 16, 16)))
    return folder


def test_vit_heads_read_normalised_patches(tmp_path, tiny_vit):
    from transformers import ViTModel

    images = [str(tiny_vit / "a.png"), str(tiny_vit / "b.npy")]
    units = ["--model", str(tiny_vit), "--images", *images, "--queries", "0,3", "--radii", ".01", "--no-progress"]
    methods = ["--methods", "exact,vertex,lagrangian"]
    assert main(["compare", "heads", *units, *methods, "--out", str(tmp_path / "a")]) == 0
    rows = table(tmp_path / "a")
    assert len(rows) == 2 * 2 * 3 * 2 * 2 * 3
    assert rows[(rows["method"] == "exact") & ~rows["query_moves"]]["is_exact"].all()
    # The nominal output is what the model's own weights give on the layer-normalised patches of the array.
    model = ViTModel.from_pretrained(tiny_vit, dtype=torch.float64)
    with torch.no_grad():
        pixels = torch.as_tensor(np.load(images[1]))[None]
        hidden = model(pixels, output_hidden_states=True).hidden_states[1]
        z = (model.layers if hasattr(model, "layers") else model.encoder.layer)[1].layernorm_before(hidden)[0]
    head = ab.from_vit(model, 1, 2)
    problem = ab.HeadProblem(head, z, 3, seeded_readout(0, head.d_out), ab.TokenBall(0.01))
    row = rows.query("prompt == 1 and layer == 1 and head == 2 and query == 3 and method == 'vertex'")
    assert row["nominal"].to_numpy() == pytest.approx(problem.nominal, abs=1e-12)
    assert main(["sweep", *units, "--out", str(tmp_path / "b")]) == 0
    assert (tmp_path / "b" / "gap.png").exists()


def test_a_vits_own_image_processor_is_used(tiny_vit, tmp_path):
    processor = pytest.importorskip("transformers").ViTImageProcessor(
        size={"height": 16, "width": 16}, image_mean=[0.1, 0.2, 0.3]
    )
    image = str(tiny_vit / "a.png")
    plain = load_model(str(tiny_vit)).tokens(image, 0)
    shutil.copytree(tiny_vit, tmp_path / "own")
    processor.save_pretrained(tmp_path / "own")
    own = load_model(str(tmp_path / "own"))
    from PIL import Image

    pixels = processor(Image.open(image), return_tensors="pt")["pixel_values"].double()
    with torch.no_grad():
        embedded = own.model(pixels, output_hidden_states=True).hidden_states[0]
        wanted = own._norm(0)(embedded)[0]
    assert torch.allclose(own.tokens(image, 0), wanted) and not torch.allclose(plain, wanted)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ([], "reads images: expected --images FILE"),
        (["--token-ids", "1,2"], "reads images: expected --images, got --token-ids"),
        (["--prompts", "texts.txt"], "reads images: expected --images, got --prompts"),
        (["--images", "no.png"], "reads an image file"),
        (["--images", __file__], "image: expected an image file"),
    ],
)
def test_a_vit_says_what_it_reads(tmp_path, tiny_vit, capsys, change, words):
    for command in (["compare", "heads", "--methods", "vertex"], ["sweep"]):
        assert main([*command, "--model", str(tiny_vit), "--out", str(tmp_path / "a"), *change]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "a").exists()


def test_what_reads_text_refuses_images(tmp_path, tiny_vit, tiny_gpt2, capsys):
    out = ["--out", str(tmp_path / "a")]
    assert main(["sweep", "--model", tiny_gpt2, "--images", str(tiny_vit / "a.png"), *out]) == 2
    assert "reads text: expected --prompts or --token-ids, got --images" in capsys.readouterr().err
    for command in (["substitutions", "--methods", "vertex"], ["block-residual", "--no-crown"]):
        assert main(["compare", *command, "--model", str(tiny_vit), *out]) == 2
        assert "needs one that reads text" in capsys.readouterr().err
    one = ["--layer", "0", "--head", "0", "--query", "0", "--radius", ".01"]
    assert main(["certify", "--model", str(tiny_vit), *one, "--image", str(tiny_vit / "a.png")]) == 0
    assert main(["certify", "--model", str(tiny_vit), *one, "--text", "words"]) == 2
    assert "expected --image, got --text" in capsys.readouterr().err
