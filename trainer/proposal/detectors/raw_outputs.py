"""Find the raw outputs of a detector with a grid: the results of its last convolutions, before boxes are decoded.

trunk --- Conv [1, 64, 40, 40] --.
      '-- Conv [1, 20, 40, 40] ---+--- decode, NonMaxSuppression --- boxes, scores        the file
      '-- Conv [1, 64, 20, 20] ---'
      '-- Conv [1, 20, 20, 20] --'    |  the end of the file alone, which is run on raw outputs of any values
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from onward.trainer.data.schema.columns import Array
from onward.trainer.data.schema.detection_grids import grids_of
from onward.trainer.onnx_graph.files.external_ranges import array_of
from onward.trainer.onnx_graph.files.index import Index, dims_of, names_read, nodes_between, nodes_of
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.graph_parts import part_between
from onward.trainer.onnx_graph.outputs import is_numeric
from onward.trainer.onnx_graph.surgery.selections import LAYERS

OPEN_SIDE = 320
"""Pixels of an input whose size the file leaves open."""
SSD300 = (8.0, 16.0, 32.0, 64.0, 100.0, 300.0)
"""The strides of SSD on 300 pixels: its last convolutions have no padding."""
MOST_RAW = 40
MOST_ROLES = 3


@dataclass(frozen=True)
class Level:
    """The raw outputs of one size of grid, in the order of the file."""

    names: tuple[str, ...]
    channels: tuple[int, ...]
    height: int
    width: int


@dataclass(frozen=True)
class RawOutputs:
    """The raw outputs of a file, and what it computes from them."""

    levels: tuple[Level, ...]
    """The one of the most cells first; all have equally many tensors."""
    strides: tuple[tuple[float, ...], ...]
    """What may be the strides of the levels, in pixels of the input: powers of 2, those of SSD300, or the sides divided
    by the cells."""
    size: tuple[int, int]
    """Width and height of the image that the first layer reads, without what the file pads it with."""
    of_input: tuple[int, ...]
    """Height and width of the input, whose pixels those of the boxes are."""
    start: ImageStart | None
    """Where the file makes a batch of its input [channels, height, width]; None if the input is one."""
    end: onnxruntime.InferenceSession
    """The part of the file behind the raw outputs."""
    fed: Mapping[str, Array]
    """Inputs of the file that its end reads too, as for their shapes."""
    operators: frozenset[str]
    """Of the end."""

    @property
    def scale(self) -> tuple[float, float]:
        """Pixels of the first layer for each pixel of the input, in x and y."""
        return self.size[0] / self.of_input[1], self.size[1] / self.of_input[0]

    def run(self, raw: Mapping[str, Array]) -> list[Array]:
        """Return the outputs of the file for raw outputs [1, channels, height, width] of these values."""
        return list(self.end.run(None, {**self.fed, **raw}))

    @property
    def described(self) -> str:
        """The levels for messages."""
        lines = []
        for level, stride in zip(self.levels, self.strides[0], strict=True):
            named = (f"{name!r} with {number}" for name, number in zip(level.names, level.channels, strict=True))
            lines.append(f"stride {stride:g}: {', '.join(named)} channels")
        return "; ".join(lines)


def find_raw_outputs(model: onnx.ModelProto, folder: Path) -> RawOutputs | None:
    """Return the raw outputs of a file whose only input is an image; None if it has none in levels.

    folder: where its external data is. Runs the file once.
    """
    image = image_input(model)
    if image is None:
        return None
    names = _last_layers(model, folder)
    # a file of many branches is no detector with a few levels
    if not 0 < len(names) <= MOST_RAW:
        return None
    feed = _random_image(image)
    shape = feed[image.name].shape
    try:
        start = find_image_start(model, names, image, shape, folder) if len(shape) == 3 else None
        results = open_session(part_between(model, names, ()), base=folder).run(names, feed)
        behind = part_between(model, [value.name for value in model.graph.output], names)
        end = open_session(behind, base=folder)
    except Exception:  # onnxruntime's errors have no common base class: `onward doctor` says why it does not run
        return None
    # tensors of one size of grid are one level
    levels = _levels(names, results)
    height, width = start.size if start else shape[-2:]
    read = {value.name for value in end.get_inputs()}
    kept = {name: value for name, value in feed.items() if name in read}
    cells = [(level.height, level.width) for level in levels]
    shares = tuple(width / level.width for level in levels)
    # convolutions with a stride of 2 round up
    powers = tuple(2.0 ** math.ceil(math.log2(share)) for share in shares)
    fitting = [each for each in (powers, SSD300, shares) if grids_of((height, width), each) == cells]
    strides = tuple(dict.fromkeys(fitting)) or (shares,)
    size = start.filled if start else (width, height)
    operators = frozenset(node.op_type for node in nodes_of(behind.graph))
    return RawOutputs(levels, strides, size, shape[-2:], start, end, kept, operators) if levels else None


def measured_shapes(model: onnx.ModelProto, names: Sequence[str], folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of outputs for one image, by running a file whose only input is images; {} if it has others."""
    image = image_input(model)
    if image is None:
        return {}
    try:
        results = open_session(model, base=folder).run(list(names), _random_image(image))
    except Exception:  # as in `find_raw_outputs`
        return {}
    return {name: value.shape for name, value in zip(names, results, strict=True)}


def image_input(model: onnx.ModelProto) -> onnx.ValueInfoProto | None:
    """Return the only input of a file, an image with or without an axis of the batch; None if it has others."""
    stored = Index(model.graph).stored
    fed = [value for value in model.graph.input if value.name not in stored]
    is_image = len(fed) == 1 and len(dims_of(fed[0]) or ()) in (3, 4)
    return fed[0] if is_image else None


def _random_image(image: onnx.ValueInfoProto) -> dict[str, Array]:
    dims = dims_of(image)
    assert dims
    # a size that the file leaves open may be any
    sides = [side or OPEN_SIDE for side in dims[-2:]]
    # without an axis of the batch the file makes a batch of one
    shape = (*(1,) * (len(dims) - 3), dims[-3] or 3, *sides)
    return {image.name: np.random.default_rng(0).random(shape).astype(np.float32)}


def _last_layers(model: onnx.ModelProto, folder: Path) -> list[str]:
    """Return the results of the layers from which the outputs are computed, in the order of the file."""
    index = Index(model.graph)
    found = set[str]()
    seen = set[str]()
    names = [value.name for value in model.graph.output if is_numeric(value)]
    while names:
        name = names.pop()
        node = index.makers.get(name)
        if node is None or name in seen:
            continue
        seen.add(name)
        if node.op_type in LAYERS and not _is_mean_of_bins(node, index, folder):
            found.add(_after_relu(name, index, seen))
        elif node.op_type != "Shape":  # the grid is made from the shapes of layers, which predict nothing
            names += names_read(node)
    return [name for name in index.makers if name in found]


def _is_mean_of_bins(node: onnx.NodeProto, index: Index, folder: Path) -> bool:
    """Return whether a layer multiplies probabilities by 0, 1, 2, ...: the decoding of distributions of distances."""
    # such a layer is a convolution of one output, or a product, with a stored weight
    tensor = index.stored.get(node.input[1]) if len(node.input) > 1 else None
    if tensor is None or max(tensor.dims, default=0) > 64:
        return False
    values = array_of(tensor, folder).flatten()
    return len(values) == max(tensor.dims) and np.array_equal(values, np.arange(len(values)))


def _after_relu(name: str, index: Index, seen: set[str]) -> str:
    """Return the result of the Relu behind a layer, where the outputs are computed from that alone."""
    # `seen` has what the outputs are computed from, so readers elsewhere do not count
    behind = [made for made in seen if name in index.makers[made].input]
    is_relu = len(behind) == 1 and index.makers[behind[0]].op_type == "Relu"
    return behind[0] if is_relu else name


def _levels(names: Sequence[str], results: Sequence[Array]) -> tuple[Level, ...]:
    """Return the raw outputs by size of grid; () if they are no such outputs."""
    if any(value.ndim != 4 or len(value) != 1 for value in results):
        return ()
    by_size: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for name, value in zip(names, results, strict=True):
        by_size.setdefault(value.shape[2:], []).append((name, value.shape[1]))
    if len({len(members) for members in by_size.values()}) != 1 or len(next(iter(by_size.values()))) > MOST_ROLES:
        return ()
    levels = []
    for height, width in sorted(by_size, reverse=True):
        own_names, channels = zip(*by_size[height, width], strict=True)
        levels.append(Level(own_names, channels, height, width))
    return tuple(levels)


# -- find where the training of a detector begins whose file makes a batch of one of its input, an image without a batch
#
#     input [3, H, W] --- Sub, Div --- Resize, Pad --- Unsqueeze --- start [1, 3, H', W'] --- Conv --- ...
#
# as torchvision exports its detectors. Behind `start` any number of images is computed alike: so the training feeds it,
# with pixels that are normalised as the nodes before it do, and the exported file keeps these nodes.

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
