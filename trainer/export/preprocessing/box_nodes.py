"""Return the boxes of a detector in pixels of the original image, by nodes behind its file.

    columns of its output         x, y, width, height, score, ...      in pixels of the model's input, or shares of it
      Add [l, t, 0, 0, 0, ...]    l, t: where the input begins in the resized image; below 0 with borders
      Mul [w, h, w, h, 1, ...]    w, h: pixels of the original for a pixel of the resized image (or its share)

Columns keep their places, and corners stay corners. What cannot be turned back is refused: places in the input that
nothing says are some would stay behind in other pixels than the boxes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.images import ImageConfig
from onward.trainer.data.images.geometry import resized_size
from onward.trainer.data.schema.columns import Array
from onward.trainer.errors import ExportRefused, UnsupportedModel
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.file_precision import OF_A_SET, WholeFile, image_size
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.model_file import ModelFile, trained_part
from onward.trainer.export.preprocessing.image_nodes import Fitting
from onward.trainer.export.served.detections import BoxColumns, EachClass, FileDetections
from onward.trainer.onnx_graph.files.index import dims_of, nodes_between
from onward.trainer.onnx_graph.node_builder import GraphExtender
from onward.trainer.onnx_graph.surgery.row_layout import rename_values
from onward.trainer.run.recorded.preprocessing_record import ImageInput

MOST_AXES = 3
"""Of an output that may hold places; those with more are maps."""


@dataclass(frozen=True)
class BoxOutput:
    """An output of a file that holds boxes in the model's input."""

    name: str
    columns: BoxColumns
    length: int
    """The number of columns."""
    is_transposed: bool = False
    """Whether the columns are the last axis but one."""

    def in_original(self, result: Array, old: Sequence[int], how: ImageInput) -> Array:
        """Return the output in pixels of an original of `old` pixels (height, width), without nodes."""
        # the colour of borders moves nothing
        config = ImageConfig(resize="corner_grey" if how.is_in_corner else how.resize, crop_ratio=how.crop_ratio)
        new, begin = resized_size((old[0], old[1]), (how.height, how.width), config)
        starts, scales, others = self._by_column(how)
        rows = np.swapaxes(result, -1, -2) if self.is_transposed else result
        found = (rows + begin[::-1] @ starts) * (np.divide(old, new)[::-1] @ scales + others)
        return np.swapaxes(found, -1, -2) if self.is_transposed else found

    def add_nodes(self, how: ImageInput, raw: str, graph: onnx.GraphProto) -> None:
        """Turn the output back, in place. raw: the pixels of any size, uint8 [N, H, W, C]."""
        nodes = GraphExtender(graph)
        (kind,) = (value.type.tensor_type.elem_type for value in graph.output if value.name == self.name)
        inside = nodes.free(f"{self.name}.in_input")
        rename_values(graph, {self.name: inside})
        # in double, as the size of the resized image is computed
        begin, factors = Fitting(how, nodes).begin_and_factors(raw)
        starts, scales, others = (
            nodes.op("Constant", value=numpy_helper.from_array(each)) for each in self._by_column(how)
        )
        vectors = nodes.op("MatMul", begin, starts), nodes.op("Add", nodes.op("MatMul", factors, scales), others)
        value = nodes.op("Cast", inside, to=TensorProto.FLOAT)
        for operator, vector in zip(("Add", "Mul"), vectors, strict=True):
            vector = nodes.op("Cast", vector, to=TensorProto.FLOAT)
            if self.is_transposed:
                vector = nodes.op("Reshape", vector, nodes.constant([-1, 1]))
            value = nodes.op(operator, value, vector)
        # of the type that the file declares
        nodes.op("Cast", value, output=self.name, to=kind)

    def _by_column(self, how: ImageInput) -> tuple[Array, Array, Array]:
        """Return by column what the place where the input begins is multiplied by, and the factors, double [2, columns]
        (x and y); and the factors of columns that are no places [columns]."""
        unit = np.array([[how.width], [how.height]]) if self.columns.in_shares else np.ones((2, 1))
        first = self.columns.first
        places = np.zeros((2, self.length))
        places[:, first : first + 4] = np.tile(np.eye(2), 2)
        starts = places / unit
        if self.columns.is_centred:
            starts[:, first + 2 :] = 0  # width and height begin nowhere
        return starts, places * unit, 1 - places.sum(0)


def box_outputs(
    file: ModelFile, losses: Sequence[LossConfig], data: EvaluationData, box_column: str
) -> list[BoxOutput]:
    """Return the outputs that hold the boxes of a trained detector; [] where no loss is one of boxes.

    box_column: the column of boxes; "" = there is none. Raises ExportRefused for places in the image whose form is not
    known.
    """
    found = list[BoxOutput]()
    for loss in losses:
        if loss.is_own and box_column in loss.columns:
            raise ExportRefused(f"how the file holds boxes is not known of a loss of your own ({loss.file})")
        if loss.rule.labels == "objects":
            found.append(_of_grid(file, loss, data) if loss.rule.has_grid else _of_set(file, loss))
    return list(dict.fromkeys(found))


def _of_set(file: ModelFile, loss: LossConfig) -> BoxOutput:
    graph, name = file.proto.graph, loss.outputs[1]
    if name not in {value.name for value in graph.output}:
        raise ExportRefused(
            f"the boxes {name!r} of {loss.name} are inside the file, and what its outputs hold is not known"
        )
    for value in graph.output:
        if value.name in loss.outputs:
            continue
        # made from the boxes, or boxes of another layer
        is_behind = name in nodes_between(graph, [value.name], set())[1]
        if is_behind or (dims_of(value) or [0])[-1] == 4:
            raise ExportRefused(f"output {value.name!r} may hold boxes beside {name!r}, in a form that is not known")
    return BoxOutput(name, OF_A_SET, 4)


def _of_grid(file: ModelFile, loss: LossConfig, data: EvaluationData) -> BoxOutput:
    assert data.model
    with tempfile.TemporaryDirectory(prefix="onward-boxes-") as folder:
        part = OnnxRunner(trained_part(file.proto, file.path, Path(folder), data.model), data)
        try:
            # random raw outputs go through the end of the file, as for file/map
            whole = WholeFile(file, part, data, loss)
            batch = next(iter(data.batches()))
            detections = whole.recognise(batch, image_size(batch.inputs))
        except UnsupportedModel as error:
            raise ExportRefused(f"boxes cannot be brought to the original image: {error}") from error
        results = whole.outputs(batch, 0)
    if problem := "; ".join(_not_understood(detections, whole.names, results, loss)):
        raise ExportRefused(f"boxes cannot be brought to the original image: {problem}")
    table, columns = detections.boxes
    return BoxOutput(whole.names[table.output], columns, table.rows(results).shape[1], table.is_transposed)


def _not_understood(found: FileDetections, names: list[str], results: list[Array], loss: LossConfig) -> Iterator[str]:
    """Yield a sentence for everything beside the boxes that may hold places in the image."""
    table, columns = found.boxes
    beside = found.beside
    if isinstance(beside, EachClass):
        first = beside.first - loss.rule.background
        known = {(beside.table, column) for column in range(first, beside.first + found.num_classes)}
        known |= {beside.factor} if beside.factor else set()
    else:
        known = {beside.score, *([beside.of_class] if beside.of_class else [])}
    # key points, masks and boxes of a tracker would stay in the input
    understood = {table.output, *(other.output for other, _ in known)}
    if found.choice:
        understood.add(found.choice.table.output)
    if others := set(found.with_boxes) - {table.output}:
        yield f"{', '.join(repr(names[place]) for place in sorted(others))} hold boxes as well"
    own = {column for other, column in known if other.output == table.output}
    own |= set(range(columns.first + 4))
    if strange := set(range(table.rows(results).shape[1])) - own:
        yield f"what the columns {min(strange)} to {max(strange)} of {names[table.output]!r} hold is not known"
    for place, result in enumerate(results):
        if place not in understood and np.issubdtype(result.dtype, np.floating) and 1 < result.ndim <= MOST_AXES:
            yield f"what output {names[place]!r} holds is not known"
