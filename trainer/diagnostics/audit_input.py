"""Gather what the warnings about a file are found from: the graph, its tensors, their roles, what exporters wrote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import torch
from onnx import inliner

from onward.trainer.onnx_graph.attribute_weights import with_operands
from onward.trainer.onnx_graph.initializers import stored_tensors
from onward.trainer.onnx_graph.inner_tensors import InnerTensor, inner_tensors, lift_inner_tensors
from onward.trainer.onnx_graph.outputs import with_numeric_outputs
from onward.trainer.onnx_import.fixed_batch.fixed_batch import BatchUse
from onward.trainer.onnx_import.imported_graph import ImportedGraph, takes_any_batch
from onward.trainer.onnx_import.lowering.runtime_node import RuntimeNode
from onward.trainer.onnx_import.quantization.quantized_weights import with_dequantized
from onward.trainer.onnx_import.roles.exporter_records import ExporterRecords, read_records
from onward.trainer.onnx_import.roles.roles import Role
from onward.trainer.onnx_import.roles.ties import Copies
from onward.trainer.onnx_import.tracing.shape_assumptions import assumptions_of
from onward.trainer.onnx_import.tracing.trial_sizes import declared_batch


@dataclass
class AuditInput:
    """The model and what was found in it, as far as it could be imported."""

    model: onnx.ModelProto
    base: Path | None = None
    """The directory of external data, which is not loaded."""
    stored: Mapping[str, torch.Tensor] = field(default_factory=dict)
    inner: Sequence[InnerTensor] = ()
    """What inner graphs and local functions store, as the file has it."""
    roles: Mapping[str, Role] = field(default_factory=dict)
    copies: Copies = field(default_factory=dict)
    runtime_nodes: Counter[str] = field(default_factory=Counter)
    assumptions: tuple[str, ...] = ()
    """What the imported graph takes for constant, and checks when it runs."""
    batch: BatchUse = field(default_factory=lambda: BatchUse("any", 0))
    """How the file is trained if it declares a fixed batch."""
    records: ExporterRecords = field(default_factory=ExporterRecords)
    departures: Sequence[str] = ()
    """What of the file onnxruntime runs and ONNX's checker refuses (beyond_onnx.py)."""
    selected: frozenset[str] | None = None
    """The weights that [model] selects for training; None = all of them."""

    def read_graph(self, module: ImportedGraph) -> None:
        """Note what the imported graph does when it runs."""
        self.runtime_nodes = Counter(each.node.op_type for each in module.modules() if isinstance(each, RuntimeNode))
        self.assumptions = tuple(assumptions_of(module.graph))

    def nodes(self, *operators: str) -> list[onnx.NodeProto]:
        return [node for node in self.model.graph.node if node.op_type in operators]

    def numbers_of(self, name: str) -> int:
        """Return the number of elements of a stored tensor that has a role."""
        if name in self.stored:
            return self.stored[name].numel()
        return next((math.prod(tensor.proto.dims) for tensor in self.inner if tensor.name == name), 0)

    def numbers(self) -> int:
        """Return the number of elements of all tensors that have a role; copies are not counted a second time."""
        return sum(self.numbers_of(name) for name in self.roles if name not in self.copies)

    def trained(self) -> list[str]:
        trained = [name for name, role in self.roles.items() if role.kind == "trained"]
        originals = [name for name in trained if name not in self.copies]
        if self.selected is None:
            return originals
        return [name for name in originals if name in self.selected]


def audit_of_run(model: onnx.ModelProto, module: ImportedGraph, base: Path) -> AuditInput:
    """Return what `exporter_warnings` reads, for the graph that a run trains.

    model: the graph after `apply_surgery` and `extract_subgraph`, so that what `model.untie` separated is no longer
    shared. module: the graph imported from it, after `select_trained`.
    """
    original = with_numeric_outputs(model)  # as `to_module` does: what only computes strings or maps is not imported
    part = lift_inner_tensors(original)
    inner = tuple(inner_tensors(original))
    stored = with_dequantized(part.graph, stored_tensors(part.graph, base))
    main = with_operands(part)
    # roles follow from the operators that read a tensor, and a function hides them
    main = inliner.inline_local_functions(main) if main.functions else main
    # what [model] selected is what requires a gradient
    trained_paths = [path for path, parameter in module.named_parameters() if parameter.requires_grad]
    audit = AuditInput(
        model=main,
        base=base,
        stored=stored,
        inner=inner,
        roles=module.roles,
        copies=module.copies,
        batch=BatchUse("any" if takes_any_batch(module) else "own", declared_batch(main.graph)),
        records=read_records(part, inner),
        selected=frozenset(module.onnx_names[path] for path in trained_paths),
    )
    audit.read_graph(module)
    return audit
