"""Record torch calls on an fx graph, at two sizes of every dynamic dimension.

Each call is also run on meta tensors (no memory, no arithmetic) at two trial sizes. Comparing both results shows which
numbers depend on the input's size; no symbolic algebra is needed, and no batch size gets into the graph:

    ONNX: y = Reshape(x, Concat(Shape(x)[0:1], [-1]))        x: float [N, 4, 8]

                        at N = 3       at N = 5        in the graph
    x                   [3, 4, 8]      [5, 4, 8]       placeholder x
    Shape(x)            3, 4, 8        5, 4, 8         size(x, 0), 4, 8     3 != 5: a traced int; 4, 8 are static
    Concat              3, -1          5, -1           no call: a ShapeArray of a traced int and -1
    y                   [3, 32]        [5, 32]         reshape(x, [size, -1])

A number that is equal at both sizes although it was computed from a dynamic length, such as N % 2 above, is taken as a
constant, and the graph checks it when it runs (shape_assumptions.py).
"""

from __future__ import annotations

import copy
import inspect
import keyword
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from onward.trainer.onnx_import.tracing.probed_calls import ProbedCalls
from onward.trainer.onnx_import.tracing.probing import as_function, probe
from onward.trainer.onnx_import.tracing.shape_assumptions import (
    can_differ,
    check_assumption,
    check_kept,
    expression_text,
    lengths_equal_by_chance,
)
from onward.trainer.onnx_import.tracing.values import FreedBatch, ShapeArray, Traced, Value, shape_array
from onward.trainer.onnx_import.tracing.wide_integers import call_in_int64, needs_int64

ANCHOR = "_anchor"
"""Name of an empty buffer. Tensors that the graph creates are put on its device, which follows `module.to`."""

RESERVED = frozenset(
    {"self", "code", "graph", "meta", "input_names", "output_names", "onnx_names", "roles", "copies", "quantizers"}
)
"""Attribute names that fx or ImportedGraph use; a weight of such a name gets an underscore."""

MAX_SHAPE_INTS = 4096
MAX_SHAPE_FLOATS = 64
"""Larger constants are data, not shapes."""


class OpaqueCallTracer(fx.Tracer):
    """Retraces the generated code of a pickled graph without tracing into the functions that it calls."""

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        # fx pickles a GraphModule as generated code and traces it again when it is unpickled. Tracing into an operator
        # rule would then record its Python branches for the tracer's proxies; autowrapped functions stay single calls.
        called = type(root).forward.__globals__.values()
        self._autowrap_function_ids.update(id(value) for value in called if inspect.isfunction(value))
        return super().trace(root, concrete_args)


class Tracer:
    """Builds the fx graph and the module that holds its weights."""

    constants_device: torch.device | None = None
    """Where constants made of Python numbers are put; None is torch's default device."""

    batch: FreedBatch | None = None
    """The batch that the file declares as fixed, if it is treated as dynamic."""

    def __init__(self, *, training: bool = False) -> None:
        self.graph = fx.Graph(tracer_cls=OpaqueCallTracer)
        self.root = nn.Module()
        self.training = training
        self._known_calls = ProbedCalls()
        self._constants: dict[int, tuple[torch.Tensor, fx.Node]] = {}
        self._sizes: dict[tuple[fx.Node, int], Value] = {}
        self._anchor: Traced | None = None
        self._shape_arrays: dict[fx.Node, ShapeArray] = {}
        """Tensor in the graph -> the shape arithmetic that it was made from."""
        # counted, because an import with fewer of them is preferred (driver.py, `ImportAttempt.cost`)
        self.runtime_nodes: list[fx.Node] = []
        self.assumptions: list[str] = []
        """Equations that hold at both trial sizes, but not at all sizes; the graph checks them."""

    # -- calls

    def call(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Value:
        """Call a function, or the tensor method of that name: at once on constants, else when the graph runs."""
        # torch implements few operators for uint16, uint32 and uint64
        if needs_int64(function, args, kwargs):
            return call_in_int64(self, function, args, kwargs)
        return self.call_as_is(function, args, kwargs)

    def call_as_is(self, function: Callable[..., Any] | str, args: Any, kwargs: Any) -> Value:
        """Call without a detour through int64 for wide unsigned operands."""
        leaves = pytree.tree_leaves((args, kwargs))
        # constant folding: arithmetic of stored tensors leaves no nodes in the graph
        if not any(isinstance(leaf, Traced) for leaf in leaves):
            with torch.no_grad():
                return as_function(function)(*args, **kwargs)
        # probed before it is recorded: a call that torch refuses must leave no node
        probes = probe(function, args, kwargs, self._known_calls)
        record = self.graph.call_method if isinstance(function, str) else self.graph.call_function
        node = record(function, *self._nodes((args, kwargs)))  # type: ignore[arg-type]
        return self._wrap(node, probes)

    def call_module(self, name: str, module: nn.Module, *args: Any) -> Value:
        """Call a module that follows train() and eval(), registered on the root as `name` or a free name like it."""
        if not any(isinstance(leaf, Traced) for leaf in pytree.tree_leaves(args)):
            return module.train(self.training)(*args)
        # a copy, because .to("meta") drops the data of a module in place
        probes = probe(copy.deepcopy(module).to("meta").eval(), args, {}, self._known_calls)
        name = self.attach(name, module.train())
        return self._wrap(self.graph.call_module(name, *self._nodes((args,))), probes)

    def add_runtime_node(
        self, name: str, module: nn.Module, args: Sequence[Any], results: Sequence[tuple[Any, Any] | None]
    ) -> tuple[Traced, ...]:
        """Call a module without probing it.

        results: one entry for each output: its probes if ONNX's shape inference gives them, else None.
        """
        node = self.graph.call_module(self.attach(name, module.train()), *self._nodes((tuple(args),)))
        self.runtime_nodes.append(node)
        # the module returns a tuple for several outputs, and the tensor itself for one
        parts = [node]
        if len(results) > 1:
            parts = [self.graph.call_function(operator.getitem, (node, i)) for i in range(len(results))]
        return tuple(Traced(self, part, probes) for part, probes in zip(parts, results, strict=True))

    def size(self, tensor: Value, dim: int) -> Value:
        """Return the length of a dimension: an int if it is static, else a traced int, recorded once per tensor."""
        if isinstance(tensor, torch.Tensor):
            return tensor.shape[dim]
        # -1 and ndim - 1 are the same dimension, and should be one node
        key = (tensor.node, dim % tensor.ndim)
        if key not in self._sizes:
            self._sizes[key] = self.call("size", tensor, key[1])
        return self._sizes[key]

    def check_kept(self, lengths: Mapping[int, Traced], node: str) -> None:
        """Let the graph check the dynamic lengths of what a Squeeze without axes reads, by their dimension."""
        shapes = [placeholder.meta["probes"] for placeholder in self.graph.nodes if placeholder.op == "placeholder"]
        # the batch is known by its two trial lengths, which no other dynamic dimension has (trial_sizes.py)
        batches = {(first.shape[0], second.shape[0]) for first, second in filter(None, shapes) if first.ndim}
        for dim, length in lengths.items():
            # one that is freed is compared with the file's own by fixed_batch.py
            if (is_batch := length.probes in batches) and self.batch is not None:
                continue
            self.graph.call_function(check_kept, (length.node, dim, node), {"is_batch": is_batch})

    # -- inputs, weights and constants

    def placeholder(self, name: str, probes: tuple[torch.Tensor, torch.Tensor] | None) -> Traced:
        """Add a graph input; without probes it may be a tensor of any rank, or a sequence."""
        return Traced(self, self.graph.placeholder(name), probes)

    def tensor(self, name: str, tensor: torch.Tensor, *, persistent: bool = True) -> Traced:
        """Register a Parameter or buffer on the root and return it as a value of the graph."""
        # a weight has the same shape at both trial sizes
        meta = torch.empty_like(tensor, device="meta", requires_grad=False)
        return Traced(self, self.graph.get_attr(self.attach(name, tensor, persistent=persistent)), (meta, meta))

    def is_running_statistic(self, value: Value) -> bool:
        """Return whether a value is a stored tensor that training updates: a persistent buffer of the root."""
        if not isinstance(value, Traced) or value.node.op != "get_attr":
            return False
        owner, _, attribute = str(value.node.target).rpartition(".")
        module = self.root.get_submodule(owner)
        return attribute in module._buffers and attribute not in module._non_persistent_buffers_set

    @property
    def anchor(self) -> Traced:
        """Return the empty buffer whose device is that of tensors which the graph creates."""
        if self._anchor is None:
            self._anchor = self.tensor(ANCHOR, torch.empty(0), persistent=False)
        return self._anchor

    def attach(self, name: str, what: nn.Module | torch.Tensor, *, persistent: bool = True) -> str:
        """Register a tensor, with dots in its name as a path, or a module on the root; return the path.

        Underscores are appended where a part of the path is taken already.
        """
        owner = self.root
        path = []
        # a dot in the name of a module would be read as a path
        if isinstance(what, nn.Module):
            name = name.replace(".", "_").replace("/", "_")
        # dots of initializer names become submodules, so that paths of parameters read as in the original module
        *containers, attribute = [_identifier(part) for part in name.split(".")]
        for part in containers:
            # "conv" and "conv.weight" may both be initializers: a tensor cannot contain another one
            while hasattr(owner, part) and type(owner._modules.get(part)) is not nn.Module:
                part += "_"
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
            path.append(part)
        while hasattr(owner, attribute):
            attribute += "_"
        if isinstance(what, nn.Parameter):
            owner.register_parameter(attribute, what)
        elif isinstance(what, nn.Module):
            owner.add_module(attribute, what)
        else:
            owner.register_buffer(attribute, what, persistent=persistent)
        return ".".join([*path, attribute])

    # -- shape arithmetic

    def shape_ints(self, value: Value) -> ShapeArray | None:
        """Return the integers of a shape-arithmetic value, a tensor made from one or a small constant; else None."""
        if isinstance(value, np.ndarray):
            return value
        if isinstance(value, Traced):
            return self._shape_arrays.get(value.node)
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.numel() > MAX_SHAPE_INTS:
            return None
        return shape_array(value)

    def shape_numbers(self, value: Value) -> ShapeArray | None:
        """Return `shape_ints`, or the numbers of a small fp32 constant (scales of Resize, for example)."""
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.numel() <= MAX_SHAPE_FLOATS:
            return shape_array(value)
        return self.shape_ints(value)

    def to_tensor(self, value: Value) -> Value:
        """Convert a ShapeArray to a tensor (int64; fp32 of floats; bool of truth values); return others unchanged."""
        if not isinstance(value, np.ndarray):
            return value
        numbers = list(value.reshape(-1))
        shape = list(value.shape)
        dynamic = any(isinstance(number, Traced) for number in numbers)
        if any(isinstance(n.probes[0] if isinstance(n, Traced) else n, float) for n in numbers):
            # constants alone need no node
            if not dynamic:
                return filled(torch.empty(0), numbers, shape, torch.float32)
            traced = self.call(filled, self.anchor, numbers, shape, torch.float32)
        elif dynamic:
            traced = self.call(filled, self.anchor, numbers, shape, torch.int64)
        else:
            truth = bool(numbers) and all(isinstance(number, bool) for number in numbers)
            dtype = torch.bool if truth else torch.int64
            return filled(torch.empty(0, device=self.constants_device), numbers, shape, dtype)
        # a later rule that reads this tensor as a shape gets the integers back
        self._shape_arrays[traced.node] = value
        return traced

    def check_lengths(self) -> None:
        """Let the graph check the lengths of its tensors that are equal at both trial sizes, but not at all sizes."""
        runtime = set(self.runtime_nodes)
        for node, dim, length in lengths_equal_by_chance(self.graph, self.root, runtime, self._known_calls):
            with self.graph.inserting_after(node):
                size = self.graph.call_method("size", (node, dim))
            self._check(size, length)

    # -- recording

    def _nodes(self, args: Any) -> Any:
        """Replace traced values by their nodes, and constants by nodes that read a buffer."""

        def node(leaf: Any) -> Any:
            if isinstance(leaf, Traced):
                return leaf.node
            return self._constant(leaf) if isinstance(leaf, torch.Tensor) else leaf

        return pytree.tree_map(node, args)

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        if id(tensor) not in self._constants:
            traced = self.tensor(f"_constants.c{len(self._constants)}", tensor, persistent=False)
            self._constants[id(tensor)] = (tensor, traced.node)  # holding the tensor keeps its id from being reused
        return self._constants[id(tensor)][1]

    def _wrap(self, node: fx.Node, probes: tuple[Any, Any]) -> Value:
        """Return the result of a recorded call as a value; a number that is equal at both sizes becomes a constant."""
        first, second = probes
        if isinstance(first, list | tuple) and not isinstance(first, torch.Size):
            parts = enumerate(zip(first, second, strict=True))
            return tuple(self._wrap(self.graph.call_function(operator.getitem, (node, i)), pair) for i, pair in parts)
        if isinstance(first, bool | int | float) and first == second:
            # a `size` that is equal at both trial sizes is a static dimension; arithmetic can be equal by accident
            if node.target != "size" and can_differ(node, first):
                self._check(node, first)
            return first
        return Traced(self, node, probes)

    def _check(self, node: fx.Node, assumed: float) -> None:
        """Let the graph check that a number is what it is at both trial sizes."""
        what = expression_text(node)
        self.assumptions.append(f"{what} is {assumed}")
        with self.graph.inserting_after(node):
            self.graph.call_function(check_assumption, (node, assumed, what))


def filled(anchor: torch.Tensor, values: Sequence[float], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor [*shape] of the given numbers, on the anchor's device.

    It is filled there: a copy from the host would make a GPU wait, and cannot be captured in a CUDA graph.
    """
    parts = [anchor.new_full((1,), value, dtype=dtype) for value in values]
    return (torch.cat(parts) if parts else anchor.new_empty(0, dtype=dtype)).reshape(shape)


def _identifier(part: str) -> str:
    """Return a path component that torch and fx accept; most names pass unchanged."""
    part = part.translate({ord(c): "_" for c in "\"'\\\n\r\t"}) or "_"
    return f"{part}_" if keyword.iskeyword(part) or part in RESERVED else part
