"""Put the preprocessing of training in front of an exported file, as ONNX nodes: it then takes raw numbers and pixels.

    image   uint8 [N, H, W, 3]   --Cast, Mul, Sub, Div, Gather, Transpose-->   x float32 [N, 3, H, W]   -->  the file
    a, b    double [N] each      --Where(IsNaN), Log, Sub, Div, Concat------>   x float32 [N, 2]        -->  the file

Images are resized before: ONNX's Resize rounds otherwise than Pillow. Raw inputs have the names of the columns, with _2
behind where the graph has a tensor of that name. Inputs without preprocessing stay. The trained file itself is not
changed; this is a second one, whose outputs on evaluation rows are compared with those of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.config.run_config import RunConfig
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.columns import Array
from onward.trainer.data.images.decoding import decode_image
from onward.trainer.data.images.geometry import fitted_image
from onward.trainer.data.images.image_computer import pixels_of
from onward.trainer.data.images.image_inputs import image_inputs
from onward.trainer.data.reading import sources
from onward.trainer.data.signature import Signature, read_training_signature
from onward.trainer.data.storage.shards import ShardManifest, Shards, open_shards
from onward.trainer.errors import ExportRefused
from onward.trainer.export.model_file import ModelFile
from onward.trainer.export.onnx_runner import relative_difference
from onward.trainer.export.preprocessing import describe
from onward.trainer.export.variants import latency_ratio
from onward.trainer.onnx_graph.builder import GraphExtender
from onward.trainer.onnx_graph.onnxruntime_session import open_session
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.preprocessing_record import ImageInput, Preprocessing, TableColumn, TableInput
from onward.trainer.run.records import ExportedModel, read_record

LEAST_OPSET = 9
"""The first with IsNaN and Where."""
COMPARED_ROWS = 64


def write_with_preprocessing(run: RunDir, exported: ExportedModel, target: Path) -> tuple[float, float]:
    """Write the file with its preprocessing to `target`; return (greatest relative difference on evaluation rows, its
    time for them over that of the file without).

    Raises ExportRefused when the preprocessing cannot be written as nodes, or the outputs differ by more than
    `export.tolerance`.
    """
    config, signature = read_config(run), read_training_signature(read_config(run).model)
    manifest = read_record(run.shards / "manifest.json", ShardManifest)
    recipe = describe(config, manifest, signature, exported)
    model = ModelFile.read(exported.path).with_external_data()
    names = add_preprocessing(model, recipe)
    target.write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(target), full_check=True)
    held_out = open_shards(run.shards, "evaluation")
    numbers = np.arange(min(COMPARED_ROWS, held_out.num_rows))
    raw = dict(_raw_values(names, recipe, config, signature, held_out, numbers))
    batch = one_batch(held_out, config, signature, numbers)
    given = {info.name: tensor.numpy() for info, tensor in zip(signature.inputs, batch.inputs, strict=True)}
    sessions = [open_session(path) for path in (exported.path, target)]
    feeds = [_fed(session, given | raw) for session in sessions]
    results = [session.run(None, feed) for session, feed in zip(sessions, feeds, strict=True)]
    parity = max(relative_difference(ours, theirs)[0] for ours, theirs in zip(*results, strict=True))
    if not parity <= config.export.tolerance:
        raise ExportRefused(
            f"with its preprocessing the file differs by {parity:.3g} from the one without on {len(numbers)} rows, "
            f"above export.tolerance {config.export.tolerance:g}"
        )
    return parity, latency_ratio(sessions, feeds)


def _fed(session: Any, values: Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs of a session, of the types that it takes."""
    types = {value.name: value.type for value in session.get_inputs()}
    return {
        name: values[name].astype(np.float16) if kind == "tensor(float16)" else values[name]
        for name, kind in types.items()
    }


def add_preprocessing(model: onnx.ModelProto, recipe: Preprocessing) -> dict[str, str]:
    """Put the preprocessing in front of the inputs, in place; return column of the raw data -> input of the new graph.

    Raises ExportRefused for what no nodes of standard ONNX compute, and if there is nothing to add.
    """
    if recipe.begins_at:
        raise ExportRefused("the inputs of training are inside of the file (model.start), not in front of it")
    if recipe.text:
        raise ExportRefused(
            "standard ONNX has no tokenizer (onnxruntime-extensions has some); serve texts with preprocessing.json"
        )
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    if opset < LEAST_OPSET:
        raise ExportRefused(f"the file has opset {opset}; the nodes need {LEAST_OPSET} or later")
    graph, names = model.graph, dict[str, str]()
    declared = {value.name: value for value in graph.input}
    extender, count = GraphExtender(graph), len(graph.node)
    for name, how in recipe.inputs.items():
        if isinstance(how, ImageInput):
            raw = _images(how, declared[name], graph, extender)
            names[how.column] = raw.name
            graph.input.append(raw)
        elif isinstance(how, TableInput) and any(_has_steps(column) for column in how.columns):
            _columns(how, declared[name], graph, extender, names)
        elif not isinstance(how, TableInput):
            raise ExportRefused(f"input {name} takes {how.kind}, which standard ONNX does not compute")
        else:
            continue
        graph.input.remove(declared[name])
    if not names:
        raise ExportRefused("no input has any preprocessing to put in front")
    # nodes must be sorted topologically, so the new ones come first
    nodes = [*graph.node[count:], *graph.node[:count]]
    del graph.node[:]
    graph.node.extend(nodes)
    model.ir_version = max(model.ir_version, 4)  # before, every initializer had to be an input
    return names


def _has_steps(column: TableColumn) -> bool:
    return column != TableColumn(name=column.name)


def _stored(graph: onnx.GraphProto, extender: GraphExtender, value: Any, dtype: type) -> str:
    """Store a constant; return its name."""
    name = extender.free("onward.preprocessing")
    graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
    return name


def _images(
    how: ImageInput, declared: onnx.ValueInfoProto, graph: onnx.GraphProto, extender: GraphExtender
) -> onnx.ValueInfoProto:
    """Add the nodes from pixels uint8 [N, H, W, channels], red first, to the input; return the new input."""
    kind = declared.type.tensor_type
    raw = extender.free(how.column)
    value = extender.op("Cast", raw, to=TensorProto.FLOAT)
    if "float" in how.dtype:
        value = extender.op("Mul", value, _stored(graph, extender, how.scale, np.float32))
        value = extender.op("Sub", value, _stored(graph, extender, how.mean, np.float32))
        value = extender.op("Div", value, _stored(graph, extender, how.std, np.float32))
    if how.channels == "bgr":
        value = extender.op("Gather", value, _stored(graph, extender, [2, 1, 0], np.int64), axis=3)
    if how.layout == "nchw":
        value = extender.op("Transpose", value, perm=[0, 3, 1, 2])
    extender.op("Cast", value, output=declared.name, to=kind.elem_type)
    dims = [how.height, how.width, 1 if how.channels == "grey" else 3]
    return helper.make_tensor_value_info(raw, TensorProto.UINT8, [_batch(kind), *dims])


def _batch(kind: Any) -> int | str | None:
    """Return the batch dimension that an input declares."""
    first = kind.shape.dim[0]
    return first.dim_value if first.HasField("dim_value") else first.dim_param or None


def _columns(
    how: TableInput,
    declared: onnx.ValueInfoProto,
    graph: onnx.GraphProto,
    extender: GraphExtender,
    names: dict[str, str],
) -> None:
    """Add the nodes from raw columns, double [N] each, to the input; declare the new inputs and add them to `names`."""
    kind, parts = declared.type.tensor_type, []
    for column in how.columns:
        if column.categories:
            raise ExportRefused(f"column {column.name!r} holds categories; serve it with preprocessing.json")
        single = len(how.shape or ()) == 1 if how.stacked else how.shape in ((), (1,))
        if how.pad_value is not None or not single:
            raise ExportRefused(f"column {column.name!r} holds lists, not numbers; serve it with preprocessing.json")
        if column.name not in names:
            names[column.name] = extender.free(column.name)
            info = helper.make_tensor_value_info(names[column.name], TensorProto.DOUBLE, [_batch(kind)])
            graph.input.append(info)
        value = _column(column, names[column.name], graph, extender)
        parts.append(extender.op("Reshape", value, _stored(graph, extender, [-1, 1], np.int64)))
    value = extender.op("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]
    if not how.stacked and how.shape == ():
        value = extender.op("Reshape", value, _stored(graph, extender, [-1], np.int64))
    extender.op("Cast", value, output=declared.name, to=kind.elem_type)


def _column(column: TableColumn, value: str, graph: onnx.GraphProto, extender: GraphExtender) -> str:
    """Return what is computed of one raw column, float32 [N]: the steps in double, as training computes them."""
    if column.indicates_missing:
        return extender.op("Cast", extender.op("IsNaN", value), to=TensorProto.FLOAT)
    if column.fill:
        fill = _stored(graph, extender, column.fill[0], np.float64)
        value = extender.op("Where", extender.op("IsNaN", value), fill, value)
    if column.log1p:
        value = extender.op("Log", extender.op("Add", value, _stored(graph, extender, 1.0, np.float64)))
    if column.center:
        value = extender.op("Sub", value, _stored(graph, extender, column.center[0], np.float64))
        value = extender.op("Div", value, _stored(graph, extender, column.scale[0], np.float64))
    return extender.op("Cast", value, to=TensorProto.FLOAT)


# -- raw evaluation rows


def _raw_values(
    names: dict[str, str],
    recipe: Preprocessing,
    config: RunConfig,
    signature: Signature,
    held_out: Shards,
    numbers: Array,
) -> Iterator[tuple[str, Array]]:
    """Yield (input of the new graph, its values for these evaluation rows)."""
    images = {each.column: each for each in image_inputs(config, signature)}
    for column, each in images.items():
        cells = held_out.read(numbers)[column]
        if held_out.columns[column].dtype != "uint8":
            assert config.data.image is not None
            decoded = [decode_image(bytes(cell), grey=each.channels == 1) for cell in cells]
            cells = [pixels_of(fitted_image(image, each.size, config.data.image)) for image in decoded]
        yield names[column], np.stack(list(cells))
    if tables := [name for name in names if name not in images]:
        for name, values in _raw_columns(tables, config, len(numbers)).items():
            yield names[name], values


def _raw_columns(columns: Sequence[str], config: RunConfig, count: int) -> dict[str, Array]:
    """Read the first held-out rows of the source again: column -> double [count], NaN where a cell is missing."""
    if config.data.evaluation_rows or config.data.sources:
        raise ExportRefused("it cannot be verified with data.evaluation_rows or data.sources, which mix rows")
    found: dict[str, list[Array]] = {name: [] for name in columns}
    for block, held in sources.read(config.data, list(columns)):
        for name in columns:
            cells = [np.nan if cell is None else float(cell) for cell in block.cells[name]]
            found[name].append(np.array(cells, np.float64)[held])
        if sum(map(len, found[columns[0]])) >= count:
            break
    return {name: np.concatenate(parts)[:count] for name, parts in found.items()}
