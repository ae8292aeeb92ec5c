from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from attn_bounds.errors import ArgumentError, MissingDependencyError, ModelLoadError, NotFiniteError, ShapeError
from attn_bounds.ntk import from_arrays, load_data
from attn_bounds.ntk.data import encode_labels


def test_digits_and_classes_of_it() -> None:
    data = load_data("digits")
    assert data.X.shape == (1797, 64) and float(data.X.max()) == 1.0 and len(data.classes) == 10
    pair = load_data("digits:3,8")
    assert pair.classes == ("3", "8") and len(pair.X) == 357
    assert torch.equal(pair.X, data.X[(data.y == 3) | (data.y == 8)])
    assert len(load_data("digits", limit=50).X) == 50
    with pytest.raises(ArgumentError, match="classes: expected at least two of"):
        load_data("digits:3,x")


def test_split_is_disjoint_and_reproducible(digits) -> None:
    a, b = digits.split(100, 50, 3), digits.split(100, 50, 3)
    assert torch.equal(a.X, b.X) and not torch.equal(a.X, digits.split(100, 50, 4).X)
    assert float(torch.cdist(a.X, a.X_test).min()) > 0
    torch.testing.assert_close(a.Y.sum(1), torch.zeros(100).double())
    for n, t in ((1, 5), (1797, 1), (5, 0)):
        with pytest.raises(ArgumentError, match="n: expected"):
            digits.split(n, t)


def test_labels_are_encoded() -> None:
    assert encode_labels(torch.tensor([0, 1]), 2).tolist() == [[-1.0], [1.0]]
    assert encode_labels(torch.tensor([2]), 4).tolist() == [[-0.25, -0.25, 0.75, -0.25]]
    with pytest.raises(ArgumentError, match="two classes"):
        encode_labels(torch.tensor([0]), 1)


@pytest.mark.parametrize(
    ("X", "y", "error", "names"),
    [
        (np.ones((1, 3)), [0], ShapeError, "X: expected at least 2 rows"),
        (np.eye(3), [1, 1, 1], ArgumentError, "two classes"),
        (np.eye(3), [0, 1], ArgumentError, "one label for each of 3"),
        (np.full((2, 2), np.nan), [0, 1], NotFiniteError, "X: expected finite"),
        (np.eye(2), [0.0, np.nan], ArgumentError, "y: expected class labels, got NaN"),
        (np.random.default_rng(0).normal(size=(30, 2)), np.arange(30) / 7, ArgumentError, "different values"),
        (np.array([["a", "b"], ["c", "d"]]), [0, 1], ArgumentError, "X: expected numbers"),
    ],
)
def test_bad_arrays(X, y, error, names) -> None:
    with pytest.raises(error, match=names):
        from_arrays(X, y)


def test_one_class_in_the_training_part_is_refused() -> None:
    data = from_arrays(np.arange(40.0).reshape(20, 2), [0] * 19 + [1])
    seed = next(s for s in range(50) if 19 not in np.random.default_rng(s).permutation(20)[:10])
    with pytest.raises(ArgumentError, match="all of one class"):
        data.split(10, 5, seed)


def test_npz(tmp_path) -> None:
    rng = np.random.default_rng(0)
    images, y = rng.integers(0, 256, (12, 4, 4)).astype(np.uint8), np.arange(12) % 3
    np.savez(tmp_path / "a.npz", x_train=images, y_train=y)
    data = load_data(tmp_path / "a.npz")
    assert data.X.shape == (12, 16) and data.classes == ("0", "1", "2")
    torch.testing.assert_close(data.X, torch.tensor(images.reshape(12, 16) / 255.0))
    single = rng.normal(size=(12, 5)).astype(np.float32)
    np.savez(tmp_path / "b.npz", X=single, y=np.array(["u", "v"] * 6))
    assert load_data(str(tmp_path / "b.npz") + ":u,v").classes == ("u", "v")
    assert load_data(tmp_path / "b.npz").X.dtype == torch.float64
    np.savez(tmp_path / "c.npz", images=images)
    with pytest.raises(ModelLoadError, match="holds images; expected arrays X and y"):
        load_data(tmp_path / "c.npz")
    (tmp_path / "d.npz").write_bytes(b"no zip")
    with pytest.raises(ModelLoadError, match="cannot read"):
        load_data(tmp_path / "d.npz")
    with pytest.raises(ModelLoadError, match="cannot read"):
        load_data(tmp_path / "absent.npz")
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_data(tmp_path / "absent")


def test_folders_need_torchvision(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(MissingDependencyError, match="pip install torchvision"):
        load_data(tmp_path)


class _Set:
    """What torchvision's data sets offer of themselves, as far as it is used."""

    def __init__(self, root, train, download) -> None:
        assert train and not download
        rng = np.random.default_rng(0)
        self.data = torch.as_tensor(rng.integers(0, 256, (9, 5, 5)).astype(np.uint8))
        self.targets = [0, 1, 2] * 3


class _Broken:
    def __init__(self, root, train, download) -> None:
        raise RuntimeError("Dataset not found or corrupted.")


class _Folder:
    def __init__(self, root, transform) -> None:
        from pathlib import Path

        self.classes = sorted(p.name for p in Path(root).iterdir() if p.is_dir())
        if not self.classes:
            raise FileNotFoundError(f"Couldn't find any class folder in {root}.")
        self.items = [(i, k) for k in range(len(self.classes)) for i in range(4)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int):
        i, k = self.items[index]
        return torch.full((3, 4, 4), (i + 10 * k) / 20.0), k


@pytest.fixture
def torchvision(monkeypatch) -> types.ModuleType:
    """A stand-in with torchvision's interface, where the package itself is not installed."""
    module = types.ModuleType("torchvision")
    module.datasets = types.SimpleNamespace(MNIST=_Set, CIFAR10=_Broken, CIFAR100=_Broken, ImageFolder=_Folder)
    _Set.__name__ = "MNIST"
    module.transforms = types.SimpleNamespace(Compose=list, Resize=lambda size: size, ToTensor=lambda: None)
    monkeypatch.setitem(sys.modules, "torchvision", module)
    return module


def test_folders(tmp_path, torchvision) -> None:
    (tmp_path / "m" / "MNIST").mkdir(parents=True)
    data = load_data(tmp_path / "m")
    assert data.name == "mnist" and data.X.shape == (9, 25) and float(data.X.max()) <= 1.0
    (tmp_path / "c" / "cifar-10-batches-py").mkdir(parents=True)
    with pytest.raises(ModelLoadError, match="incomplete"):
        load_data(tmp_path / "c")
    for name in ("cat", "dog"):
        (tmp_path / "i" / "train" / name).mkdir(parents=True)
    images = load_data(tmp_path / "i")
    assert images.X.shape == (8, 48) and images.classes == ("cat", "dog")
    assert len(load_data(tmp_path / "i", limit=6).X) == 6
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match="holds neither MNIST"):
        load_data(tmp_path / "empty")
