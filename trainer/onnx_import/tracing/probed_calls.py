"""Remember what calls on meta tensors gave: the blocks of a network repeat them, and torch takes longer than a look-up.

    linear(meta [3, 16, 64], meta [64, 64])  ->  meta [3, 16, 64]        run once, then read from the table

A call is remembered by its function and by all that a meta tensor has: shape, strides and type. Functions of torch and
of the operator rules alone are, whose results depend on nothing else; a function of the user's may look at anything.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import _compile, _decomp, nn

PURE_MODULES = ("torch.", "onward.trainer.onnx_import.ops.", "_operator.", "builtins.", "None.")
"""Modules whose functions have no side effects, except for random numbers and functions that end with an underscore."""


class CannotCompareError(Exception):
    """An operand has no key, such as an object that is not hashable."""


def exact_key(value: Any, of_leaf: Callable[[Any], Any] = lambda leaf: None) -> Any:
    """Return a key that is equal for equal operands: numbers, names, and tuples, lists, dicts and slices of them.

    of_leaf: returns the key of an operand of another kind, or None to compare it by itself. Raises CannotCompareError.
    """
    kind = type(value)
    # the type is part of the key, because 1 == 1.0 == True; 0.0 == -0.0, but they do not compute the same, and NaN
    # would not equal itself
    if value is None or kind in (int, bool, str):
        return kind, value
    if kind is float:
        return kind, value.hex()
    if (key := of_leaf(value)) is not None:
        return key
    if isinstance(value, tuple | list):
        return kind, tuple([exact_key(item, of_leaf) for item in value])
    if isinstance(value, dict):
        return kind, tuple([(name, exact_key(item, of_leaf)) for name, item in value.items()])
    if kind is slice:
        return kind, tuple([exact_key(item, of_leaf) for item in (value.start, value.stop, value.step)])
    try:
        hash(value)
    except TypeError as error:
        raise CannotCompareError from error
    return kind, value


def meta_key(leaf: Any) -> Any:
    """Return what a call can see of a tensor on the meta device; None for another operand."""
    if type(leaf) is not torch.Tensor and type(leaf) is not nn.Parameter:
        return None
    if leaf.layout != torch.strided or leaf.is_quantized:
        raise CannotCompareError
    # a constant may carry its type of less than a byte
    return leaf.dtype, leaf.shape, leaf.stride(), leaf.is_neg(), leaf.is_conj(), getattr(leaf, "packed", None)


def call_key(function: Callable[..., Any] | str) -> Any:
    """Return the key of a function, or of a tensor method by its name; None if its results are not remembered."""
    if isinstance(function, str):
        return None if function.endswith("_") else function
    # the variables of an enclosing function are operands that no key has
    if not isinstance(function, FunctionType | BuiltinFunctionType) or getattr(function, "__closure__", None):
        return None
    pure = f"{function.__module__}.".startswith(PURE_MODULES) and not function.__name__.endswith("_")
    return function if pure else None


def module_key(module: nn.Module) -> Any:
    """Return a key of a layer without weights, by its class and its settings; None for another one."""
    kind = type(module)
    if not kind.__module__.startswith("onward.trainer.onnx_import.") or module._parameters or module._buffers:
        return None
    # children and hooks may hold anything that a key does not see
    if module._modules or module._forward_hooks or module._forward_pre_hooks:
        return None
    try:
        settings = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        return kind, exact_key(settings)
    except CannotCompareError:
        return None


class ProbedCalls:
    """The results of the calls of one import."""

    def __init__(self) -> None:
        self._results: dict[Any, Any] = {}
        without_compiler()

    def run(self, key: Any, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return run(*args, **kwargs) on meta tensors. key: of `call_key` or `module_key`; None = do not remember.

        The result may be one that an equal call gave, and nobody changes it. Raises what the call raises.
        """
        if key is not None:
            try:
                # the default type is part of it, in which torch makes tensors of Python numbers
                key = (key, torch.get_default_dtype(), exact_key(args, meta_key), exact_key(kwargs, meta_key))
            except CannotCompareError:
                key = None
            else:
                if key in self._results:
                    return self._results[key]
        with torch.no_grad():
            result = run(*args, **kwargs)
        if key is not None:
            self._results[key] = result
        return result


# -- let torch compute the shapes of results without importing its compiler, which takes as long as half of torch
#
#     F.relu(meta) -> torch._refs ... relu -> wrapper of torch._disable_dynamo -> import torch._dynamo (0.8 s), once
#
# The wrapper keeps the function from being compiled. While the compiler is not loaded, nothing is compiled, so the
# function itself does the same; as soon as something has loaded the compiler, the wrapper is torch's again.

CACHE = "__dynamo_disable"
"""Where torch's wrapper looks for what it calls. Under another name, each wrapper imports the compiler as before."""


@functools.cache
def without_compiler() -> None:
    """Let the functions that compute shapes, those of torch._refs and torch._decomp, run without the compiler."""
    if "torch._dynamo" in sys.modules:
        return
    for wrapped in _wrapped():
        if not hasattr(wrapped, CACHE):
            setattr(wrapped, CACHE, _until_loaded(wrapped))


def _until_loaded(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return wrapped(*args, **kwargs)
        import torch._dynamo

        disabled = torch._dynamo.disable(wrapped, True, wrapping=False)  # type: ignore[no-untyped-call]
        setattr(wrapped, CACHE, disabled)
        return disabled(*args, **kwargs)

    return run


def _wrapped() -> Iterator[Callable[..., Any]]:
    """Yield the functions inside of torch's wrappers; the wrappers are known by their code, which all of them share."""
    code = _compile._disable_dynamo(lambda: None).__code__
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("torch._refs")]
    tables = [vars(module) for module in modules] + list(_decomp.global_decomposition_table.values())
    waiting = set[FunctionType]()
    for table in tables:
        waiting |= {entry for entry in table.values() if isinstance(entry, FunctionType)}
    seen = set(waiting)
    while waiting:
        function = waiting.pop()
        # the variables of a wrapper and not __wrapped__, which names the innermost function
        variables = _variables(function)
        if function.__code__ is code:
            yield variables["fn"]
        # a wrapper may be inside of other wrappers, each in the variables of the next one
        inside = {value for value in variables.values() if isinstance(value, FunctionType)} - seen
        seen |= inside
        waiting |= inside


def _variables(function: FunctionType) -> dict[str, Any]:
    """Return the variables of enclosing functions that a function reads, without those that have no value."""
    variables = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            variables[name] = cell.cell_contents
    return variables
