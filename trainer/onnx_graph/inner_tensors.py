"""Read the tensors stored in inner graphs and local functions, and lift them into the main graph for the import.

    file       y = If(c) { then: MatMul(x, W), W stored inside }       Lin(x) { W = Constant; MatMul(x, W) }
    imported   y = If(c) { then: MatMul(x, "y/W") }, "y/W" stored      Lin(x, "Lin/W") { MatMul(x, "Lin/W") }, stored

The name of such a tensor in settings, checkpoints and reports is that of the first output of the node, or of the
function, then its own. Outputs of the main graph are unique and stay the same when a part is extracted; where a node
stores two tensors of one name (in both branches of an If), the attributes are named too: `y/then_branch/W`.

Only the import reads a lifted model. Trained values are written into the tensor's own place in the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_graph.files.index import FLOAT_TYPES, PACKED_BITS, domain_of, subgraphs
from onward.trainer.onnx_graph.files.operators import FunctionKey, functions_of
from onward.trainer.onnx_graph.files.stored_protos import stored_protos

Scope = onnx.GraphProto | onnx.FunctionProto

NARROW_TYPES = (
    TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16, *PACKED_BITS, TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ,
)  # fmt: skip
"""Element types of quantized weights; wider integers are positions, lengths and indices."""


@dataclass(frozen=True)
class InnerTensor:
    """A tensor that is stored inside an inner graph or a local function."""

    name: str
    """Its name in settings and checkpoints."""
    own_name: str
    """Its name in the inner graph or function."""
    proto: TensorProto
    """In place: a change of it is a change of the model."""
    where: str
    """Such as "the body of If" or "the function my.Lin"."""
    scope: Scope
    place: int
    """Its position among the initializers of the scope, or that of its Constant among the nodes."""
    is_constant: bool

    @property
    def may_train(self) -> bool:
        """Return whether it can be lifted: a float tensor that is no single number without axes."""
        returned = isinstance(self.scope, onnx.FunctionProto) and self.own_name in self.scope.output
        return self.proto.data_type in FLOAT_TYPES and bool(self.proto.dims) and not returned

    @property
    def may_be_weight(self) -> bool:
        """Return whether it may be a weight, by its type and shape; such a tensor is counted, even if it is frozen."""
        return self.proto.data_type in (*FLOAT_TYPES, *NARROW_TYPES) and any(length > 1 for length in self.proto.dims)


def inner_tensors(model: onnx.ModelProto) -> list[InnerTensor]:
    """Return all tensors (initializers and Constant nodes) stored in inner graphs and local functions."""
    tensors: list[InnerTensor] = []
    for node in model.graph.node:
        tensors += _named(_inside(node, _first_output(node)))
    names = Counter(function.name for function in model.functions)
    for function in model.functions:
        prefix = function.name
        # domain and overload are in the name only where it would stand for several functions
        if names[prefix] > 1:
            overload = f":{function.overload}" if function.overload else ""
            prefix = f"{function.domain}.{function.name}{overload}"
        where = f"the function {function.domain}.{function.name}"
        candidates = [(f"{prefix}/{t.name}", f"{prefix}/{t.name}", t) for t in _stored_in(function, where)]
        for node in function.node:
            candidates += _inside(node, f"{prefix}/{_first_output(node)}")
        tensors += _named(candidates)
    return tensors


def all_stored_protos(model: onnx.ModelProto) -> dict[str, TensorProto]:
    """Return the tensors of `stored_protos` and of `inner_tensors`, by name."""
    return dict(stored_protos(model.graph)) | {tensor.name: tensor.proto for tensor in inner_tensors(model)}


def without_inner_values(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which the tensors of inner graphs and functions have no values; the model if there are none."""
    if not inner_tensors(model):
        return model
    copy = deepcopy(model)
    for tensor in inner_tensors(copy):
        proto = tensor.proto
        proto.CopyFrom(TensorProto(name=proto.name, data_type=proto.data_type, dims=proto.dims))
    return copy


def _first_output(node: onnx.NodeProto) -> str:
    return next(filter(None, node.output), node.name)


Candidate = tuple[str, str, InnerTensor]
"""(name, name with the attributes, tensor)."""


def _inside(node: onnx.NodeProto, prefix: str, longer: str = "") -> Iterator[Candidate]:
    """Yield what the inner graphs of a node store, at any depth. longer: the prefix with the attributes."""
    longer = longer or prefix
    for attribute in node.attribute:
        graphs = [attribute.g] if attribute.HasField("g") else attribute.graphs
        # graphs of one attribute are told apart by their numbers
        for number, graph in enumerate(graphs):
            of_graph = f"{longer}/{attribute.name}" + (f"/{number}" if attribute.graphs else "")
            for tensor in _stored_in(graph, f"the body of {node.op_type}"):
                yield f"{prefix}/{tensor.name}", f"{of_graph}/{tensor.name}", tensor
            for inner in graph.node:
                first = _first_output(inner)
                yield from _inside(inner, f"{prefix}/{first}", f"{of_graph}/{first}")


def _stored_in(scope: Scope, where: str) -> Iterator[InnerTensor]:
    for place, tensor in enumerate(scope.initializer if isinstance(scope, onnx.GraphProto) else ()):
        yield InnerTensor(tensor.name, tensor.name, tensor, where, scope, place, is_constant=False)
    for place, node in enumerate(scope.node):
        if node.op_type != "Constant" or domain_of(node):
            continue
        for attribute in node.attribute:
            if attribute.name == "value" and attribute.HasField("t"):  # none where a call of the function gives it
                name = node.output[0]
                yield InnerTensor(name, name, attribute.t, where, scope, place, is_constant=True)


def _named(candidates: Iterable[Candidate]) -> Iterator[InnerTensor]:
    """Yield the tensors of one node of the main graph, or of one function, with names that are unique among them."""
    of_one_node = list(candidates)
    count = Counter(short for short, _, _ in of_one_node)
    for short, longer, t in of_one_node:
        yield replace(t, name=short if count[short] == 1 else longer)


# -- lifting


def lift_inner_tensors(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which the float tensors of inner graphs and functions are initializers of the main graph.

    Returns the model itself if there are none. Raises UnsupportedModel if a name is that of another value.
    """
    # most files have none: without this look their weights would be copied
    if not any(tensor.may_train for tensor in inner_tensors(model)):
        return model
    copy = deepcopy(model)
    # those of the copy, whose protos and scopes are changed in place
    lifted = [tensor for tensor in inner_tensors(copy) if tensor.may_train]
    _check_names(copy.graph, lifted)
    # by identity: two scopes may be equal, and protos have no hash
    by_scope: dict[int, dict[str, str]] = {}
    for tensor in lifted:
        by_scope.setdefault(id(tensor.scope), {})[tensor.own_name] = tensor.name
    for node in copy.graph.node:
        for body in subgraphs(node):
            _rename_in(body, {}, by_scope)
    for function in copy.functions:
        _rename_in(function, {}, by_scope)
    _pass_to_functions(copy, lifted)
    copy.graph.initializer.extend(_renamed(tensor) for tensor in lifted)
    # innermost first, and from the end: the positions before one stay the same
    for tensor in sorted(lifted, key=lambda tensor: tensor.place, reverse=True):
        if tensor.is_constant:
            del tensor.scope.node[tensor.place]
        elif isinstance(tensor.scope, onnx.GraphProto):
            del tensor.scope.initializer[tensor.place]
    return copy


def _check_names(graph: onnx.GraphProto, lifted: Iterable[InnerTensor]) -> None:
    own = {value.name for value in (*graph.input, *graph.initializer)}
    own.update(name for node in graph.node for name in node.output)
    if problems := [
        f"{tensor.own_name!r}, stored in {tensor.where}, is known as {tensor.name!r}, which is also the name of a "
        "value of the main graph; rename one of them"
        for tensor in lifted
        if tensor.name in own
    ]:
        raise UnsupportedModel(problems)


def _renamed(tensor: InnerTensor) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(tensor.proto)
    copy.name = tensor.name
    return copy


def _rename_in(scope: Scope, outer: Mapping[str, str], by_scope: Mapping[int, Mapping[str, str]]) -> None:
    """Read lifted tensors under their names in the main graph. outer: old -> new name of those of outer scopes."""
    own = {name for node in scope.node for name in node.output}
    if isinstance(scope, onnx.GraphProto):
        own |= {value.name for value in (*scope.input, *scope.initializer)}
    # a name of this scope hides that of an outer one
    renamed = {old: new for old, new in outer.items() if old not in own} | dict(by_scope.get(id(scope), {}))
    for node in scope.node:
        for position, name in enumerate(node.input):
            if name in renamed:
                node.input[position] = renamed[name]
        for body in subgraphs(node):
            _rename_in(body, renamed, by_scope)
    # a body may return a stored tensor as it is; a function that returns one keeps it (`may_train`)
    if isinstance(scope, onnx.GraphProto):
        for value in scope.output:
            value.name = renamed.get(value.name, value.name)


def _pass_to_functions(model: onnx.ModelProto, lifted: Iterable[InnerTensor]) -> None:
    """Make the lifted tensors of functions further inputs of these functions, and pass them in all calls."""
    functions = functions_of(model)
    function_of_scope = {id(scope): key for key, f in functions.items() for scope in _scopes([f])}
    own: dict[FunctionKey, list[str]] = {key: [] for key in functions}
    for tensor in lifted:
        if (key := function_of_scope.get(id(tensor.scope))) is not None:
            own[key].append(tensor.name)
    needed = {key: list(dict.fromkeys(_needed(key, own, functions))) for key in functions}
    # counted before any input is added, because functions call each other
    num_inputs = {key: len(function.input) for key, function in functions.items()}
    for scope in [*_scopes([model.graph]), *_scopes(functions.values())]:
        for node in scope.node:
            key = (node.domain, node.op_type, node.overload)
            if names := needed.get(key):
                # operands at the end may be left out
                node.input.extend([""] * (num_inputs[key] - len(node.input)))
                node.input.extend(names)
    for key, function in functions.items():
        function.input.extend(needed[key])


def _needed(
    key: FunctionKey, own: Mapping[FunctionKey, list[str]], functions: Mapping[FunctionKey, onnx.FunctionProto]
) -> Iterator[str]:
    """Yield the lifted tensors of a function and of the functions that it calls; ONNX forbids recursion."""
    yield from own[key]
    for scope in _scopes([functions[key]]):
        for node in scope.node:
            called = (node.domain, node.op_type, node.overload)
            if called in functions:
                yield from _needed(called, own, functions)


def _scopes(scopes: Iterable[Scope]) -> Iterator[Scope]:
    """Yield the scopes and all inner graphs in them."""
    for scope in scopes:
        yield scope
        for node in scope.node:
            yield from _scopes(subgraphs(node))
