from __future__ import annotations

import json
from html.parser import HTMLParser

import numpy as np
import pytest

from attn_bounds import cli
from attn_bounds.ntk.claims import verdicts
from attn_bounds.ntk.studies import Study


def main(*words: str) -> int:
    return cli.main(["ntk", *words])


SMALL = ("--n", "60", "--test", "20", "--seeds", "2", "--ridge", "dof:20", "--steps", "2")


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("spectrum", "exponent"),
        ("influence", "loo_error attention"),
        ("malleability", "flip_ratio hat"),
        ("poison", "drop attention"),
        ("defend", "halving_defences"),
        ("errors", "error attention network"),
    ],
)
def test_each_command_prints_json_and_leaves_files(name: str, figure: str, tmp_path, capsys) -> None:
    assert main(name, "--out", str(tmp_path), "--json", "--quick", *SMALL) == 0
    found = json.loads(capsys.readouterr().out)
    assert np.isfinite(found["figures"][figure])
    assert json.loads((tmp_path / f"{name}.json").read_text()) == found
    assert list(tmp_path.glob(f"{name} - *.csv"))
    if name != "errors":
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_convergence_command_resumes(tmp_path, capsys) -> None:
    words = ("convergence", "--out", str(tmp_path), "--quick", "--n", "40", "--widths", "16", "64", "--times", "0.5")
    assert main(*words) == 0
    assert "prediction distance by width" in capsys.readouterr().out
    lines = (tmp_path / "convergence.jsonl").read_text()
    assert main(*words, "--json") == 0
    assert (tmp_path / "convergence.jsonl").read_text() == lines
    assert "kernel_slope relu" in json.loads(capsys.readouterr().out)["figures"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--data", "nowhere"), "does not exist"),
        (("--ridge", "dof"), "ridge: expected KIND:NUMBER"),
        (("--n", "1"), "n: expected an integer >= 2"),
        (("--n", "5000"), "n: expected"),
        (("--epsilon", "0"), "epsilon: expected"),
        (("--ridge", "dof:5000", "--n", "50"), "fewer degrees of freedom than the rank"),
        (("--ridge", "value:0", "--n", "50"), "ridge"),
        (("--pair", "3", "x"), "classes: expected"),
        (("--data", "digits:3"), "classes: expected at least two"),
        (("--seeds", "0"), "seeds: expected"),
        (("--device", "abacus"), "device: cannot use 'abacus'"),
        (("--limit", "1"), "limit: expected an integer >= 2"),
        (("--bounds", "1", "0"), "bounds: expected"),
        (("--tol", "2"), "tol: expected"),
    ],
)
def test_bad_options_are_named_on_stderr(words, names, tmp_path, capsys) -> None:
    name = {"--pair": "convergence", "--tol": "spectrum"}.get(words[0], "malleability")
    assert main(name, "--out", str(tmp_path), "--quick", *words) == 2
    captured = capsys.readouterr()
    assert names in captured.err and captured.err.startswith("attn-bounds ntk: ")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[str] = []
        self.rows = 0

    def handle_starttag(self, tag, attrs) -> None:
        if tag == "img":
            self.images.append(dict(attrs)["src"])
        elif tag != "meta":
            self.open.append(tag)
        self.rows += tag == "tr"

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def test_report_page(tmp_path, capsys) -> None:
    words = ("--quick", "--widths", "16", "64", "--times", "0.5", "--no-pretrained")
    assert main("report", "--out", str(tmp_path), "--json", *SMALL, *words) == 0
    record = json.loads(capsys.readouterr().out)
    page = _Page()
    page.feed((tmp_path / "report.html").read_text())
    assert not page.open and page.rows > 50
    assert len(page.images) == 7 and all((tmp_path / src).exists() for src in page.images)
    assert len(record["verdicts"]) == 10
    assert all(v["verdict"] in ("reproduced", "partly", "not reproduced") for v in record["verdicts"])


def test_verdicts_follow_the_figures() -> None:
    def poison(attention: float, relu: float) -> str:
        figures = {"drop attention": attention, "drop ReLU": relu, "random_drop attention": 0, "random_drop ReLU": 0}
        return verdicts({"poison": Study("poison", "", figures=figures)})[0].verdict

    assert poison(0.02, 0.01) == "not reproduced"
    assert poison(0.2, 0.02) == "reproduced"
    assert poison(0.08, 0.02) == "partly"

    def rising(change: float) -> str:
        figures = {}
        for model in ("relu", "attention uncentred", "attention centred"):
            figures |= {
                f"kernel_slope {model}": -0.5,
                f"distance_small {model}": 0.5,
                f"distance_large {model}": 0.5 * change,
            }
        return verdicts({"convergence": Study("convergence", "", figures=figures)})[3].verdict

    assert rising(1.5) == "reproduced" and rising(1.0) == "not reproduced"


def test_npz_of_two_classes(tmp_path, capsys) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(90) % 2
    np.savez(tmp_path / "blobs.npz", X=rng.normal(size=(90, 7)) + y[:, None], y=y)
    for name in ("spectrum", "malleability", "poison", "influence"):
        words = (
            "--data",
            str(tmp_path / "blobs.npz"),
            "--out",
            str(tmp_path / name),
            "--quick",
            *SMALL,
            "--ridge",
            "dof:10",
        )
        assert main(name, *words) == 0
    assert "blobs" in capsys.readouterr().out
