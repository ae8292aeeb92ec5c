"""Reports: figures that a known table must give, and that nothing in them is typed by hand."""

import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from attn_bounds import errors
from attn_bounds.block_report import write_block_report
from attn_bounds.cli import main
from attn_bounds.list_report import write_list_report
from attn_bounds.report import gaps, ratios, slopes, write_report
from attn_bounds.runs import COLUMNS

ORDERS = {"first-order": (0.5, 1), "moment2": (2.0, 2), "crown": (10.0, 2), "exact": (0.0, 1)}  # gap = factor r^order


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose gaps are known powers of the radius."""
    rows = []
    for head, radius, moves, (method, (factor, order)) in product(
        range(3), (0.001, 0.01, 0.1), (False, True), ORDERS.items()
    ):
        movement, gap = 3.0 * radius, factor * radius**order
        row = {
            "model": "made", "prompt": 0, "layer": 0, "head": head, "query": 1, "query_moves": moves, "region": "ball",
            "radius": radius, "readout": 0, "method": method, "nominal": 1.0, "lower": 1.0 + movement,
            "upper": 1.0 + movement + gap, "relative_gap": gap / movement, "is_exact": gap == 0, "given_by": method,
            "seconds": 0.01, "reason": "",
        }  # fmt: skip
        if method == "moment2":
            row["gap_over_slack"] = radius  # so that slack / movement is 2 / 3
        if method == "exact" and moves:
            row |= dict.fromkeys(("lower", "upper", "relative_gap", "is_exact", "given_by", "seconds"), "")
            row["reason"] = "method: 'exact' needs a query that stands still"
        rows.append(row)
    pd.DataFrame(rows, columns=COLUMNS).to_csv(tmp_path / "results.csv", index=False)
    (tmp_path / "settings.json").write_text('{"kind": "heads"}')
    (tmp_path / "command.txt").write_text("attn-bounds compare heads --out made\n")
    return tmp_path


def test_slopes_and_ratios_of_known_gaps(run):
    table = pd.read_csv(run / "results.csv")
    assert (gaps(table)["gap"] >= 0).all()
    median = slopes(table).groupby("method")["slope"].median()
    assert median["first-order"] == pytest.approx(1) and median["moment2"] == pytest.approx(2)
    assert median["movement"] == pytest.approx(1) and "exact" not in median
    found = ratios(table, "moment2")
    assert set(found["method"]) == {"crown"} and found["ratio"].to_numpy() == pytest.approx(5.0)
    assert ratios(table, "exact").empty  # where the gap is zero there is no ratio


def test_the_report_holds_the_figures_and_their_command(run):
    page = write_report(run)
    text, html = (run / "report.md").read_text(), page.read_text()
    for shown in (text, html):
        assert "attn-bounds compare heads --out made" in shown and f"attn-bounds compare report {run}" in shown
        assert "needs a query that stands still" in shown
    published = pd.read_csv(run / "figures" / "published-table.csv")
    crown = published[published["figure"].str.startswith("CROWN") & (published["query"] == "moves")]
    assert crown["here (median)"].to_numpy() == pytest.approx(5.0)
    for figure in (run / "figures").glob("*.png"):
        assert f"figures/{figure.name}" in html and (run / "figures" / f"{figure.stem}-figure.csv").exists()
    certified = pd.read_csv(run / "figures" / "certified-figure.csv").set_index(["query_moves", "method", "radius"])
    assert certified.loc[(False, "exact", 0.001), "exact"] == 100
    assert certified.loc[(True, "moment2", 0.01), "within_1"] == 100  # 2 r / 3 = 0.0067
    assert certified.loc[(True, "moment2", 0.1), "within_1"] == 0


def test_the_slack_stands_beside_the_gaps(run):
    write_report(run)
    points = pd.read_csv(run / "figures" / "slack-figure.csv")
    assert len(points) == 3 * 3 * 2 and set(points["method"]) == {"moment2"}
    assert points["slack"].to_numpy() == pytest.approx(2 / 3)
    shown = pd.read_csv(run / "figures" / "slack-table.csv")
    assert shown[["r=0.001", "r=0.01", "r=0.1"]].to_numpy() == pytest.approx(np.array([[0.001, 0.01, 0.1]] * 2))
    table = pd.read_csv(run / "results.csv")
    table.assign(gap_over_slack=None).to_csv(run / "results.csv", index=False)
    assert "secant slack" not in write_report(run).read_text()


def test_a_folder_without_a_run_is_an_error(tmp_path):
    for write in (write_report, write_block_report, write_list_report):
        with pytest.raises(errors.ArgumentError, match="run: expected a folder that holds a run"):
            write(tmp_path)
    pd.DataFrame(columns=COLUMNS).to_csv(tmp_path / "results.csv", index=False)
    with pytest.raises(errors.ArgumentError, match="run: expected rows"):
        write_report(tmp_path)


@pytest.fixture
def block_run(tmp_path: Path) -> Path:
    """A block run whose looseness grows with the layer."""
    rows = [
        {
            "model": "made", "prompt": 0, "layer": k, "position": 0, "readout": 0, "radius": 0.001, "attained": 1e-5,
            "second_order": 1e-5, "per_operation": 1e-4 * (k + 1), "per_operation_split": 2e-4 * (k + 1),
            "effective_rank": 5, "crown": 3e-4 * (k + 1), "crown_split": "", "seconds": 1, "crown_seconds": 1,
            "by_operation": '{"scores": 1e-4}',
        }
        for k in range(4)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "results.csv", index=False)
    (tmp_path / "settings.json").write_text('{"kind": "block-residual"}')
    return tmp_path


@pytest.fixture
def list_run(tmp_path: Path) -> Path:
    """A substitutions run with known gaps."""
    rows = [
        {
            "model": "made", "prompt": 0, "neighbours": k, "head": head, "query": 0, "readout": 0, "method": method,
            "nominal": 0.0, "exact": 1.0, "upper": 1.0 + gap, "relative_gap": gap, "seconds": 0.1, "reason": "",
        }
        for k in (2, 8)
        for head in range(3)
        for method, gap in (("exact (lists)", 0.0), ("vertex (box)", 10.0 * k))
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "results.csv", index=False)
    (tmp_path / "settings.json").write_text('{"kind": "substitutions"}')
    return tmp_path


@pytest.mark.parametrize("kind", ["run", "block_run", "list_run"])
def test_one_command_restores_what_was_deleted(request, kind):
    folder = request.getfixturevalue(kind)
    command = ["compare", "report", str(folder)]
    assert main(command) == 0
    before = {p.name: p.read_bytes() for p in (folder / "figures").iterdir()}
    pages = {name: (folder / name).read_text() for name in ("report.md", "report.html")}
    shutil.rmtree(folder / "figures")
    for name in pages:
        (folder / name).unlink()
    assert main(command) == 0
    assert {p.name: p.read_bytes() for p in (folder / "figures").iterdir()} == before
    assert {name: (folder / name).read_text() for name in pages} == pages
    pictures = {name.removesuffix(".png") for name in before if name.endswith(".png")}
    assert pictures and {f"{name}-figure.csv" for name in pictures} <= set(before)


def test_the_list_report_holds_the_medians(list_run):
    write_list_report(list_run)
    table = pd.read_csv(list_run / "figures" / "substitutions-table.csv").set_index(["neighbours", "method"])
    assert table.loc[(8, "vertex (box)"), "median"] == 80 and table.loc[(2, "exact (lists)"), "median"] == 0


def test_a_folder_of_no_known_kind_is_an_error(tmp_path, capsys):
    for settings, said in ((None, "a folder that holds a run"), ("{}", "holds a run"), ('{"kind": "x"}', "got 'x'")):
        if settings is not None:
            (tmp_path / "settings.json").write_text(settings)
        assert main(["compare", "report", str(tmp_path)]) == 2
        assert said in capsys.readouterr().err


def test_the_block_report_ranks_the_units(block_run):
    write_block_report(block_run)
    table = pd.read_csv(block_run / "figures" / "blocks-table.csv").set_index(["figure", "form"])["median"]
    assert table["Spearman, predicted and measured looseness", "softmax one operation"] == pytest.approx(1)
    assert table["crown / per-operation sum", "softmax one operation"] == pytest.approx(3)
    assert table["predicted looseness", "softmax in parts"] == pytest.approx(50)
