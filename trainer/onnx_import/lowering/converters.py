"""Converters of onnx2torch: those that users register, and onnx2torch's own for operators without a rule.

Importing onnx2torch takes seconds (it imports torchvision), so it is imported only when a model needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import onnx

from onward.trainer.errors import ConfigError, UnsupportedNode
from onward.trainer.onnx_graph.torchvision_import import import_torchvision
from onward.trainer.onnx_import.tracing.tracing import Tracer
from onward.trainer.onnx_import.tracing.values import NeedsRuntimeValues, Value
from onward.trainer.run.allowed_code import execute

Converter = Callable[[Any, Any], Any]


def onnx2torch_registry() -> dict[Any, Converter]:
    """Import onnx2torch and return its converters by (domain, operator, version)."""
    import_torchvision()
    from onnx2torch.node_converters import registry

    converters: dict[Any, Converter] = registry._CONVERTER_REGISTRY
    return converters


def user_converter(node: onnx.NodeProto, version: int) -> Converter | None:
    """Return the converter that a user registered through `onnx2torch.add_converter`, if there is one."""
    if "onnx2torch" not in sys.modules:  # then nobody can have registered one
        return None
    converter = onnx2torch_registry().get((node.domain, node.op_type, version))
    return None if converter is None or converter.__module__.startswith("onnx2torch.") else converter


def onnx2torch_converter(node: onnx.NodeProto, version: int) -> Converter | None:
    """Return onnx2torch's own converter; it is used for operators without a rule."""
    try:
        return onnx2torch_registry().get((node.domain, node.op_type, version))
    except (ImportError, RuntimeError):  # torchvision cannot be loaded at all
        return None


def run_converter(
    converter: Converter, node: onnx.NodeProto, *, graph: onnx.GraphProto, operands: Sequence[Value], tracer: Tracer
) -> tuple[Value, ...]:
    """Record the module that a converter returns, called on the operands that it asks for. Raises UnsupportedNode."""
    from onnx2torch.onnx_graph import OnnxGraph
    from onnx2torch.onnx_node import OnnxNode

    name = (node.name or node.output[0]).replace(".", "_").replace("/", "_")
    try:
        # converters are written for onnx2torch's own classes
        module, mapping = converter(OnnxNode(node, unique_name=name), OnnxGraph(graph))
    except (NotImplementedError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedNode(f"its onnx2torch converter refuses it: {error}") from error
    # weights must be initializers: only these have a place in the file to be written back to
    if any(parameter.requires_grad for parameter in module.parameters()):
        raise UnsupportedNode("its onnx2torch converter keeps weights of its own, which could not be written back")
    values = dict(zip(node.input, operands, strict=True))
    if not all(name in values for name in mapping.inputs):
        raise UnsupportedNode("its onnx2torch converter reads values that are not its operands")
    wanted = [tracer.to_tensor(values[name]) for name in mapping.inputs]
    try:
        result = tracer.call_module(name, module, *wanted)
    except NeedsRuntimeValues:
        if len(node.output) > 1:
            raise UnsupportedNode("its onnx2torch converter may give one of its several outputs") from None
        return tracer.add_runtime_node(name, module, wanted, [None])
    if not isinstance(result, tuple | list):
        if sum(map(bool, node.output)) > 1:
            raise UnsupportedNode("its onnx2torch converter gives one of its several outputs")
        # one value for each output that has a name, as all rules return them
        result = (result,)
    return tuple(result)


def load_converters(files: Iterable[Path]) -> None:
    """Run the Python files of `model.converters`, in which users register converters.

    Raises ConfigError with the exception of every file that cannot be run.
    """
    problems = list[str]()
    for file in files:
        import_torchvision()  # before the file imports onnx2torch
        try:
            execute(file, "model.converters", f"converters_{file.stem}")
        except ConfigError as error:
            problems += error.problems
        except Exception as error:  # a user's code may raise anything
            problems.append(f"model.converters: {file}: {type(error).__name__}: {error}")
    if problems:
        raise ConfigError(problems)
