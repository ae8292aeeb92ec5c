"""The ONNX route, the VNN-LIB reader, the guard, and the command `attn-bounds verify`."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
if importlib.util.find_spec("onnx2pytorch") is None:
    pytest.skip("onnx2pytorch is not installed", allow_module_level=True)

from attn_bounds_abcrown import fuse_attention  # noqa: E402
from attn_bounds_abcrown.guard import install_guard  # noqa: E402
from attn_bounds_abcrown.incomplete import Settings, Verifier  # noqa: E402
from attn_bounds_abcrown.onnx_route import input_shape, load_onnx, onnx_to_torch  # noqa: E402
from attn_bounds_abcrown.vnnlib_reader import Property, read_vnnlib  # noqa: E402
from attn_bounds_lirpa.compat import IS_03  # noqa: E402
from auto_LiRPA import BoundedTensor, PerturbationLpNorm  # noqa: E402

from attn_bounds.cli import main  # noqa: E402
from attn_bounds.errors import ArgumentError, RegionError  # noqa: E402
from tests.lirpa.conftest import Block, ball, convert  # noqa: E402
from tests.lirpa.small_onnx import save_attention_network, vnnlib_text  # noqa: E402

pytestmark = pytest.mark.lirpa
ROOT = Path(__file__).parents[2]
VIT = Path(os.environ.get("ATTN_BOUNDS_VIT", ROOT.parent / "shared" / "vit"))
CONFIGS = ROOT / "verify_configs"
vit_data = pytest.mark.skipif(not VIT.is_dir(), reason="the ViT benchmark's files are not here (set ATTN_BOUNDS_VIT)")

verifier = pytest.mark.skipif(IS_03, reason="the verifier needs auto_LiRPA 0.7")


@pytest.fixture
def network_file(tmp_path):
    return save_attention_network(tmp_path / "net.onnx")


def scores(path, x):
    session = ort.InferenceSession(str(path))
    return session.run(None, {"input": x.astype(np.float32)})[0]


@verifier
def test_the_converted_network_agrees_with_onnxruntime_at_every_batch_size(network_file, tmp_path):
    packed = tmp_path / "net.onnx.gz"
    packed.write_bytes(gzip.compress(network_file.read_bytes()))
    model = load_onnx(packed)
    module = onnx_to_torch(model)
    assert input_shape(model) == (1, 4, 6)
    torch.set_default_dtype(torch.float32)
    network = convert(module, torch.zeros(1, 4, 6))
    fuse_attention(network)
    for batch in (1, 2, 5):
        x = np.random.default_rng(batch).standard_normal((batch, 4, 6)).astype(np.float32)
        np.testing.assert_allclose(module(torch.tensor(x)).detach().numpy(), scores(network_file, x), atol=1e-5)
        np.testing.assert_allclose(network(torch.tensor(x)).detach().numpy(), scores(network_file, x), atol=1e-5)


@vit_data
@pytest.mark.vit
@pytest.mark.parametrize("name", ["pgd_2_3_16", "ibp_3_3_8"])
def test_the_benchmark_networks_agree_with_onnxruntime(name):
    model = load_onnx(VIT / "onnx" / f"{name}.onnx.gz")
    x = np.random.default_rng(0).standard_normal((3, 3, 32, 32)).astype(np.float32)
    session = ort.InferenceSession(model.SerializeToString())
    y = session.run(None, {session.get_inputs()[0].name: x})[0]
    np.testing.assert_allclose(onnx_to_torch(model)(torch.tensor(x)).numpy(), y, atol=1e-5)


def write(path, text):
    path.write_text(text)
    return path


def test_vnnlib_files_are_read_exactly(tmp_path):
    text = """(declare-const X_0 Real)
    (declare-const Y_0 Real) (declare-const Y_1 Real) ; a comment
    (assert (<= X_0 0.30000000000000004))
    (assert (>= X_0 -1e-3))
    (assert (or (and (>= Y_0 Y_1) (<= Y_0 2.5)) (and (<= Y_1 -1))))"""
    prop = read_vnnlib(write(tmp_path / "p.vnnlib", text))
    assert prop.lower[0] == -1e-3 and prop.upper[0] == 0.30000000000000004
    (a, b), (c, e) = prop.unsafe
    np.testing.assert_array_equal(a, [[-1, 1], [1, 0]])
    np.testing.assert_array_equal(b, [0, 2.5])
    np.testing.assert_array_equal(c, [[0, 1]])
    np.testing.assert_array_equal(e, [-1])
    assert prop.violated(np.array([1.0, 0.5])) and prop.violated(np.array([9.0, -2.0]))
    assert not prop.violated(np.array([3.0, 0.5])) and not prop.violated(np.array([0.0, 0.5]))


DECLARED = "(declare-const X_0 Real)\n(declare-const Y_0 Real)\n"
BAD_FILES = {
    DECLARED + "(assert (or (<= X_0 1) (>= X_0 2)))": "disjunctions about inputs",
    DECLARED + "(assert (<= Y_0 1))": "X_0 has no finite",
    "(declare-const X_0 Real)\n(assert (<= X_0 1))": "no output",
    DECLARED + "(assert (<= X_0 1": "unbalanced",
    DECLARED + "(assert (<= X_0 one))": "expected a number",
    DECLARED + "(assert (<= (* X_0 X_0) 1))": "expected (<= A B)",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_vnnlib_files_that_cannot_be_read_are_refused_in_one_line(text, tmp_path):
    with pytest.raises(ArgumentError) as caught:
        read_vnnlib(write(tmp_path / "p.vnnlib", text))
    assert BAD_FILES[text] in str(caught.value) and "\n" not in str(caught.value)


def guarded(change):
    """A network whose compute_bounds is wrong on purpose, behind the guard."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(1, 4, 6)
    network = convert(model, x)
    original = network.compute_bounds
    network.compute_bounds = lambda *args, **kwargs: change(original(*args, **kwargs))
    install_guard(network)
    C = torch.randn(1, 2, 24)
    low, high = x - 0.05, x + 0.05
    region = ball(x, 0.05)
    region.ptb.x_L, region.ptb.x_U = low, high
    flat = torch.nn.Sequential(model, torch.nn.Flatten())
    return network, C, region, flat(x)


@verifier
def test_the_guard_turns_nan_into_unknown():
    network, C, x, _ = guarded(lambda bounds: (bounds[0] * float("nan"), bounds[1] * float("nan")))
    lower, upper = network.compute_bounds(x=(x,), C=C, method="CROWN")
    assert (lower < -1e300).all() and (upper > 1e300).all()


class Flat(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(Block(), torch.nn.Flatten(), torch.nn.Linear(24, 3))

    def forward(self, x):
        return self.inner(x)


@verifier
@pytest.mark.parametrize("norm", [np.inf, 2])
def test_the_guard_never_lets_a_bound_exceed_an_attained_value(norm):
    torch.manual_seed(0)
    model, x = Flat(), torch.randn(1, 4, 6)
    network = convert(model, x)
    sound = network.compute_bounds
    network.compute_bounds = lambda *args, **kwargs: tuple(b if b is None else b + 5 for b in sound(*args, **kwargs))
    install_guard(network)
    C = torch.randn(1, 2, 3)
    region = ball(x, 0.05, norm)
    if norm == np.inf:
        region.ptb.x_L, region.ptb.x_U = x - 0.05, x + 0.05
    with pytest.warns(UserWarning, match="unsound"):
        lower, _ = network.compute_bounds(x=(region,), C=C, method="CROWN")
    assert (lower[0] < C[0] @ model(x)[0]).all()  # below the centre: the attack moved


@verifier
def test_the_guard_leaves_the_bounds_of_an_l2_ball_alone():
    torch.manual_seed(0)
    model, x = Flat(), torch.randn(1, 4, 6)
    region, C = ball(x, 0.05, 2), torch.randn(1, 2, 3)
    plain, _ = convert(model, x).compute_bounds(x=(region,), C=C, method="CROWN")
    network = convert(model, x)
    install_guard(network)
    guarded, _ = network.compute_bounds(x=(region,), C=C, method="CROWN")
    torch.testing.assert_close(guarded, plain)


def instance(tmp_path, network_file, radius, label=None, name="p"):
    """A property around a point whose class is right (or `label`, on purpose wrong)."""
    x = np.random.default_rng(7).standard_normal((1, 4, 6)).astype(np.float32).astype(np.float64)
    best = int(scores(network_file, x).argmax())
    wrong = (best + 1) % 3
    text = vnnlib_text(x, radius, {None: best, "wrong": wrong}[label])
    return write(tmp_path / f"{name}.vnnlib", text)


@verifier
def test_true_properties_are_verified_and_false_ones_refuted(network_file, tmp_path):
    verifier = Verifier(network_file, Settings(iterations=3, rows_iterations=2))
    assert verifier.verify(instance(tmp_path, network_file, 0.01)).word == "unsat"
    for radius in (0.0, 0.01, 0.3):
        verdict = verifier.verify(instance(tmp_path, network_file, radius, "wrong"))
        assert verdict.word == "sat"
        x, y = verdict.counterexample
        prop = read_vnnlib(tmp_path / "p.vnnlib")
        assert (x >= prop.lower).all() and (x <= prop.upper).all()
        np.testing.assert_allclose(scores(network_file, x.reshape(1, 4, 6))[0], y, atol=1e-6)
        assert prop.violated(y)
    assert verifier.verify(instance(tmp_path, network_file, 1e-3), timeout=1e-9).word in ("unsat", "timeout")


@verifier
@pytest.mark.parametrize("config", ["vit.yaml", "vit_repaired.yaml"])
def test_the_command_writes_results_and_resumes(network_file, tmp_path, capsys, monkeypatch, config):
    monkeypatch.delenv("ATTN_BOUNDS_ABCROWN", raising=False)
    good = instance(tmp_path, network_file, 0.005, name="good")
    bad = instance(tmp_path, network_file, 0.005, "wrong", name="bad")
    table = write(tmp_path / "table.csv", f"{network_file.name},{good.name},20\n{network_file.name},{bad.name},20\n")
    results = tmp_path / "results"
    arguments = ["verify", "--config", str(CONFIGS / config), "--csv", str(table), "--results", str(results)]
    assert main(arguments) == 0
    assert (results / "net_good.txt").read_text().splitlines() == ["unsat"]
    lines = (results / "net_bad.txt").read_text().splitlines()
    assert lines[0] == "sat" and lines[1].startswith("((X_0 ") and lines[-1].startswith("(Y_2 ")
    with (results / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["verdict"] for row in rows] == ["unsat", "sat"] and float(rows[0]["margin_crown"]) > 0
    capsys.readouterr()
    assert main(arguments) == 0
    assert capsys.readouterr().out.count("from an earlier run") == 2
    assert not list(results.glob("*.partial"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": "general: [1"}, "not valid yaml"),
        ({"config": "- 1"}, "expected sections"),
        ({"onnx": "absent.onnx"}, "no file"),
        ({"onnx": "p.vnnlib"}, "not a valid ONNX file"),
        ({"timeout": "-1"}, "seconds > 0"),
        ({"abcrown": "."}, "complete_verifier"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_code_2(network_file, tmp_path, capsys, monkeypatch, change, message):
    monkeypatch.delenv("ATTN_BOUNDS_ABCROWN", raising=False)
    good = instance(tmp_path, network_file, 0.005)
    results = tmp_path / "results"
    config = write(tmp_path / "c.yaml", change.get("config", "general: {}\n"))
    arguments = ["verify", "--config", str(config), "--onnx", str(tmp_path / change.get("onnx", "net.onnx"))]
    arguments += ["--vnnlib", str(good), "--results", str(results)]
    for name in ("timeout", "abcrown"):
        if name in change:
            arguments += [f"--{name}", change[name]]
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and len(error.splitlines()) == 1
    assert not list(results.glob("*"))


def save_network_with(path, operator):
    """MatMul, one operator without attributes, MatMul: three inputs, three outputs."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weights = onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["input", "w"], ["a"]),
        helper.make_node(operator, ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w"], ["output"]),
    ]
    ends = [[helper.make_tensor_value_info(name, kind, ["batch", 3])] for name in ("input", "output")]
    graph = helper.make_graph(nodes, "g", *ends, [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 7
    onnx.save(model, path)


@pytest.mark.parametrize(
    ("operator", "message"), [("Celu", "cannot bound this network: celu"), ("IsInf", "cannot be converted")]
)
def test_unsupported_operators_end_in_one_line_and_exit_code_2(operator, message, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("ATTN_BOUNDS_ABCROWN", raising=False)
    save_network_with(tmp_path / "net.onnx", operator)
    prop = write(tmp_path / "p.vnnlib", vnnlib_text(np.full(3, 0.5), 0.1, 0))
    config = write(tmp_path / "c.yaml", "general: {}\n")
    arguments = ["verify", "--config", str(config), "--onnx", str(tmp_path / "net.onnx"), "--vnnlib", str(prop)]
    assert main([*arguments, "--results", str(tmp_path / "results")]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and len(error.splitlines()) == 1
    assert not list((tmp_path / "results").glob("*"))


@verifier
def test_a_disjunction_about_inputs_ends_in_exit_code_2(network_file, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("ATTN_BOUNDS_ABCROWN", raising=False)
    text = vnnlib_text(np.zeros((4, 6)), 0.1, 0) + "(assert (or (<= X_0 0.0) (>= X_0 0.05)))\n"
    prop = write(tmp_path / "p.vnnlib", text)
    config = write(tmp_path / "c.yaml", "general: {}\n")
    arguments = ["verify", "--config", str(config), "--onnx", str(network_file), "--vnnlib", str(prop)]
    assert main([*arguments, "--results", str(tmp_path / "results")]) == 2
    error = capsys.readouterr().err.strip()
    assert "disjunction" in error and len(error.splitlines()) == 1
    assert not list((tmp_path / "results").glob("*"))


@verifier
def test_the_guard_passes_on_what_holds_no_bounds():
    """The verifier's branch and bound sets up its parameters by init_alpha without computing bounds."""
    torch.manual_seed(0)
    model, x = Flat(), torch.randn(1, 4, 6)
    network = convert(model, x)
    install_guard(network)
    region = ball(x, 0.05)
    region.ptb.x_L, region.ptb.x_U = x - 0.05, x + 0.05
    C = torch.randn(1, 2, 3)
    _, _, bounds = network.init_alpha((region,), c=C, bound_upper=False)
    kept = {name: tuple(t.clone() for t in pair) for name, pair in bounds.items()}
    alphas = {node.name: node.dump_alpha() for node in network.get_enabled_opt_act()}
    again = network.init_alpha(
        (region,), c=C, bound_upper=False, interm_bounds=kept, reference_alphas=alphas, skip_bound_compute=True
    )
    assert again.keys() == bounds.keys()


@verifier
def test_token_balls_contain_the_joint_ball_and_need_a_radius():
    model, x = Flat(), torch.randn(1, 4, 6)
    C = torch.eye(3).unsqueeze(0)
    joint = convert(model, x)
    region = BoundedTensor(x, PerturbationLpNorm(norm=2, eps=0.05))
    fuse_attention(joint, guard=False)
    lower, _ = joint.compute_bounds(x=(region,), C=C, method="CROWN")
    each = convert(model, x)
    fuse_attention(each, guard=False, token_balls=True)
    with pytest.raises(RegionError, match="epsilon"):
        each.compute_bounds(x=(BoundedTensor(x, PerturbationLpNorm(norm=2, eps=0)),), C=C, method="CROWN")
    lower_each, _ = each.compute_bounds(x=(region,), C=C, method="CROWN")
    assert (lower_each < lower).all()
    moves = torch.nn.functional.normalize(torch.randn(500, 4, 6), dim=-1)  # every token on the edge of its ball
    assert (lower_each <= model(x + 0.05 * moves) + 1e-9).all()
    with pytest.raises(RegionError, match="norm"):
        each.compute_bounds(x=(ball(x, 0.05),), C=C, method="CROWN")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_are_accepted_by_the_verifiers_own_parser(path):
    checkout = os.environ.get("ATTN_BOUNDS_ABCROWN")
    if not checkout:
        pytest.skip("set ATTN_BOUNDS_ABCROWN to an alpha-beta-CROWN checkout")
    import subprocess
    import sys

    code = "import arguments, sys; arguments.Config.parse_config(['--config', sys.argv[1]], verbose=False)"
    folder = Path(checkout, "complete_verifier")
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-400:]


@vit_data
@pytest.mark.vit
@pytest.mark.slow
def test_vit_margins_of_one_pass():
    verifier = Verifier(VIT / "onnx" / "pgd_2_3_16.onnx.gz", Settings(iterations=1, rows_iterations=1, leaves=0))
    for number, floor in ((4021, 0.15), (7308, 0.15), (1159, -0.05), (388, -0.15)):
        verdict = verifier.verify(VIT / "vnnlib" / f"pgd_2_3_16_{number}.vnnlib.gz")
        assert verdict.margin_crown >= floor


@vit_data
@pytest.mark.vit
@pytest.mark.slow
@pytest.mark.parametrize("graph", ["fuse_attention", "repair_softmax"])
def test_bounds_alone_never_verify_a_vit_property_that_is_false(graph):
    """No attack and no guard here: the optimised bounds and the splits have to stay below what the centre attains."""
    verifier = Verifier(VIT / "onnx" / "pgd_2_3_16.onnx.gz", Settings(graph=graph, leaves=40), guard=False)
    for path in sorted((VIT / "vnnlib").glob("pgd_2_3_16_*.vnnlib.gz"))[:3]:
        true = read_vnnlib(path)
        centre = torch.as_tensor((true.lower + true.upper) / 2, dtype=torch.float32).reshape(verifier.shape)
        scores = verifier.module(centre)[0].detach().double().numpy()
        label = int(scores.argsort()[-2])
        rows = [(np.eye(10)[[label]] - np.eye(10)[[i]], np.zeros(1)) for i in range(10) if i != label]
        false = Property(true.lower, true.upper, rows)
        assert false.violated(scores)
        first, best, _ = verifier.margins(false, time.monotonic() + 20)
        attained = scores[label] - np.delete(scores, label)
        assert (first <= attained + 1e-4).all() and (best <= attained + 1e-4).all() and best.min() < 0


@verifier
@pytest.mark.slow
def test_a_swap_verifies_inside_the_checkout(network_file, tmp_path, capsys):
    checkout = os.environ.get("ATTN_BOUNDS_ABCROWN")
    if not checkout:
        pytest.skip("set ATTN_BOUNDS_ABCROWN to an alpha-beta-CROWN checkout")
    good = instance(tmp_path, network_file, 0.005, name="good")
    arguments = ["verify", "--config", str(CONFIGS / "vit.yaml"), "--onnx", str(network_file), "--vnnlib", str(good)]
    arguments += ["--timeout", "20", "--abcrown", checkout, "--results", str(tmp_path / "results")]
    assert main(arguments) == 0
    assert (tmp_path / "results" / "net_good.txt").read_text() == "unsat\n"
    assert "fused" in (tmp_path / "results" / "net_good.log").read_text()
