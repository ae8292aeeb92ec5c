"""Data sets: scikit-learn digits (embedded), .npz files, and MNIST, CIFAR or image folders already on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_bounds.errors import ArgumentError, MissingDependencyError, ModelLoadError
from attn_bounds.ntk._arrays import ArrayLike, matrix, whole


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Inputs X (n, d) float64, pixels in [0, 1] where they are pixels; labels y (n,) as class indices 0..classes-1."""

    name: str
    X: Tensor
    y: Tensor
    classes: tuple[str, ...]

    def subset(self, *labels: str) -> Dataset:
        """Keep the examples of the named classes only."""
        unknown = [label for label in labels if label not in self.classes]
        if unknown or len(labels) < 2:
            raise ArgumentError(f"classes: expected at least two of {', '.join(self.classes)}, got {', '.join(labels)}")
        where = torch.tensor([self.classes.index(label) for label in labels])
        rows = torch.isin(self.y, where)
        index = (self.y[rows][:, None] == where[None, :]).long().argmax(1)
        return Dataset(f"{self.name} {' vs '.join(labels)}", self.X[rows], index, tuple(labels))

    def split(self, train: int, test: int, seed: int = 0) -> Split:
        """Draw `train` and `test` different examples at random.

        Errors: ArgumentError if there are not enough examples or the training labels are all of one class.
        """
        if train < 2 or test < 1 or train + test > len(self.X):
            raise ArgumentError(
                f"n: expected >= 2 training and >= 1 test examples, at most {len(self.X)} together; got {train}, {test}"
            )
        order = torch.as_tensor(np.random.default_rng(seed).permutation(len(self.X)))
        a, b = order[:train], order[train : train + test]
        Y = encode_labels(self.y, len(self.classes))
        if len(self.y[a].unique()) < 2:
            raise ArgumentError(
                f"y: the {train} training labels are all of one class; pass more examples or both classes"
            )
        return Split(self.X[a], Y[a], self.y[a], self.X[b], Y[b], self.y[b])

    def to(self, device: str | torch.device) -> Dataset:
        """Return the same data on `device`."""
        return dataclasses.replace(self, X=self.X.to(device), y=self.y.to(device))


@dataclasses.dataclass(frozen=True)
class Split:
    """Training and test inputs, targets (n, outputs) and labels (n,)."""

    X: Tensor
    Y: Tensor
    y: Tensor
    X_test: Tensor
    Y_test: Tensor
    y_test: Tensor


def encode_labels(y: Tensor, classes: int) -> Tensor:
    """Encode class indices as regression targets: two classes -1 and +1 in one column, more one-hot minus 1/classes."""
    if classes < 2:
        raise ArgumentError(f"y: expected labels of at least two classes, got {classes}")
    if classes == 2:
        return (2.0 * y.double() - 1)[:, None]
    return torch.nn.functional.one_hot(y, classes).double() - 1 / classes


def from_arrays(X: ArrayLike, y: ArrayLike, name: str = "data") -> Dataset:
    """Build a Dataset from arrays: X (n, ...) is flattened; y (n,) may hold any labels, at least two different ones."""
    try:
        array = X if isinstance(X, Tensor) else np.asarray(X)
        names = np.asarray(y.cpu() if isinstance(y, Tensor) else y).reshape(-1)
    except ValueError as error:
        raise ArgumentError(f"X, y: expected rows of equal length, got a ragged list ({error})") from error
    flat = array.reshape(len(array), -1) if array.ndim > 2 and len(array) else array
    data = matrix("X", flat, min_rows=2)
    labels, index = np.unique(names, return_inverse=True)
    if len(index) != len(data):
        raise ArgumentError(f"y: expected one label for each of {len(data)} examples, got {len(index)}")
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        raise ArgumentError("y: expected class labels, got NaN or infinity")
    if len(labels) < 2:
        raise ArgumentError(f"y: expected labels of at least two classes, got only {labels[0]}")
    if len(labels) == len(data) > 20:
        raise ArgumentError(f"y: expected class labels, got {len(labels)} different values for as many examples")
    return Dataset(name, data, torch.as_tensor(index).to(data.device), tuple(str(v) for v in labels))


def load_data(source: str | Path, *, limit: int | None = None, image_size: int = 32, seed: int = 0) -> Dataset:
    """Load "digits", an .npz file, or a folder with MNIST, CIFAR-10/100 or class folders of images.

    - "digits": 1797 handwritten digits of 64 pixels that scikit-learn ships, scaled to [0, 1].
    - FILE.npz: arrays X (n, ...) and y (n,), or x_train and y_train. Integer X with maximum 255 is scaled to [0, 1].
    - FOLDER, through torchvision and never downloaded: holding MNIST/raw, cifar-10-batches-py or cifar-100-python as
      torchvision lays them out; else FOLDER or FOLDER/train with one folder of images per class, resized to image_size.
    Append ":3,8" to keep these classes only. limit: at most this many examples, drawn at random with `seed`.
    Errors: ModelLoadError (nothing there, or not readable), MissingDependencyError (torchvision), ArgumentError.
    """
    if limit is not None:
        whole("limit", limit, 2)
    text, _, classes = str(source).partition(":") if not Path(str(source)).exists() else (str(source), "", "")
    if text == "digits":
        from sklearn.datasets import load_digits

        X, y = load_digits(return_X_y=True)
        data = from_arrays(X / 16.0, y, "digits")
    elif text.endswith(".npz"):
        data = _from_npz(Path(text))
    else:
        data = _from_folder(Path(text), limit, image_size, seed)
    if classes:
        data = data.subset(*[c.strip() for c in classes.split(",")])
    if limit is not None and limit < len(data.X):
        rows = torch.as_tensor(np.random.default_rng(seed).permutation(len(data.X))[:limit])
        data = dataclasses.replace(data, X=data.X[rows], y=data.y[rows])
    return data


def _scaled(X: np.ndarray) -> np.ndarray:
    return X / 255.0 if X.dtype == np.uint8 else X


def _from_npz(path: Path) -> Dataset:
    try:
        with np.load(path, allow_pickle=False) as file:
            for names in (("X", "y"), ("x_train", "y_train")):
                if all(name in file for name in names):
                    return from_arrays(_scaled(file[names[0]]), file[names[1]], path.stem)
            raise ModelLoadError(
                f"data: {path} holds {', '.join(file.files)}; expected arrays X and y (or x_train, y_train)"
            )
    except (OSError, ValueError) as error:
        if isinstance(error, ArgumentError | ModelLoadError):
            raise
        raise ModelLoadError(f"data: cannot read {path} ({error})") from error


def _from_folder(root: Path, limit: int | None, image_size: int, seed: int) -> Dataset:
    if not root.is_dir():
        raise ModelLoadError(f"data: expected digits, a .npz file or a folder, got {str(root)!r}, which does not exist")
    try:
        from torchvision import datasets, transforms
    except (ImportError, RuntimeError) as error:  # RuntimeError: a build of torchvision for another torch
        raise MissingDependencyError(
            f"data: reading the folder {root} needs torchvision (pip install torchvision, built for this torch), "
            f"or pass an .npz with X and y ({error})"
        ) from error
    layouts: dict[str, Any] = {
        "MNIST": datasets.MNIST,
        "cifar-10-batches-py": datasets.CIFAR10,
        "cifar-100-python": datasets.CIFAR100,
    }
    for folder, loader in layouts.items():
        if (root / folder).is_dir():
            try:
                found = loader(str(root), train=True, download=False)
            except RuntimeError as error:
                raise ModelLoadError(f"data: {root / folder} is incomplete ({error})") from error
            return from_arrays(_scaled(np.asarray(found.data)), np.asarray(found.targets), loader.__name__.lower())
    folder_root = root / "train" if (root / "train").is_dir() else root
    resize = transforms.Compose([transforms.Resize((image_size, image_size)), transforms.ToTensor()])
    try:
        images = datasets.ImageFolder(str(folder_root), transform=resize)
    except (FileNotFoundError, RuntimeError) as error:
        raise ModelLoadError(
            f"data: {root} holds neither MNIST, cifar-10-batches-py, cifar-100-python nor image folders ({error})"
        ) from error
    order = np.random.default_rng(seed).permutation(len(images))[: limit or len(images)]
    pairs = [images[int(i)] for i in order]
    names = [images.classes[label] for _, label in pairs]
    return from_arrays(torch.stack([image for image, _ in pairs]), names, root.name)
