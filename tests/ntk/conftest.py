from __future__ import annotations

import pytest
import torch

from attn_bounds.ntk.data import Dataset, load_data


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load_data("digits")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
