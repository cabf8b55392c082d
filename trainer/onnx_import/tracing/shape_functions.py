"""Let torch compute the shapes of results without importing its compiler, which takes as long as half of torch.

    F.relu(meta) -> torch._refs ... relu -> wrapper of torch._disable_dynamo -> import torch._dynamo (0.8 s), once

The wrapper keeps the function from being compiled. While the compiler is not loaded, nothing is compiled, so the
function itself does the same; as soon as something has loaded the compiler, the wrapper is torch's again.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torch import _compile, _decomp

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
