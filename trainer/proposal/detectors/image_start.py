"""Find where the training of a detector begins whose file makes a batch of one of its input, an image without a batch.

    input [3, H, W] --- Sub, Div --- Resize, Pad --- Unsqueeze --- start [1, 3, H', W'] --- Conv --- ...

as torchvision exports its detectors. Behind `start` any number of images is computed alike: so the training feeds it,
with pixels that are normalised as the nodes before it do, and the exported file keeps these nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from onward.trainer.data.schema.columns import Array
from onward.trainer.onnx_graph.files.index import nodes_between
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.files.parts import part_between

TOLERANCE = 1e-3


@dataclass(frozen=True)
class ImageStart:
    """The batch of one image that the first layer reads."""

    name: str
    size: tuple[int, int]
    """Height and width."""
    filled: tuple[int, int]
    """Width and height of the image in it; beside and below it is padding."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """The batch is (pixels of the input - mean) / std, for each channel; () if that is not so, or changes nothing."""


def find_image_start(
    model: onnx.ModelProto, names: Sequence[str], image: onnx.ValueInfoProto, shape: Sequence[int], folder: Path
) -> ImageStart | None:
    """Return the tensor that the first convolution on the way to tensors of these names reads, if it is an image.

    shape: [channels, height, width] of the input. None if the tensors are computed from the input beside it, too. Runs
    the nodes before it on images of one value, and raises the errors of onnxruntime.
    """
    nodes, _ = nodes_between(model.graph, names, set())
    name = next((node.input[0] for node in nodes if node.op_type == "Conv"), "")
    _, needed = nodes_between(model.graph, names, {name})
    if not name or image.name in needed:
        return None
    session = open_session(part_between(model, [name], ()), base=folder)
    values = (0.0, 0.5, 1.0)
    black, grey, white = (session.run(None, {image.name: np.full(shape, v, np.float32)})[0] for v in values)
    # parts of an image side by side are more channels
    if black.ndim != 4 or black.shape[:2] != (1, shape[0]):
        return None
    rows, columns = np.nonzero(np.abs(white - black).max((0, 1)))
    if not len(rows):
        return None
    size = (black.shape[2], black.shape[3])
    middle = rows.max() // 2, columns.max() // 2
    mean, std = _normalisation(*(batch[0, :, *middle].astype(np.float64) for batch in (black, grey, white)))
    return ImageStart(name, size, (int(columns.max()) + 1, int(rows.max()) + 1), mean, std)


def _normalisation(black: Array, grey: Array, white: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std of each channel, from what 0, 0.5 and 1 become; () and () if there are none."""
    slope = white - black
    is_linear = bool((slope > 0).all()) and np.allclose(2 * grey, black + white, atol=TOLERANCE * slope.max())
    is_unchanged = np.allclose(black, 0.0, atol=TOLERANCE) and np.allclose(slope, 1.0, atol=TOLERANCE)
    if not is_linear or is_unchanged:
        return (), ()
    return _rounded(-black / slope), _rounded(1 / slope)


def _rounded(values: Array) -> tuple[float, ...]:
    """Return numbers with the digits that a computation in fp32 leaves."""
    return tuple(float(f"{value:.5g}") + 0.0 for value in values)
