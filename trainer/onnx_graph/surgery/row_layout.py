"""Find on which axis of an input or output the rows of a batch are, and give inputs that have no rows their values.

A run feeds rows on axis 0. Recurrent states, scales, sampling rates and flags are inputs that are not so:

    the file          x [B, 5, 4]    h [1, B, 8]                  sr []
    trained           x [B, 5, 4]    h [B, 1, 8] -- Transpose     16000 (model.bind)
    onnxruntime       x [B, 5, 4]    h [1, B, 8]                  sr = 16000

`rows_first` changes the graph that is trained; the exported file stays as it is, and `RowLayout` makes of rows what is
fed to it. The batch axis is the one that `model.batch_axes` says, or else the one with the symbol (`dim_param`) that is
the length of axis 0 of the other inputs, or else axis 0. Only onnx and numpy are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.index import FLOAT_TYPES, did_you_mean, inputs_of, replace_entries, subgraphs

Array = np.ndarray[Any, np.dtype[Any]]

BOUND = "onward.bound."
"""Begins the names of the constants that `rows_first` adds."""
OF_FILE = "onward.file."
"""Begins the names of tensors in the layout of the file, beside which one with rows on axis 0 has the file's name."""


@dataclass(frozen=True)
class BoundInput:
    """An input of the file whose value the configuration gives."""

    value: Array
    """Of the declared type; it can be broadcast to `shape`, and has length 1 where `shape` has None."""
    shape: tuple[int | None, ...]
    """None on the axis of the rows, if there is one."""

    def for_rows(self, rows: int) -> Array:
        """Return what is fed for a batch of so many rows: `shape`, with their number on its axis."""
        shape = [rows if length is None else length for length in self.shape]
        return np.ascontiguousarray(np.broadcast_to(self.value, shape)).reshape(shape)


@dataclass(frozen=True)
class RowLayout:
    """Where the rows are in the inputs and outputs of a file."""

    bound: Mapping[str, BoundInput] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)
    """Input or output whose rows are not on axis 0 -> their axis; without bound inputs."""

    def as_in_file(self, name: str, rows: Any) -> Any:
        """Return rows [B, ...] as the file takes or returns them."""
        return np.moveaxis(rows, 0, self.axes[name]) if name in self.axes else rows

    def rows_first(self, name: str, value: Any) -> Any:
        """Return an array of the file with its rows on axis 0: [B, ...]."""
        return np.moveaxis(value, self.axes[name], 0) if name in self.axes else value


def read_layout(graph: onnx.GraphProto, config: ModelConfig) -> RowLayout:
    """Return the layout of a graph; names in the configuration that the graph does not have are passed over.

    Raises ConfigError with all problems at once.
    """
    problems = list[str]()
    inputs = _inputs(graph)
    outputs = {value.name: value for value in graph.output}
    values = {**outputs, **inputs}
    axes = dict[str, int]()
    for name, axis in config.batch_axes.items():
        if name in values:
            axes.update((name, at) for at in _given_axis(name, axis, values[name], problems))
    # what the settings say goes before what the symbols say
    symbol = batch_symbol(graph, config)
    for name, value in (*inputs.items(), *outputs.items()):
        if name not in axes and (at := _axis_of_symbol(name, value, symbol, name in outputs, problems)):
            axes[name] = at
    bound = dict[str, BoundInput]()
    for name in config.bind:
        if name in inputs:
            made = _bound(name, config.bind[name], inputs[name], axes.get(name, 0), symbol, name in config.batch_axes)
            if isinstance(made, str):
                problems.append(made)
            else:
                bound[name] = made
    if problems:
        raise ConfigError(problems)
    moved = {name: axis for name, axis in axes.items() if axis}
    return RowLayout(bound, {name: axis for name, axis in moved.items() if name not in config.bind})


def layout_problems(graph: onnx.GraphProto, config: ModelConfig) -> list[str]:
    """Return what is wrong with `model.bind` and `model.batch_axes` for a whole file."""
    inputs = list(_inputs(graph))
    outputs = [value.name for value in graph.output]
    problems = [
        f"model.bind names {name!r}, which is not an input of the model{did_you_mean(name, inputs)}"
        for name in config.bind
        if name not in inputs
    ]
    problems += [
        f"model.batch_axes names {name!r}, which is neither an input nor an output of the model"
        f"{did_you_mean(name, [*inputs, *outputs])}"
        for name in config.batch_axes
        if name not in (*inputs, *outputs)
    ]
    if inputs and set(inputs) <= config.bind.keys():
        problems.append(
            f"model.bind gives all inputs of the model ({', '.join(inputs)}) a value, so that no column of the data is "
            "read; leave out those that the samples are fed to"
        )
    try:
        read_layout(graph, config)
    except ConfigError as error:
        problems += error.problems
    return problems


def rows_first(model: onnx.ModelProto, config: ModelConfig) -> onnx.ModelProto:
    """Return the model with the rows of all its inputs and outputs on axis 0, and with constants for bound inputs.

    Returns the model itself if it is so already. Weights, and the names of inputs and outputs, stay. Raises the
    errors of `read_layout`.
    """
    layout = read_layout(model.graph, config)
    if not layout.bound and not layout.axes:
        return model
    changed = deepcopy(model)
    graph = changed.graph
    # callers know the names of the file, so the tensors in the layout of the file get other ones
    own = {name: f"{OF_FILE}{name}" for name in layout.axes}
    inputs = [value for value in graph.input if value.name not in layout.bound]
    front = list[onnx.NodeProto]()
    behind = list[onnx.NodeProto]()
    for value in (*inputs, *graph.output):
        if value.name in layout.axes:
            axis = layout.axes[value.name]
            dims = value.type.tensor_type.shape.dim
            order = [axis, *(at for at in range(len(dims)) if at != axis)]
            # copies, because `del` invalidates the dimensions
            moved = [onnx.TensorShapeProto.Dimension.FromString(dims[at].SerializeToString()) for at in order]
            del dims[:]
            dims.extend(moved)
            # an input goes back into the order of the file in front of the nodes, an output comes from it behind them
            if any(value is graph_input for graph_input in inputs):
                back = [order.index(at) for at in range(len(order))]
                front.append(helper.make_node("Transpose", [value.name], [own[value.name]], perm=back))
            else:
                behind.append(helper.make_node("Transpose", [own[value.name]], [value.name], perm=order))
    # before the new nodes are added, which have both names
    rename_values(graph, own)
    constants: list[onnx.NodeProto] = []
    for name, bound in layout.bound.items():
        constants += _constant(name, bound, _counted(inputs))
    replace_entries(graph, node=[*front, *constants, *graph.node, *behind], input=inputs)
    return changed


def batch_symbol(graph: onnx.GraphProto, config: ModelConfig) -> str:
    """Return the symbol of the number of rows; "" if the inputs that are not bound have none, or several."""
    found = set()
    for name, value in _inputs(graph).items():
        dims = value.type.tensor_type.shape.dim
        axis = config.batch_axes.get(name, 0)
        if name not in config.bind and -len(dims) <= axis < len(dims):
            found.add(dims[axis].dim_param)
    # an open length without a symbol contradicts none
    found.discard("")
    return found.pop() if len(found) == 1 else ""


def shown_shape(value: onnx.ValueInfoProto) -> str:
    """Return a declared shape for messages: `[1, batch, 8]`, a dynamic length without a name as `?`."""
    lengths = []
    for dim in value.type.tensor_type.shape.dim:
        number = str(dim.dim_value) if dim.dim_value > 0 else "?"
        lengths.append(dim.dim_param or number)
    return f"[{', '.join(lengths)}]"


# -- axes


def _inputs(graph: onnx.GraphProto) -> dict[str, onnx.ValueInfoProto]:
    return {value.name: value for value in inputs_of(graph)}


def _given_axis(name: str, axis: int, value: onnx.ValueInfoProto, problems: list[str]) -> Iterator[int]:
    rank = len(value.type.tensor_type.shape.dim)
    if not value.type.tensor_type.HasField("shape"):
        problems.append(f"model.batch_axes.{name}: the file declares no shape of {name!r}, so its rows stay on axis 0")
    elif not -rank <= axis < rank:
        axes = f"axes 0 to {rank - 1}" if rank else "no axis"
        problems.append(f"model.batch_axes.{name} is {axis}, but {name!r} {shown_shape(value)} has {axes}")
    else:
        yield axis % rank


def _axis_of_symbol(
    name: str, value: onnx.ValueInfoProto, symbol: str, is_output: bool, problems: list[str]
) -> int | None:
    """Return the only axis with the batch symbol, if axis 0 has another length.

    An input whose axis 0 has a symbol of its own counts its rows by it, as files do that name each input's apart.
    """
    if not symbol:
        return None
    dims = value.type.tensor_type.shape.dim
    axes = [axis for axis, dim in enumerate(dims) if dim.dim_param == symbol]
    if not axes or axes[0] == 0:
        return None
    if dims[0].dim_value <= 0 and not is_output:
        return None
    if axes[1:] and not is_output:
        problems.append(
            f"input {name!r} {shown_shape(value)} has the length of the batch, {symbol!r}, on axes "
            f"{' and '.join(map(str, axes))}; say which one has the rows: model.batch_axes = {{{name} = {axes[0]}}}"
        )
    return None if axes[1:] else axes[0]


# -- bound inputs


def _bound(
    name: str, given: Any, info: onnx.ValueInfoProto, axis: int, symbol: str, is_given: bool
) -> BoundInput | str:
    """Return a bound input, or a sentence about what is wrong with its value."""
    key = f"model.bind.{name}"
    tensor = info.type.tensor_type
    if not info.type.HasField("tensor_type") or tensor.elem_type == onnx.TensorProto.STRING:
        return f"{key}: input {name!r} is not a tensor of numbers, and only such a one can be given a value"
    value = np.array(given)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    # numpy warns of numbers that the type does not hold; `_holds` finds them
    with np.errstate(all="ignore"):
        cast = value.astype(dtype)
    if not _holds(tensor.elem_type, value, cast):
        word = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
        return f"{key} is {given}, but input {name!r} takes {word}, which does not hold it"
    if not tensor.HasField("shape"):
        return BoundInput(cast, cast.shape)
    shape = [dim.dim_value if dim.dim_value > 0 else None for dim in tensor.shape.dim]
    declared = f"input {name!r} has shape {shown_shape(info)}"
    if value.ndim > len(shape):
        return f"{key} is a list of {value.ndim} levels, but {declared}"
    # aligned at the end, as numpy broadcasts: leading axes that the value does not have are of length 1
    own = (1,) * (len(shape) - value.ndim) + value.shape
    has_rows = is_given or _has_rows(tensor.shape.dim, axis, symbol, own)
    # an axis has the rows, is open and takes the length of the value, or has its declared length
    for at, length in enumerate(own):
        if has_rows and at == axis:
            if length != 1:
                return (
                    f"{key} has {length} values on axis {at}, but {declared}, where axis {at} is the batch: one value "
                    "is repeated for all rows; values of each row are a column of the data"
                )
            shape[at] = None
        elif shape[at] is None and at < len(shape) - value.ndim:
            return (
                f"{key}: {declared}, whose axis {at} has no length: give a list of the length that you mean, or say "
                f"that the rows are on it: model.batch_axes = {{{name} = {at}}}"
            )
        elif shape[at] is None:
            shape[at] = length
        elif length not in (1, shape[at]):
            return f"{key} has {length} values on axis {at}, but {declared}; give {shape[at]} values, or one for all"
    return BoundInput(cast.reshape(own), tuple(shape))


def _holds(element_type: int, value: Array, cast: Array) -> bool:
    """Return whether numbers fit a type: integers and booleans exactly, floats within its range."""
    if element_type in FLOAT_TYPES:
        return value.dtype != np.bool_ and bool(np.isfinite(cast.astype(np.float64)).all())
    if value.dtype == np.bool_:
        return element_type == onnx.TensorProto.BOOL
    return np.array_equal(cast.astype(np.float64), value.astype(np.float64))


def _has_rows(dims: Sequence[Any], axis: int, symbol: str, own: Sequence[int]) -> bool:
    """Return whether an axis of a bound input has the rows: it has their symbol, or is dynamic in a file without any.

    A list gives the length of a dynamic axis itself.
    """
    if axis >= len(dims) or dims[axis].dim_value > 0:
        return False
    if symbol:
        return bool(dims[axis].dim_param == symbol)
    return not dims[axis].dim_param and own[0] == 1


def _counted(inputs: Sequence[onnx.ValueInfoProto]) -> str:
    """Return an input whose axis 0 has the rows."""
    return next(value.name for value in inputs if value.type.HasField("tensor_type"))


def _constant(name: str, bound: BoundInput, counted: str) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that compute a bound input. counted: an input [B, ...]."""

    def stored(value: Array, what: str) -> onnx.NodeProto:
        return helper.make_node("Constant", [], [f"{BOUND}{name}{what}"], value=numpy_helper.from_array(value))

    lengths = [1 if length is None else length for length in bound.shape]
    yield stored(np.ascontiguousarray(np.broadcast_to(bound.value, lengths)).reshape(lengths), "")
    if None not in bound.shape:
        yield helper.make_node("Identity", [f"{BOUND}{name}"], [name])
        return
    axis = bound.shape.index(None)
    at = f"{BOUND}{name}."
    yield stored(np.array([0], np.int64), ".first")
    # the shape is put together of the lengths before the rows, their number, and the lengths behind them
    operands = [f"{at}rows"]
    if before := lengths[:axis]:
        yield stored(np.array(before, np.int64), ".before")
        operands = [f"{at}before", *operands]
    if behind := lengths[axis + 1 :]:
        yield stored(np.array(behind, np.int64), ".behind")
        operands.append(f"{at}behind")
    yield helper.make_node("Shape", [counted], [f"{at}shape"])
    yield helper.make_node("Gather", [f"{at}shape", f"{at}first"], [f"{at}rows"], axis=0)
    yield helper.make_node("Concat", operands, [f"{at}lengths"], axis=0)
    yield helper.make_node("Expand", [f"{BOUND}{name}", f"{at}lengths"], [name])


def rename_values(graph: onnx.GraphProto, named: Mapping[str, str]) -> None:
    """Rename values in all nodes and inner graphs; what a graph declares of them is of another layout, and removed."""
    kept = [value for value in graph.value_info if value.name not in named]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    for node in graph.node:
        node.input[:] = [named.get(name, name) for name in node.input]
        node.output[:] = [named.get(name, name) for name in node.output]
        for inner in subgraphs(node):
            for value in inner.output:
                value.name = named.get(value.name, value.name)
            rename_values(inner, named)
