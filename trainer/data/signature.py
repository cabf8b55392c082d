"""What an ONNX file takes and gives, and what of it the data does not fit; the weights are not looked at."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections import ModelConfig
from onward.trainer.data.columns import TEXT, Column, Schema, Want
from onward.trainer.errors import ConfigError, UnsupportedModel
from onward.trainer.onnx_graph.index import locations
from onward.trainer.onnx_graph.surgery import cut, is_cut, operate
from onward.trainer.run.durable_files import sha256

Dims = tuple[int | None, ...]
NUMBERS = {"bool", "float16", "bfloat16", "float32", "float64", "uint8", "uint16", "uint32", "uint64"} | {
    f"int{bits}" for bits in (8, 16, 32, 64)
}
"""Types that columns can become."""


@dataclass(frozen=True)
class TensorInfo:
    """A graph input or output."""

    name: str
    dtype: str
    """ONNX's name of the type, in lower case as numpy writes it: float32, int64, bfloat16, string."""
    shape: Dims | None
    """None: the file does not say; None for a dimension: known when the graph runs."""

    @property
    def row(self) -> Dims | None:
        """The shape of one sample: without the batch axis."""
        return None if self.shape is None else self.shape[1:]


@dataclass(frozen=True)
class Signature:
    """What a graph takes and gives, in its order."""

    inputs: tuple[TensorInfo, ...]
    """Initializers that are listed as inputs are left out: they are weights."""
    outputs: tuple[TensorInfo, ...]

    def output(self, name: str) -> TensorInfo | None:
        """The output the loss reads: the first if no name is given; None if there is none of that name."""
        return next((output for output in self.outputs if name in ("", output.name)), None)


def read_signature(path: Path) -> Signature:
    """The inputs and outputs of an ONNX file; external weights are not loaded.

    Raises UnsupportedModel when it is no ONNX file, or has no inputs or outputs.
    """
    return _signature(_read(path).graph, path)


def signature_to_train(model: ModelConfig) -> Signature:
    """What the part of a graph that is trained takes and gives: after the surgery that [model] asks for.

    Raises UnsupportedModel as `read_signature` does, ConfigError for surgery that this graph does not allow.
    """
    proto = _read(model.path)
    signature = _signature(proto.graph, model.path)
    if not (model.num_classes or model.untie or is_cut(proto, model)):
        return signature
    operate(proto, model, seed=0)
    return _signature(cut(proto, model).graph, model.path)


def _read(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path, load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read as an ONNX file: {error}") from error


def _signature(graph: onnx.GraphProto, path: Path) -> Signature:
    weights = {tensor.name for tensor in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    inputs = tuple(_info(value) for value in graph.input if value.name not in weights)
    outputs = tuple(_info(value) for value in graph.output)
    if not inputs or not outputs:
        raise UnsupportedModel(f"{path} has {len(inputs)} inputs and {len(outputs)} outputs; both need at least one")
    return Signature(inputs, outputs)


def _info(value: onnx.ValueInfoProto) -> TensorInfo:
    tensor = value.type.tensor_type
    dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    dtype = {"float": "float32", "double": "float64"}.get(dtype, dtype)
    known = tensor.HasField("shape")
    dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
    return TensorInfo(value.name, dtype, tuple(dims) if known else None)


# -- the files of a model


def model_digest(path: Path) -> str:
    """SHA-256 of a model: of its file, and if it keeps tensors in others, of all their digests together."""
    try:
        names = locations(onnx.load(path, load_external_data=False))
    except (DecodeError, ValueError):
        names = []  # no ONNX file: whoever reads it says so
    digests = [sha256(path), *(sha256(file) for name in names if (file := path.parent / name).is_file())]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


# -- which columns are read, and as what


@dataclass(frozen=True)
class Use:
    """Columns somebody reads: an input of the graph, or the labels."""

    reader: str
    """Who reads them, for a sentence."""
    columns: tuple[str, ...]
    stacked: bool
    """Whether the columns are numbers that make one vector, or the one column is the tensor."""
    dtype: str
    row: Dims | None
    """The shape of one sample."""

    @property
    def want(self) -> Want:
        """As what each of the columns is read."""
        # numpy has no bfloat16: such inputs are kept in fp32 and rounded when they are fed
        return Want({"bfloat16": "float32"}.get(self.dtype, self.dtype), () if self.stacked else self.row)


def uses(config: RunConfig, signature: Signature) -> list[Use]:
    """Who reads which columns: the graph's inputs in order, then the labels (last, if the loss needs any)."""
    model, data = config.model, config.data
    found = [
        _use(f"input {info.name}", data.inputs.get(info.name, info.name), info.dtype, info.row)
        for info in signature.inputs
    ]
    if model.loss != "output":
        output = signature.output(model.output)
        row = output.row if output else None
        classes = model.loss == "cross_entropy"
        found.append(
            _use("data.label", data.label, "int64" if classes else "float32", row[:-1] if row and classes else row)
        )
    return found


def _use(reader: str, columns: str | tuple[str, ...], dtype: str, row: Dims | None) -> Use:
    if isinstance(columns, str):
        return Use(reader, (columns,), False, dtype, row)
    return Use(reader, columns, True, dtype, row)


def wanted(config: RunConfig, signature: Signature) -> dict[str, Want]:
    """The columns to keep in the shards, and as what; one that two read is kept in a type that serves both."""
    found: dict[str, Want] = {}
    for use in uses(config, signature):
        for name in use.columns:
            want = use.want
            if before := found.get(name):
                want = Want(np.promote_types(before.dtype, want.dtype).name, before.shape)
            found[name] = want
    return found


# -- what does not fit


def misfits(config: RunConfig, schema: Schema) -> list[str]:
    """One sentence for each thing in which the model and the data do not fit; [] when they do.

    schema: of the first rows, or of all of them. Reads `config.model` and `config.data`. Raises
    UnsupportedModel when the ONNX file cannot be read.
    """
    try:
        signature = signature_to_train(config.model)
    except ConfigError as error:  # surgery that this graph does not allow: what it takes and gives is not known then
        return list(error.problems)
    problems = [*_unknown_names(config, signature)]
    for use in uses(config, signature):
        missing = [name for name in use.columns if name not in schema]
        problems += [_missing(use, name, schema) for name in missing]
        if not missing:
            problems += _misfit(use, [schema[name] for name in use.columns])
    if config.model.loss == "cross_entropy" and isinstance(config.data.label, str) and config.data.label in schema:
        problems += _label_range(config, signature, schema[config.data.label])
    return problems


def _unknown_names(config: RunConfig, signature: Signature) -> Iterator[str]:
    inputs = [info.name for info in signature.inputs]
    for name in config.data.inputs:
        if name not in inputs:
            yield f"data.inputs names {name!r}, which is no input of the model{_near(name, inputs)}"
    columns = wanted(config, signature)
    for name in config.data.pad_values:
        if name not in columns:
            yield f"data.pad_values names {name!r}, which is no column that is read{_near(name, columns)}"
    if not config.data.evaluation_fraction and not config.data.evaluation_source:
        yield "data.evaluation_fraction is 0 and there is no data.evaluation_source: nothing to evaluate on"


def _near(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there is {', '.join(names)}"


def _missing(use: Use, name: str, schema: Schema) -> str:
    key = "data.label" if use.reader == "data.label" else f"data.inputs.{use.reader.removeprefix('input ')}"
    return f"{use.reader} reads column {name!r}, which the data does not have{_near(name, schema)}; set {key}"


def _misfit(use: Use, columns: list[Column]) -> Iterator[str]:
    """What is wrong with the types and shapes of the columns of one use."""
    if use.dtype not in NUMBERS:
        yield f"{use.reader} takes {use.dtype}, which cannot be fed from columns of numbers"
        return
    for column in columns:
        if column.dtype == TEXT:
            yield f"{use.reader} takes {use.dtype}, but column {column.name!r} holds text"
        elif not _castable(column.dtype, use.dtype):
            yield f"{use.reader} takes {use.dtype}, but column {column.name!r} holds {column.dtype}"
        elif use.stacked and (column.shape or column.variable):
            yield f"{use.reader} stacks single numbers, but column {column.name!r} is {column.kind}"
    if use.stacked:
        if use.row is not None and (len(use.row) != 1 or use.row[0] not in (None, len(columns))):
            yield f"{use.reader} takes {_shape(use.row)} a sample, but {len(columns)} columns are stacked for it"
    elif columns[0].dtype != TEXT and (why := _shape_misfit(use, columns[0])):
        yield why


def _castable(have: str, want: str) -> bool:
    """Integers and booleans may become floats, never the reverse."""
    return np.dtype(have).kind in "biu" or "float" in want


def _shape_misfit(use: Use, column: Column) -> str:
    row = use.row
    if row is None:
        return ""
    if use.reader == "data.label":
        # a loss flattens its labels: only their number matters
        wrong = None not in row and not column.variable and math.prod(column.shape) != math.prod(d or 0 for d in row)
        if column.variable:
            wrong = None not in row and column.shape[0] < math.prod(d or 0 for d in row)
        takes = f"data.label must be {_shape(row)} a sample to fit the output"
    elif column.variable:
        wrong = len(row) != 1 or (row[0] or 0) > column.shape[0]
        takes = f"{use.reader} takes {_shape(row)} a sample"
    else:
        pairs = zip(row, column.shape, strict=False)
        wrong = len(row) != len(column.shape) or any(d is not None and d != n for d, n in pairs)
        takes = f"{use.reader} takes {_shape(row)} a sample"
    hint = f"; ['{column.name}'] makes a vector of one" if row in ((1,), (None,)) and not column.shape else ""
    return f"{takes}, but column {column.name!r} is {column.kind}{hint}" if wrong else ""


def _shape(dims: Dims) -> str:
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in dims) + "]" if dims else "one number"


def _label_range(config: RunConfig, signature: Signature, column: Column) -> Iterator[str]:
    """Labels must be classes of the output, whose last axis counts them."""
    output = signature.output(config.model.output)
    width = output.shape[-1] if output and output.shape else None
    values = [value for value in column.extremes if value != config.model.ignore_index]
    if not values or column.dtype == TEXT or np.dtype(column.dtype).kind == "f":
        return
    if values[0] < 0 or (width is not None and values[-1] >= width):
        fits = f"0..{width - 1}, for output {output.name} is {width} wide" if width and output else "0 or more"
        yield (
            f"the labels in column {column.name!r} are {values[0]:d}..{values[-1]:d}, but must be {fits} "
            f"(or model.ignore_index {config.model.ignore_index})"
        )
