"""Register Onward's operator rules in onnx2torch, so that tests can compare both importers on whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import torch
from torch import nn

from onward.trainer.onnx_import.lowering.converter_table import RULES, Call, Rule, run_rule
from onward.trainer.onnx_import.lowering.converters import onnx2torch_registry
from onward.trainer.onnx_import.tracing.eager import EagerTracer

WITH_SUBGRAPHS = ("If", "Loop", "Scan", "SequenceMap")
"""Operators with inner graphs, which onnx2torch does not support."""


class RuleModule(nn.Module):
    """The module that onnx2torch expects of a converter: one operator rule, run on real tensors."""

    def __init__(self, node: onnx.NodeProto, version: int, rule: Rule) -> None:
        super().__init__()
        self.node = node
        self.version = version
        self.rule = rule

    def forward(self, *args: torch.Tensor) -> Any:
        """args: the operands that the node has, in order, without those left out."""
        given = iter(args)
        operands = [next(given) if name else None for name in self.node.input]
        device = next((arg.device for arg in args), torch.device("cpu"))
        tracer = EagerTracer(device, training=self.training)
        call = Call(self.node, self.version, tracer)
        results = run_rule(call, self.rule, operands)[: len(self.node.output)]
        outputs = tuple(tracer.to_tensor(result) for result in results)
        return outputs if len(outputs) > 1 else outputs[0]


def _as_converter(version: int, rule: Rule) -> Callable[[Any, Any], Any]:
    def convert(node: Any, graph: Any) -> Any:
        from onnx2torch.utils.common import OnnxMapping, OperationConverterResult

        present = tuple(name for name in node.input_values if name)
        return OperationConverterResult(
            torch_module=RuleModule(node.proto, version, rule),
            onnx_mapping=OnnxMapping(inputs=present, outputs=node.output_values),
        )

    return convert


def register_with_onnx2torch() -> None:
    """Replace onnx2torch's own converters by Onward's rules. Call it after the last import by Onward itself."""
    registry = onnx2torch_registry()
    from onnx2torch.node_converters.registry import OperationDescription, add_converter

    for (name, version), rule in RULES.items():
        domain, _, operator = name.rpartition(".")
        if operator not in WITH_SUBGRAPHS:
            registry.pop(OperationDescription(domain, operator, version), None)
            add_converter(operator, version, domain)(_as_converter(version, rule))
