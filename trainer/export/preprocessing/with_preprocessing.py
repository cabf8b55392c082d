"""Put the preprocessing of training in front of an exported file, as ONNX nodes: it then takes raw numbers and pixels.

    image   uint8 [N, H, W, 3]   --resize, crop, Mul, Sub, Div, Transpose-->   x float32 [N, 3, 224, 224]  --> the file
    a, b    double [N] each      --Where(IsNaN), Log, Sub, Div, Concat----->   x float32 [N, 2]            --> the file
    city    string [N]           --LabelEncoder---------------------------->   c int64 [N]                 --> the file

Images have any size, one in a batch. Raw inputs have the names of the columns, with _2 behind where the graph has a
tensor of that name. Inputs without preprocessing stay. The boxes of a detector are those of the pixels that were given
(box_nodes.py). The trained file itself is not changed; this is a second one, whose outputs on evaluation rows, read
from the source again, are compared with those of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.images.image_computer import pixels_of
from onward.trainer.data.images.image_decoding import decode_image
from onward.trainer.data.images.image_inputs import image_inputs
from onward.trainer.data.schema.columns import Array
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.data.storage.recipe import recipe_of
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.errors import ExportRefused
from onward.trainer.export.measuring.differences import relative_difference
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.latency import latency_ratio
from onward.trainer.export.measuring.raw_rows import read_raw_rows
from onward.trainer.export.model_file import ModelFile
from onward.trainer.export.preprocessing import image_nodes
from onward.trainer.export.preprocessing.box_nodes import box_outputs
from onward.trainer.export.preprocessing.image_nodes import Fitting
from onward.trainer.export.preprocessing.preprocessing_file import describe
from onward.trainer.onnx_graph.files.index import length_of, opsets_of, replace_entries
from onward.trainer.onnx_graph.files.onnxruntime_session import open_session
from onward.trainer.onnx_graph.files.whole_models import write_whole
from onward.trainer.onnx_graph.node_builder import GraphExtender
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.recorded.preprocessing_record import (
    ImageInput,
    Preprocessing,
    TableColumn,
    TableInput,
    ValueInput,
)
from onward.trainer.run.records import ExportedModel, read_record

LEAST_OPSET = 9
"""The first with IsNaN and Where."""
ML_DOMAIN = "ai.onnx.ml"
ML_OPSET = 2
"""Where LabelEncoder is, and the first opset in which it maps texts and integers."""
COMPARED_ROWS = 64
COMPARED_IMAGES = 32


def write_with_preprocessing(
    run: RunDir, exported: ExportedModel, data: EvaluationData, target: Path
) -> tuple[float, float]:
    """Write the file with its preprocessing to `target`; return (greatest relative difference on evaluation rows, its
    time for the first of them over that of the file without).

    data: the evaluation rows, by which the form of a detector's boxes is found. Raises ExportRefused when the
    preprocessing cannot be written as nodes, or the outputs differ by more than `export.tolerance`; DataError when the
    source cannot be read any more.
    """
    config = read_config(run)
    signature = read_training_signature(config.model)
    manifest = read_record(run.shards / "manifest.json", ShardManifest)
    recipe = describe(config.data, config.losses, config.model, manifest, signature, exported)
    file = ModelFile.read(exported.path)
    model = file.with_external_data()
    names = add_preprocessing(model, recipe)
    box_column = config.data.image.box_column if config.data.image else ""
    boxes = {output.name: output for output in box_outputs(file, config.losses, data, box_column)}
    pictures = [how for how in recipe.inputs.values() if isinstance(how, ImageInput)]
    if boxes and len(pictures) != 1:
        raise ExportRefused(f"the boxes are of one image, but {len(pictures)} inputs are images")
    for output in boxes.values():
        output.add_nodes(pictures[0], names[pictures[0].column], model.graph)
    write_whole(model, target)
    onnx.checker.check_model(str(target), full_check=True)
    # one thread: the latency of both is compared
    sessions = [open_session(path, threads=1) for path in (exported.path, target)]
    compared = list[float]()
    latency = list[float]()
    rows = 0
    images = {image.column: image.channels == 1 for image in image_inputs(config.data, signature)}
    raw_rows = read_raw_rows(recipe_of(config, signature), manifest, COMPARED_IMAGES if images else COMPARED_ROWS)
    for numbers, raw in _raw_batches(names, recipe, images, raw_rows, model):
        batch = one_batch(open_shards(run.shards, "evaluation"), config, signature, numbers)
        given = {info.name: tensor.numpy() for info, tensor in zip(signature.inputs, batch.inputs, strict=False)}
        given |= {name: bound.for_rows(len(numbers)) for name, bound in signature.bound.items()}
        feeds = [_fed(session, given | raw) for session in sessions]
        results = [session.run(None, feed) for session, feed in zip(sessions, feeds, strict=True)]
        for value, ours, theirs in zip(model.graph.output, *results, strict=True):
            if value.name in boxes:
                ours = boxes[value.name].in_original(ours, raw[names[pictures[0].column]].shape[1:3], pictures[0])
            compared.append(relative_difference(ours, theirs)[0])
        latency = latency or [latency_ratio(sessions, feeds)]
        rows += len(np.unique(numbers))
    worst = float(np.max(compared))  # NaN if one is
    if not worst <= config.export.tolerance:
        raise ExportRefused(
            f"with its preprocessing the file differs by {worst:.3g} from the one without on {rows} rows, above "
            f"export.tolerance {config.export.tolerance:g}"
        )
    return worst, latency[0]


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
    _check_opsets(model, recipe)
    graph = model.graph
    names = dict[str, str]()
    declared = {value.name: value for value in graph.input}
    extender = GraphExtender(graph)
    count = len(graph.node)
    for name, how in recipe.inputs.items():
        if isinstance(how, ImageInput):
            _images(how, declared[name], graph, extender, names)
        elif isinstance(how, TableInput) and any(_has_steps(column) for column in how.columns):
            _columns(how, declared[name], graph, extender, names)
        elif not isinstance(how, TableInput | ValueInput):
            raise ExportRefused(f"input {name} takes {how.kind}, which standard ONNX does not compute")
        else:
            continue
        graph.input.remove(declared[name])
    if not names:
        raise ExportRefused("no input has any preprocessing to put in front")
    # nodes must be sorted topologically, so the new ones come first
    replace_entries(graph, node=[*graph.node[count:], *graph.node[:count]])
    model.ir_version = max(model.ir_version, 4)  # before, every initializer had to be an input
    return names


def _check_opsets(model: onnx.ModelProto, recipe: Preprocessing) -> None:
    """Raise ExportRefused if the file's opset has not all the nodes. Import the domain of LabelEncoder if needed."""
    has_images = any(isinstance(how, ImageInput) for how in recipe.inputs.values())
    least, what = (image_nodes.LEAST_OPSET, "resize images") if has_images else (LEAST_OPSET, "compute columns")
    opsets = opsets_of(model)
    opset = opsets.get("", 0)
    if opset < least:
        raise ExportRefused(
            f"the file has opset {opset}, but the nodes that {what} need {least} or later; export the model again with "
            "a later opset, or convert it with onnx.version_converter"
        )
    tables = [how for how in recipe.inputs.values() if isinstance(how, TableInput)]
    if any(column.categories for how in tables for column in how.columns):
        of_ml = opsets.get(ML_DOMAIN, 0)
        if not of_ml:
            model.opset_import.append(helper.make_opsetid(ML_DOMAIN, ML_OPSET))
        elif of_ml < ML_OPSET:
            raise ExportRefused(f"the file has opset {of_ml} of {ML_DOMAIN}, but categories need {ML_OPSET} or later")


def _has_steps(column: TableColumn) -> bool:
    return column != TableColumn(name=column.name)


def _stored(graph: onnx.GraphProto, extender: GraphExtender, value: Any, dtype: type) -> str:
    """Store a constant; return its name."""
    name = extender.free("onward.preprocessing")
    graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
    return name


def _images(
    how: ImageInput,
    declared: onnx.ValueInfoProto,
    graph: onnx.GraphProto,
    extender: GraphExtender,
    names: dict[str, str],
) -> None:
    """Add the nodes from pixels uint8 [N, H, W, channels], red first, to the input; declare the new input."""
    if not how.antialias:
        raise ExportRefused(
            f"data.image.interpolation '{how.interpolation}_aliased' is torch's own arithmetic of 16 bits, which "
            f"differs between processors; set '{how.interpolation}', or serve with preprocessing.json"
        )
    kind = declared.type.tensor_type
    if how.column not in names:
        names[how.column] = extender.free(how.column)
        dims = [_batch(kind), None, None, 1 if how.channels == "grey" else 3]
        graph.input.append(helper.make_tensor_value_info(names[how.column], TensorProto.UINT8, dims))
    value = Fitting(how, extender).pixels(names[how.column])
    if "float" in how.dtype:
        mean, std = (np.reshape(each, (-1, 1, 1)) for each in (how.mean, how.std))
        value = extender.op("Mul", value, _stored(graph, extender, how.scale, np.float32))
        value = extender.op("Sub", value, _stored(graph, extender, mean, np.float32))
        value = extender.op("Div", value, _stored(graph, extender, std, np.float32))
    if how.channels == "bgr":
        value = extender.op("Gather", value, _stored(graph, extender, [2, 1, 0], np.int64), axis=1)
    if how.layout == "nhwc":
        value = extender.op("Transpose", value, perm=[0, 2, 3, 1])
    extender.op("Cast", value, output=declared.name, to=kind.elem_type)


def _batch(kind: Any) -> int | str | None:
    """Return the batch dimension that an input declares."""
    first = kind.shape.dim[0]
    return first.dim_param or length_of(first)


def _columns(
    how: TableInput,
    declared: onnx.ValueInfoProto,
    graph: onnx.GraphProto,
    extender: GraphExtender,
    names: dict[str, str],
) -> None:
    """Add the nodes from raw columns, double [N] each, to the input; declare the new inputs and add them to `names`."""
    kind = declared.type.tensor_type
    parts = []
    for column in how.columns:
        single = len(how.shape or ()) == 1 if how.stacked else how.shape in ((), (1,))
        if how.pad_value is not None or not single:
            raise ExportRefused(f"column {column.name!r} holds lists, not numbers; serve it with preprocessing.json")
        if column.name not in names:
            names[column.name] = extender.free(column.name)
            raw = TensorProto.DOUBLE
            if column.categories:
                raw = TensorProto.INT64 if column.integers else TensorProto.STRING
            graph.input.append(helper.make_tensor_value_info(names[column.name], raw, [_batch(kind)]))
        compute = _category if column.categories else _column
        value = compute(column, names[column.name], graph, extender)
        value = extender.op("Cast", value, to=kind.elem_type)
        parts.append(extender.op("Reshape", value, _stored(graph, extender, [-1, 1], np.int64)))
    value = extender.op("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]
    shape = [-1] if not how.stacked and how.shape == () else [-1, len(parts)]
    extender.op("Reshape", value, _stored(graph, extender, shape, np.int64), output=declared.name)


def _category(column: TableColumn, value: str, graph: onnx.GraphProto, extender: GraphExtender) -> str:
    """Return the ids of one raw column of categories, int64 [N]."""
    ids = {text: place for place, text in enumerate(column.categories)}
    count = len(column.categories)
    has_unknown = "" in ids
    # a text that training has not seen: its place if there is one, else one beyond the last
    unknown = ids.get("", count)
    keys: dict[str, Any] = {"keys_strings": list(ids)}
    if column.integers:
        # other texts are no integer's digits
        numbers = [text for text in ids if text.lstrip("-").isdigit()]
        ids = {text: ids[text] for text in numbers if str(int(text)) == text}
        keys = {"keys_int64s": list(map(int, ids))}
    found = extender.op(
        "LabelEncoder", value, domain=ML_DOMAIN, values_int64s=list(ids.values()), default_int64=unknown, **keys
    )
    if has_unknown:
        return found
    # an id that is no place of this list ends the run with an error
    return extender.op("Gather", _stored(graph, extender, range(count), np.int64), found)


def _column(column: TableColumn, value: str, graph: onnx.GraphProto, extender: GraphExtender) -> str:
    """Return what is computed of one raw column [N]: the steps in double and then float32, as training computes them.

    Without steps it stays double, which also holds integers.
    """
    if not _has_steps(column):
        return value
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


def _raw_batches(
    names: Mapping[str, str],
    recipe: Preprocessing,
    images: Mapping[str, bool],
    rows: Mapping[str, list[Any]],
    model: onnx.ModelProto,
) -> Iterator[tuple[Array, dict[str, Array]]]:
    """Yield (numbers of evaluation rows [n], input of the new graph -> their raw values).

    images: the columns of images, and whether they are grey. They differ in size, so that each is a batch of its own,
    repeated where the graph fixes the size of a batch.
    """
    categories: dict[str, TableColumn] = {}
    for how in recipe.inputs.values():
        if isinstance(how, TableInput):
            categories |= {column.name: column for column in how.columns if column.categories}
    count = min(len(rows[name]) for name in names)
    # raw inputs have the batch of the file
    fixed = next(_batch(each.type.tensor_type) for each in model.graph.input if each.name in names.values())
    size = fixed if isinstance(fixed, int) else 1 if images else count
    for first in range(0, count, 1 if images else size):
        # the last batch of a fixed size begins again with the first rows
        numbers = np.full(size, first) if images else np.arange(first, first + size) % count
        raw = dict[str, Array]()
        for column, name in names.items():
            cells = [rows[column][number] for number in numbers]
            if column in images:
                pixels = pixels_of(decode_image(bytes(cells[0]), grey=images[column]))
                raw[name] = np.stack([pixels] * size)
            elif column in categories:
                raw[name] = np.array(cells, np.int64 if categories[column].integers else object)
            else:
                raw[name] = np.array(cells, np.float64)
        yield numbers, raw
