"""Recording torch calls on an fx graph, with what each gives for two sizes of every dynamic dimension.

Every call is tried on meta tensors (no memory, no arithmetic) at two sets of input sizes. A dimension
that is equal in both is static, and becomes a Python int; one that differs is asked of its tensor when
the graph runs. So no batch size is ever baked in, and no symbolic algebra is needed.
"""

from __future__ import annotations

import copy
import inspect
import keyword
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from onward.trainer.onnx_graph.element_types import HostInts, RunTime, Unsupported, Value
from onward.trainer.onnx_import.shape_assumptions import may_differ, must_be, told

ANCHOR = "_anchor"
"""An empty buffer whose device is where tensors made in the graph are put."""


class Traced:
    """A tensor or an int that is known only when the graph runs; a sequence of tensors, too, if it is not even tried.

    `probes` is what it is for each of the two sets of input sizes: two meta tensors, or two ints. Without
    them (`known` is false) even its rank and its type are known only at run time; asking raises RunTime.
    """

    __slots__ = ("_probes", "node", "packed", "tracer")

    def __init__(self, tracer: Tracer, node: fx.Node, probes: tuple[Any, Any] | None) -> None:
        self.tracer = tracer
        self.node = node
        self._probes = probes
        self.packed: int | None = None  # see onnx_graph.element_types.element_type
        if probes is not None and isinstance(probes[0], torch.Tensor):
            node.meta["rank"] = probes[0].ndim
        node.meta["probes"] = probes  # for the rewrites (trainer/onnx_import/passes/rewriter.py)

    @property
    def known(self) -> bool:
        """Whether its rank and its type are known."""
        return self._probes is not None

    @property
    def probes(self) -> tuple[Any, Any]:
        if self._probes is None:
            raise RunTime("the shape of an operand is known only at run time")
        return self._probes

    @property
    def ndim(self) -> int:
        return int(self.probes[0].ndim)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.probes[0].dtype
        return dtype

    # integers only
    def __add__(self, other: Value) -> Value:
        return self.tracer.call(operator.add, self, other)

    def __radd__(self, other: Value) -> Value:
        return self.tracer.call(operator.add, other, self)

    def __sub__(self, other: Value) -> Value:
        return self.tracer.call(operator.sub, self, other)

    def __rsub__(self, other: Value) -> Value:
        return self.tracer.call(operator.sub, other, self)

    def __mul__(self, other: Value) -> Value:
        return self.tracer.call(operator.mul, self, other)

    def __rmul__(self, other: Value) -> Value:
        return self.tracer.call(operator.mul, other, self)

    def __floordiv__(self, other: Value) -> Value:
        return self.tracer.call(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Value) -> Value:
        return self.tracer.call(operator.floordiv, other, self)

    def __mod__(self, other: Value) -> Value:
        return self.tracer.call(operator.mod, self, other)

    def __neg__(self) -> Value:
        return self.tracer.call(operator.neg, self)


class WholeCalls(fx.Tracer):
    """Records again, from a pickled graph's code, the calls it makes: as they are, not what happens in them."""

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        called = type(root).forward.__globals__.values()
        self._autowrap_function_ids.update(id(value) for value in called if inspect.isfunction(value))
        return super().trace(root, concrete_args)


class Tracer:
    """Builds the fx graph and the module that holds its weights."""

    def __init__(self, *, training: bool = False) -> None:
        self.graph = fx.Graph(tracer_cls=WholeCalls)
        self.root = nn.Module()
        self.training = training
        self._constants: dict[int, tuple[torch.Tensor, fx.Node]] = {}
        self._sizes: dict[tuple[fx.Node, int], Value] = {}
        self._anchor: Traced | None = None
        self._hosts: dict[fx.Node, HostInts] = {}
        self.leaves: list[fx.Node] = []
        self.assumed: list[str] = []
        """What holds at both sizes but not at all; the graph checks it."""

    def call(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Value:
        """Apply a function, or the tensor method of that name: at once to constants, else when the graph runs."""
        if function not in OF_ANY_TYPE and any(map(is_wide, pytree.tree_leaves((args, kwargs)))):
            return in_int64(self, function, args, kwargs)
        return self._call(function, args, kwargs)

    def _call(self, function: Callable[..., Any] | str, args: Any, kwargs: Any) -> Value:
        run = _method(function) if isinstance(function, str) else function
        leaves = pytree.tree_leaves((args, kwargs))
        if not any(isinstance(leaf, Traced) for leaf in leaves):
            with torch.no_grad():
                return run(*args, **kwargs)
        probes = self._probe(run, args, kwargs)
        record = self.graph.call_method if isinstance(function, str) else self.graph.call_function
        node = record(function, *self._nodes((args, kwargs)))  # type: ignore[arg-type]
        return self._wrap(node, probes)

    def call_module(self, name: str, module: nn.Module, *args: Any) -> Value:
        """Apply a module that follows train() and eval(); `name` is where it hangs, made unique."""
        if not any(isinstance(leaf, Traced) for leaf in pytree.tree_leaves(args)):
            return module.train(self.training)(*args)
        probes = self._probe(copy.deepcopy(module).to("meta").eval(), args, {})
        name = self.attach(name, module.train())
        return self._wrap(self.graph.call_module(name, *self._nodes((args,))), probes)

    def leaf(
        self, name: str, module: nn.Module, args: Sequence[Any], results: Sequence[tuple[Any, Any] | None]
    ) -> tuple[Traced, ...]:
        """Apply a module whose results are not tried, but known by their probes or not at all; several are a tuple."""
        node = self.graph.call_module(self.attach(name, module.train()), *self._nodes((tuple(args),)))
        self.leaves.append(node)
        parts = [node]
        if len(results) > 1:
            parts = [self.graph.call_function(operator.getitem, (node, i)) for i in range(len(results))]
        return tuple(Traced(self, part, probes) for part, probes in zip(parts, results, strict=True))

    def placeholder(self, name: str, probes: tuple[torch.Tensor, torch.Tensor] | None) -> Traced:
        """A graph input; without probes it may be anything."""
        return Traced(self, self.graph.placeholder(name), probes)

    def tensor(self, name: str, tensor: torch.Tensor, *, persistent: bool = True) -> Traced:
        """A Parameter or buffer, readable in the graph; it gets the nearest attribute path to `name`."""
        probe = torch.empty_like(tensor, device="meta", requires_grad=False)
        return Traced(self, self.graph.get_attr(self.attach(name, tensor, persistent=persistent)), (probe, probe))

    @property
    def anchor(self) -> Traced:
        """Functions that make a tensor from numbers take this to learn the device."""
        if self._anchor is None:
            self._anchor = self.tensor(ANCHOR, torch.empty(0), persistent=False)
        return self._anchor

    def size(self, tensor: Value, dim: int) -> Value:
        """The length of a dimension: an int where it is static, else a traced int, asked for once."""
        if isinstance(tensor, torch.Tensor):
            return tensor.shape[dim]
        key = (tensor.node, dim % tensor.ndim)
        if key not in self._sizes:
            self._sizes[key] = self.call("size", tensor, key[1])
        return self._sizes[key]

    def attach(self, name: str, what: nn.Module | torch.Tensor, *, persistent: bool = True) -> str:
        """Hang a tensor or a module on the root, dots in its name becoming a path; returns the path it got."""
        owner, path = self.root, []
        *containers, leaf = [_identifier(part) for part in name.split(".")]
        for part in containers:
            while hasattr(owner, part) and type(owner._modules.get(part)) is not nn.Module:
                part += "_"
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
            path.append(part)
        while hasattr(owner, leaf):
            leaf += "_"
        if isinstance(what, nn.Parameter):
            owner.register_parameter(leaf, what)
        elif isinstance(what, nn.Module):
            owner.add_module(leaf, what)
        else:
            owner.register_buffer(leaf, what, persistent=persistent)
        return ".".join([*path, leaf])

    # -- host integers

    def host_ints(self, value: Value) -> HostInts | None:
        """The value as host integers, if that is what it is, was made from, or is a small constant of."""
        if isinstance(value, np.ndarray):
            return value
        if isinstance(value, Traced):
            return self._hosts.get(value.node)
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.numel() > 4096:
            return None
        return _as_host_ints(value)

    def host_numbers(self, value: Value) -> HostInts | None:
        """The same, or a small constant of floats."""
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.numel() <= 64:
            return _as_host_ints(value)
        return self.host_ints(value)

    def to_tensor(self, value: Value) -> Value:
        """Host numbers as an int64 (or, of floats, fp32; of truth values, bool) tensor; other values as they are."""
        if not isinstance(value, np.ndarray):
            return value
        numbers, shape = list(value.reshape(-1)), list(value.shape)
        if any(isinstance(n.probes[0] if isinstance(n, Traced) else n, float) for n in numbers):
            if not any(isinstance(number, Traced) for number in numbers):
                return floats_of(torch.empty(0), numbers, shape)
            traced = self.call(floats_of, self.anchor, numbers, shape)
            self._hosts[traced.node] = value
            return traced
        if not any(isinstance(number, Traced) for number in numbers):
            truth = bool(numbers) and all(isinstance(number, bool) for number in numbers)
            device = self._empty.device if isinstance(self, Eager) else None
            return torch.tensor(numbers, dtype=torch.bool if truth else torch.int64, device=device).reshape(shape)
        traced = self.call(tensor_of, self.anchor, numbers, shape)
        self._hosts[traced.node] = value
        return traced

    # -- probing and recording

    def _probe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        def of(side: int) -> Any:
            def pick(leaf: Any) -> Any:
                if isinstance(leaf, Traced):
                    return leaf.probes[side]
                return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

            picked, named = pytree.tree_map(pick, (args, kwargs))
            with torch.no_grad():
                return run(*picked, **named)

        try:
            first, second = of(0), of(1)
            if isinstance(first, list | tuple) and len(first) != len(second):
                raise RunTime("how many results it has depends on a dynamic dimension")
            return first, second
        except REFUSALS as error:
            reason = f"torch refuses it: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            if _needs_values(error) or _fits_some_size(run, args, kwargs):
                raise RunTime(reason) from error
            raise Unsupported(reason) from error

    def _nodes(self, args: Any) -> Any:
        """Replace traced values by their nodes and constants by nodes that read a buffer."""

        def node(leaf: Any) -> Any:
            if isinstance(leaf, Traced):
                return leaf.node
            return self._constant(leaf) if isinstance(leaf, torch.Tensor) else leaf

        return pytree.tree_map(node, args)

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        if id(tensor) not in self._constants:
            traced = self.tensor(f"_constants.c{len(self._constants)}", tensor, persistent=False)
            self._constants[id(tensor)] = (tensor, traced.node)  # keeps the tensor alive, so that its id stays its own
        return self._constants[id(tensor)][1]

    def _wrap(self, node: fx.Node, probes: tuple[Any, Any]) -> Value:
        first, second = probes
        if isinstance(first, list | tuple) and not isinstance(first, torch.Size):
            parts = enumerate(zip(first, second, strict=True))
            return tuple(self._wrap(self.graph.call_function(operator.getitem, (node, i)), pair) for i, pair in parts)
        if isinstance(first, bool | int | float) and first == second:
            if node.target != "size" and may_differ(node, first):
                self.assumed.append(f"{told(node)} is {first}")
                self.graph.call_function(must_be, (node, first, told(node)))
            return first
        return Traced(self, node, probes)


# -- unsigned integers of more than a byte, with which torch stores but hardly computes

WIDE = (torch.uint16, torch.uint32, torch.uint64)

OF_ANY_TYPE = ("to", "view", "size", "reshape", "permute", torch.unsqueeze, torch.squeeze, torch.zeros_like)
"""Calls that torch has for every type, and casts."""

MODULO = (
    torch.add, torch.sub, torch.mul, torch.neg, torch.eq, torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor,
    torch.bitwise_not, torch.bitwise_left_shift, torch.cat, torch.stack, torch.split, torch.flip, torch.where, "repeat",
)  # fmt: skip
"""Calls that are right in int64 for every uint64: others are refused the values that int64 does not have."""


def is_wide(leaf: Any) -> bool:
    """Whether it is a tensor of such integers."""
    return (isinstance(leaf, torch.Tensor) or _is_tensor(leaf)) and leaf.dtype in WIDE


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Traced) and leaf.known and isinstance(leaf.probes[0], torch.Tensor)


def in_int64(tracer: Tracer, function: Callable[..., Any] | str, args: Any, kwargs: Any) -> Value:
    """A call with such operands: computed in int64, and what torch gives the operands' type cast back to it."""
    run = _method(function) if isinstance(function, str) else function

    def probe(leaf: Any) -> Any:
        if isinstance(leaf, Traced):
            return leaf.probes[0]
        return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

    def widen(leaf: Any) -> Any:
        if not is_wide(leaf):
            return leaf
        checked = leaf.dtype == torch.uint64 and function not in MODULO
        return tracer._call(to_int64_if_it_fits if checked else "to", (leaf, torch.int64)[: 1 if checked else 2], {})

    try:
        picked, named = pytree.tree_map(probe, (args, kwargs))
        expected = run(*picked, **named)
    except REFUSALS as error:
        raise Unsupported(f"torch refuses it: {str(error).splitlines()[0]}") from error
    widened, widened_named = pytree.tree_map(widen, (args, kwargs))
    result = tracer._call(function, widened, widened_named)

    def narrow(value: Value, like: Any) -> Value:
        return tracer._call("to", (value, like.dtype), {}) if is_wide(like) else value

    if isinstance(expected, list | tuple):
        return tuple(narrow(*pair) for pair in zip(result, expected, strict=True))
    return narrow(result, expected)


def to_int64_if_it_fits(x: torch.Tensor) -> torch.Tensor:
    """Cast uint64 to int64. Raises RuntimeError for values of 2^63 and more."""
    cast = x.to(torch.int64)
    if cast.device.type != "meta" and bool((cast < 0).any()):
        raise RuntimeError("uint64 values of 2^63 and more are not implemented here")
    return cast


class Eager(Tracer):
    """Computes at once, on real tensors and with gradients: how a leaf runs the rules that build graphs."""

    def __init__(self, device: torch.device, *, training: bool) -> None:
        super().__init__(training=training)
        self._empty = torch.empty(0, device=device)

    def _call(self, function: Callable[..., Any] | str, args: Any, kwargs: Any) -> Value:
        return (_method(function) if isinstance(function, str) else function)(*args, **kwargs)

    def call_module(self, name: str, module: nn.Module, *args: Any) -> Value:
        own = [arg for arg in args[1:3] if isinstance(arg, nn.Parameter)]
        if hasattr(module, "frozen"):  # a BatchNormalization, whose statistics rest with its scale and bias
            vars(module)["frozen"] = bool(own) and not any(parameter.requires_grad for parameter in own)
        return module.to(self._empty.device).train(self.training)(*args)

    def size(self, tensor: Value, dim: int) -> Value:
        return tensor.shape[dim]

    @property
    def anchor(self) -> Value:
        return self._empty

    def host_ints(self, value: Value) -> HostInts | None:
        if isinstance(value, np.ndarray):
            return value
        return _as_host_ints(value) if isinstance(value, torch.Tensor) and not value.is_floating_point() else None


REFUSALS = (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError)
"""What torch raises for operands it does not take."""


def _needs_values(error: Exception) -> bool:
    """Whether torch says that it would have to look at the values: a meta tensor has none."""
    return "meta" in str(error).lower() and not isinstance(error, IndexError | TypeError)


def _fits_some_size(run: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether the call works for some lengths of the dynamic dimensions: then only the run can refuse it."""
    traced = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Traced)]
    if not any(_is_dynamic(leaf) for leaf in traced):
        return False

    def works(length: int) -> bool:
        def pick(leaf: Any) -> Any:
            if not isinstance(leaf, Traced):
                return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf
            first, second = leaf.probes
            if not isinstance(first, torch.Tensor):
                return first if first == second else length
            shape = [a if a == b else length for a, b in zip(first.shape, second.shape, strict=True)]
            return torch.empty(shape, dtype=first.dtype, device="meta")

        try:
            picked, named = pytree.tree_map(pick, (args, kwargs))
            with torch.no_grad():
                run(*picked, **named)
        except REFUSALS:
            return False
        return True

    return any(works(length) for length in (1, 2, 4, 7, 12, 60, 224))


def _is_dynamic(value: Traced) -> bool:
    first, second = value.probes
    return bool(first.shape != second.shape if isinstance(first, torch.Tensor) else first != second)


def _as_host_ints(tensor: torch.Tensor) -> HostInts:
    array = np.empty(tuple(tensor.shape), dtype=object)
    array[...] = np.array(tensor.tolist(), dtype=object)
    return array


def floats_of(anchor: torch.Tensor, values: list[float], shape: list[int]) -> torch.Tensor:
    """An fp32 tensor of the given numbers, on the anchor's device."""
    return torch.tensor(values, dtype=torch.float32, device=anchor.device).reshape(shape)


def tensor_of(anchor: torch.Tensor, values: list[int], shape: list[int]) -> torch.Tensor:
    """An int64 tensor of the given numbers, on the anchor's device."""
    return torch.tensor(values, dtype=torch.int64, device=anchor.device).reshape(shape)


TAKEN = frozenset({"self", "code", "graph", "meta", "input_names", "output_names", "onnx_names", "roles", "copies"})
"""What the code of a graph and the module around it call something of their own."""


def _method(name: str) -> Callable[..., Any]:
    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor, name)(*args, **kwargs)

    return run


def _identifier(part: str) -> str:
    """A path component torch and fx accept; most names pass unchanged."""
    part = part.translate({ord(c): "_" for c in "\"'\\\n\r\t"}) or "_"
    return f"{part}_" if keyword.iskeyword(part) or part in TAKEN else part
