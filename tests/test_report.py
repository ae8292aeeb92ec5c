"""Reports: figures that a known table must give, and that nothing in them is typed by hand."""

import shutil
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from attn_bounds import errors
from attn_bounds.block_report import write_block_report
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
        if method == "exact" and moves:
            row |= dict.fromkeys(("lower", "upper", "relative_gap", "is_exact", "given_by", "seconds"), "")
            row["reason"] = "method: 'exact' needs a query that stands still"
        rows.append(row)
    pd.DataFrame(rows, columns=COLUMNS).to_csv(tmp_path / "results.csv", index=False)
    (tmp_path / "settings.json").write_text("{}")
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


def test_deleted_figures_come_back_the_same(run):
    write_report(run)
    before = {p.name: p.read_bytes() for p in (run / "figures").iterdir()}
    text = (run / "report.md").read_text()
    shutil.rmtree(run / "figures")
    (run / "report.md").unlink()
    write_report(run)
    assert (run / "report.md").read_text() == text
    assert {p.name: p.read_bytes() for p in (run / "figures").iterdir()} == before


def test_a_folder_without_a_run_is_an_error(tmp_path):
    for write in (write_report, write_block_report):
        with pytest.raises(errors.ArgumentError, match="run: expected a folder that holds a run"):
            write(tmp_path)
    pd.DataFrame(columns=COLUMNS).to_csv(tmp_path / "results.csv", index=False)
    with pytest.raises(errors.ArgumentError, match="run: expected rows"):
        write_report(tmp_path)


def test_the_block_report_ranks_the_units(tmp_path):
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
    write_block_report(tmp_path)
    table = pd.read_csv(tmp_path / "figures" / "blocks-table.csv").set_index(["figure", "form"])["median"]
    assert table["Spearman, predicted and measured looseness", "softmax one operation"] == pytest.approx(1)
    assert table["crown / per-operation sum", "softmax one operation"] == pytest.approx(3)
    assert table["predicted looseness", "softmax in parts"] == pytest.approx(50)
