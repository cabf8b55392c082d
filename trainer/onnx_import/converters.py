"""onnx2torch as registry: our rules are filed there, and converters filed there by others are used here.

Importing onnx2torch costs torchvision, so nothing here does until it is needed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.element_types import RunTime, Unsupported, Value
from onward.trainer.onnx_import.registry import RULES, Call, Rule, run_rule
from onward.trainer.onnx_import.torchvision_import import import_torchvision
from onward.trainer.onnx_import.tracing import Eager, Tracer

Converter = Callable[[Any, Any], Any]

WITH_BODIES = ("If", "Loop", "Scan", "SequenceMap")
"""Operators with inner graphs, which onnx2torch has no place for."""


def _registry() -> dict[Any, Converter]:
    """Every converter by (domain, operator, version)."""
    import_torchvision()
    from onnx2torch.node_converters import registry

    converters: dict[Any, Converter] = registry._CONVERTER_REGISTRY
    return converters


class RuleNode(nn.Module):
    """A rule of ours as the module onnx2torch expects: runs it on real tensors, node by node."""

    def __init__(self, node: onnx.NodeProto, version: int, rule: Rule) -> None:
        super().__init__()
        self.node = node
        self.version = version
        self.rule = rule

    def forward(self, *args: torch.Tensor) -> Any:
        """args: the operands the node has, in order, without those left out."""
        given = iter(args)
        operands = [next(given) if name else None for name in self.node.input]
        device = next((arg.device for arg in args), torch.device("cpu"))
        tracer = Eager(device, training=self.training)
        call = Call(self.node, self.version, tracer)
        results = run_rule(call, self.rule, operands)[: len(self.node.output)]
        outputs = tuple(tracer.to_tensor(result) for result in results)
        return outputs if len(outputs) > 1 else outputs[0]


def _as_converter(version: int, rule: Rule) -> Converter:
    def convert(node: Any, graph: Any) -> Any:
        from onnx2torch.utils.common import OnnxMapping, OperationConverterResult

        present = tuple(name for name in node.input_values if name)
        return OperationConverterResult(
            torch_module=RuleNode(node.proto, version, rule),
            onnx_mapping=OnnxMapping(inputs=present, outputs=node.output_values),
        )

    convert.of_onward = True  # type: ignore[attr-defined]
    return convert


def register_with_onnx2torch() -> int:
    """File every rule through `onnx2torch.add_converter`, in place of its own converters; returns how many.

    Converters that users filed stay. Afterwards `onnx2torch.convert` imports what Onward imports.
    """
    registry = _registry()
    from onnx2torch.node_converters.registry import OperationDescription, add_converter

    for (name, version), rule in RULES.items():
        domain, _, operator = name.rpartition(".")
        key = OperationDescription(domain, operator, version)
        if operator in WITH_BODIES or (key in registry and _is_users(registry[key])):
            continue
        registry.pop(key, None)
        add_converter(operator, version, domain)(_as_converter(version, rule))
    return len(RULES)


def _is_users(converter: Converter) -> bool:
    return not hasattr(converter, "of_onward") and not converter.__module__.startswith("onnx2torch.")


def users_converter(node: onnx.NodeProto, version: int) -> Converter | None:
    """A converter somebody filed through `onnx2torch.add_converter`; looks only if onnx2torch was imported."""
    if "onnx2torch" not in sys.modules:
        return None
    found = _registry().get((node.domain, node.op_type, version))
    return found if found is not None and _is_users(found) else None


def stock_converter(node: onnx.NodeProto, version: int) -> Converter | None:
    """onnx2torch's own converter, for what the table lacks."""
    try:
        return _registry().get((node.domain, node.op_type, version))
    except (ImportError, RuntimeError):  # a torchvision that cannot be loaded at all
        return None


def run_converter(
    converter: Converter, node: onnx.NodeProto, *, graph: onnx.GraphProto, operands: Sequence[Value], tracer: Tracer
) -> tuple[Value, ...]:
    """Apply a converter's module to the operands it asks for. Raises Unsupported."""
    from onnx2torch.onnx_graph import OnnxGraph
    from onnx2torch.onnx_node import OnnxNode

    name = (node.name or node.output[0]).replace(".", "_").replace("/", "_")
    try:
        module, mapping = converter(OnnxNode(node, unique_name=name), OnnxGraph(graph))
    except (NotImplementedError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise Unsupported(f"its onnx2torch converter refuses it: {error}") from error
    if any(parameter.requires_grad for parameter in module.parameters()):
        raise Unsupported("its onnx2torch converter keeps weights of its own, which could not be written back")
    values = dict(zip(node.input, operands, strict=True))
    if not all(name in values for name in mapping.inputs):
        raise Unsupported("its onnx2torch converter reads values that are not its operands")
    wanted = [tracer.to_tensor(values[name]) for name in mapping.inputs]
    try:
        result = tracer.call_module(name, module, *wanted)
    except RunTime:
        if len(node.output) > 1:
            raise Unsupported("its onnx2torch converter may give one of its several outputs") from None
        return tracer.leaf(name, module, wanted, [None])
    if not isinstance(result, tuple | list):
        if sum(map(bool, node.output)) > 1:
            raise Unsupported("its onnx2torch converter gives one of its several outputs")
        result = (result,)
    return tuple(result)


def load_converters(files: Iterable[Path]) -> None:
    """Run the Python files in which users file converters of their own.

    Raises ConfigError for each that cannot be run.
    """
    problems = []
    for file in files:
        import_torchvision()  # before they import onnx2torch
        try:
            spec = importlib.util.spec_from_file_location(f"converters_{file.stem}", file)
            if spec is None or spec.loader is None:
                raise ImportError("it is no Python file")
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        except Exception as error:  # a user's code raises what it likes
            problems.append(f"model.converters: {file}: {type(error).__name__}: {error}")
    if problems:
        raise ConfigError(problems)
