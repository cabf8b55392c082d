"""Read scikit-learn's 1,797 images of digits, resized, as rows of data."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from onward.trainer.config.sections.data import DataConfig
from onward.trainer.data.schema.columns import Array, Block, Column

DIGITS_MEAN = 0.3053
DIGITS_STD = 0.3760
"""Mean and standard deviation of all pixels, scaled to 0..1."""


def digits_block(data: DataConfig) -> Block:
    """Return scikit-learn's 1,797 digits: `image` float32 [C, S, S], resized and standardised; `label` 0..9."""
    table = _digits_table()
    images = table[:, :64]
    labels = table[:, 64]
    channels, side = data.digits_shape
    resize = _bilinear(8, side)
    pixels: Array = (images.reshape(-1, 8, 8) / 16.0 - DIGITS_MEAN) / DIGITS_STD
    pixels = (resize @ pixels @ resize.T).astype(np.float32)[:, None].repeat(channels, axis=1)
    return Block("digits", np.arange(len(labels)), {"image": pixels, "label": labels.astype(np.int64)}, unit="image")


def _digits_table() -> Array:
    """Return 64 pixels 0..16 and the label of each digit: float64 [1797, 65]."""
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin or "").parent / "datasets" / "data" / "digits.csv.gz" if package else Path()
    if file.is_file():  # read directly, because importing scikit-learn takes more than a second
        table: Array = np.loadtxt(file, delimiter=",")
        return table
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])


def digits_schema(data: DataConfig) -> dict[str, Column]:
    """Return the columns of `_digits` without reading the data."""
    channels, side = data.digits_shape
    return {
        "image": Column(name="image", dtype="float32", shape=(channels, side, side)),
        "label": Column(name="label", dtype="int64", extremes=(0, 1, 8, 9)),
    }


def _bilinear(old: int, new: int) -> Array:
    """Return the weights [new, old] of a linear interpolation between pixel centres, which are at k + 1/2."""
    centres = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return np.maximum(0.0, 1.0 - np.abs(centres[:, None] - np.arange(old)))
