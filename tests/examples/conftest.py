"""The shipped digits as MNIST's own files."""

import datasets
import pytest
from short_runs import write_idx


@pytest.fixture
def digits(tmp_path):
    """The shipped real digits as the four files of MNIST: 96 to train on, 40 to test."""
    images, labels = datasets.shipped_digits()
    images = (images * 255).round().numpy()
    folder = tmp_path / "mnist"
    folder.mkdir()
    for split, rows in (("train", slice(0, 96)), ("t10k", slice(96, 136))):
        write_idx(folder / f"{split}-images-idx3-ubyte.gz", images[rows])
        write_idx(folder / f"{split}-labels-idx1-ubyte.gz", labels[rows].numpy())
    return folder
