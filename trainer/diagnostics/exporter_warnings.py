"""Warn about what exporters do to a model that is to be trained, and name the export that avoids it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import onnx
import torch
from onnx import TensorProto

from onward.trainer.onnx_graph.element_types import element_type_name
from onward.trainer.onnx_graph.initializers import stored_protos
from onward.trainer.onnx_graph.stochastic_depth import find_branches, random_nodes
from onward.trainer.onnx_import.roles import Role
from onward.trainer.onnx_import.tensor_contents import is_distinctive, is_exporter_name
from onward.trainer.onnx_import.ties import Copies

T = TypeVar("T")

RECIPE = (
    "torch.onnx.export(module.train(), ..., dynamo=True, optimize=False), or with the legacy exporter "
    "training=TrainingMode.TRAINING, do_constant_folding=False"
)
"""The export that keeps names, ties, Dropout and BatchNormalization."""


@dataclass
class AuditInput:
    """The model and what was found in it, as far as it could be imported."""

    model: onnx.ModelProto
    base: Path | None = None
    """The directory of external data, which is not loaded."""
    stored: Mapping[str, torch.Tensor] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)
    copies: Copies = field(default_factory=dict)
    runtime_nodes: Counter[str] = field(default_factory=Counter)
    any_batch: bool = True
    """Whether the module takes batches of any size; False if it was imported at the declared size alone."""

    def nodes(self, *operators: str) -> list[onnx.NodeProto]:
        return [node for node in self.model.graph.node if node.op_type in operators]

    def trained(self) -> list[str]:
        return [name for name, role in self.roles.items() if role.kind == "trained" and name not in self.copies]


def exporter_warnings(audit: AuditInput) -> Iterator[tuple[str, str]]:
    """Yield (what was found, what to do) for everything that is allowed but perhaps not intended."""
    for check in (
        _nothing_to_train, _folded_batch_norm, _merged_weights, _copies, _tables, _made_up_names, _no_dropout,
        _random_nodes, _training_mode, _fixed_batch, _halves, _quantized, _runtime_nodes,
    ):  # fmt: skip
        yield from check(audit)


def _nothing_to_train(audit: AuditInput) -> Iterator[tuple[str, str]]:
    if audit.stored and not audit.trained():
        made = len(audit.nodes("ConstantOfShape", "RandomNormal", "RandomUniform", "DequantizeLinear"))
        yield (
            f"no stored tensor is a weight; {made} nodes make tensors of their own",
            "train the model this one was made from: its weights must be stored as floats",
        )


def _folded_batch_norm(audit: AuditInput) -> Iterator[tuple[str, str]]:
    biased = [node for node in audit.nodes("Conv", "ConvTranspose") if len(node.input) > 2 and node.input[2]]
    if not biased or audit.nodes("BatchNormalization"):
        return
    made_up = sum(is_exporter_name(node.input[1]) or is_exporter_name(node.input[2]) for node in biased)
    sure = f"; {made_up} of them have made-up names, so it had" if made_up else ""
    yield (
        f"{len(biased)} convolutions have a bias and there is no BatchNormalization: if the model had any, the "
        f"exporter folded it into them{sure}. The biases are trained; running statistics are gone",
        f"to keep BatchNormalization, export with {RECIPE}",
    )


def _merged_weights(audit: AuditInput) -> Iterator[tuple[str, str]]:
    if found := merged(audit.model.graph, audit.stored, audit.roles):
        shown = "; ".join(f"{name} (by {len(nodes)}: {', '.join(nodes[:3])}, ...)" for name, nodes in _few(found))
        yield (
            f"{len(found)} weights are read by several layers, though they are probably meant to be separate: "
            f"exporters merge parameters of equal value. They train as one: {shown}",
            f"set model.untie = {_toml(found)}, or export with {RECIPE}",
        )


def merged(
    main: onnx.GraphProto, stored: Mapping[str, torch.Tensor], found: Mapping[str, Role]
) -> dict[str, list[str]]:
    """Return the trained weights that an exporter seems to have merged -> the nodes that read them.

    A network may repeat whole layers, which reads its matrices as often as its vectors. So a vector is suspicious if it
    is read more often than the matrices are, and a matrix if all its elements are equal.
    """
    readers = _readers(main)
    trained = [name for name, role in found.items() if role.kind == "trained" and name in stored]
    meaningful = [name for name in trained if stored[name].ndim >= 2 and is_distinctive(stored[name])]
    # how often the layers of this network are repeated, by its matrices; not by embeddings, which a tied head reads too
    repeats = [len(readers.get(name, ())) for name in meaningful if not found[name].operator.startswith("Gather")]
    usual = max(repeats, default=1)
    return {
        name: nodes
        for name in trained
        if name not in meaningful and len(nodes := readers.get(name, [])) > max(usual, 1)
    }


def _readers(main: onnx.GraphProto) -> dict[str, list[str]]:
    """Return stored tensor -> the nodes that read it, directly or through Identity nodes."""
    passed: dict[str, str] = {}
    readers: dict[str, list[str]] = {}
    for node in main.node:
        sources = [passed.get(name, name) for name in node.input]
        if node.op_type == "Identity":
            passed[node.output[0]] = sources[0]
            continue
        for name in dict.fromkeys(sources):
            readers.setdefault(name, []).append(node.name or next(filter(None, node.output), node.op_type))
    return readers


def _copies(audit: AuditInput) -> Iterator[tuple[str, str]]:
    if audit.copies:
        shown = "; ".join(f"{name} of {of}" for name, (of, _) in _few(audit.copies))
        yield (
            f"{len(audit.copies)} weights are stored a second time, as exporters do with tied ones: {shown}. "
            "They are trained as one, and both are written",
            "to train them apart, set model.tie = false",
        )


def _tables(audit: AuditInput) -> Iterator[tuple[str, str]]:
    frozen = {
        name: audit.stored[name].numel()
        for name, role in audit.roles.items()
        if role.kind == "frozen" and name in audit.stored and audit.stored[name].numel() > 1
    }
    if frozen:
        largest = dict(sorted(frozen.items(), key=lambda item: -item[1]))
        shown = "; ".join(f"{name} ({size:,}: {audit.roles[name].reason})" for name, size in _few(largest))
        yield (
            f"{sum(frozen.values()):,} numbers in {len(frozen)} tensors stay frozen: {shown}",
            "to train one that is a weight after all, give its full name in model.train",
        )


def _made_up_names(audit: AuditInput) -> Iterator[tuple[str, str]]:
    if found := [name for name in audit.trained() if is_exporter_name(name)]:
        yield (
            f"{len(found)} trained weights have names the exporter made up, such as {found[0]}: patterns over the "
            "module's own names do not find them",
            f"to keep the names, export with {RECIPE}",
        )


TRANSFORMER = ("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "Attention")


def _no_dropout(audit: AuditInput) -> Iterator[tuple[str, str]]:
    # a softmax that is an output is that of a classifier, not of attention
    softmaxes = [node for node in audit.nodes("Softmax") if node.output[0] not in _outputs(audit)]
    if not audit.nodes("Dropout") and (len(audit.nodes(*TRANSFORMER)) > 1 or len(softmaxes) > 1):
        yield (
            "a transformer without Dropout nodes: an exporter removes them from a module that is not in train()",
            "graph.dropout = 0.1 puts dropout on embeddings, residual branches and attention weights (not into the "
            f"written file); to keep the model's own, export with {RECIPE}",
        )


def _outputs(audit: AuditInput) -> set[str]:
    return {value.name for value in audit.model.graph.output}


def _random_nodes(audit: AuditInput) -> Iterator[tuple[str, str]]:
    found = find_branches(audit.model, audit.base)
    kinds = Counter(branch.kind for branch in found)
    if number := kinds["stochastic depth"]:
        rates = sorted({f"{1 - branch.keep:.2g}" for branch in found if branch.kind == "stochastic depth"}, key=float)
        yield (
            f"{number} branches with stochastic depth, driven by train()/eval() (dropped at a rate of "
            f"{', '.join(rates)})",
            "nothing to do: it is removed from the exported file (export.training keeps it)",
        )
    if number := kinds["dropout written out"]:
        yield (
            f"{number} dropouts written as elementary nodes, driven by train()/eval()",
            "nothing to do: it is removed from the exported file (export.training keeps it)",
        )
    if names := random_nodes(audit.model, found):
        yield (
            f"{len(names)} nodes draw random numbers, in evaluation, too ({', '.join(names[:5])}"
            f"{', ...' if len(names) > 5 else ''}): not a recognised dropout; results differ from run to run",
            "if it is meant for training alone, export with module.eval(); graph.dropout regularises instead",
        )


def _training_mode(audit: AuditInput) -> Iterator[tuple[str, str]]:
    modes = [
        node
        for node in audit.nodes("BatchNormalization")
        if any(attribute.name == "training_mode" and attribute.i for attribute in node.attribute)
    ]
    if modes:
        yield (
            f"{len(modes)} BatchNormalization nodes are in training mode: onnxruntime would normalise with each "
            "batch's own statistics",
            "nothing to do: the exported file uses the trained running statistics (export.training keeps the form)",
        )


def _fixed_batch(audit: AuditInput) -> Iterator[tuple[str, str]]:
    inputs = [value for value in audit.model.graph.input if value.name not in audit.stored]
    sizes = {value.type.tensor_type.shape.dim[0].dim_value for value in inputs if value.type.tensor_type.shape.dim}
    if len(sizes) == 1 and (size := sizes.pop()):
        trained = (
            "it is trained at any size, and run"
            if audit.any_batch
            else f"its shapes hold for no other, so that every micro-batch must have {size} rows; it is run"
        )
        yield (
            f"the file declares a batch of {size}: {trained} {size} rows at a time elsewhere",
            "export with a dynamic batch: dynamic_shapes (dynamo) or dynamic_axes (legacy)",
        )


def _halves(audit: AuditInput) -> Iterator[tuple[str, str]]:
    kinds = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    if found := [proto for _, proto in stored_protos(audit.model.graph) if proto.data_type in kinds and proto.dims]:
        name = element_type_name(found[0].data_type).lower()
        yield (
            f"{len(found)} tensors are stored in {name}: they are trained in fp32 and rounded once, when they are "
            "written; updates below the rounding are lost then",
            "to keep them, export in fp32 and let export.variants make the half-precision file",
        )


def _quantized(audit: AuditInput) -> Iterator[tuple[str, str]]:
    if found := [name for name, role in audit.roles.items() if role.reason.startswith("stored as integers")]:
        yield (
            f"{len(found)} weights are quantized ({found[0]}, ...) and stay frozen",
            "train the model it was quantized from; export.variants quantizes the result",
        )


def _runtime_nodes(audit: AuditInput) -> Iterator[tuple[str, str]]:
    if audit.runtime_nodes:
        shown = ", ".join(f"{count} {operator}" for operator, count in audit.runtime_nodes.most_common(3))
        yield (
            f"{sum(audit.runtime_nodes.values())} nodes are computed by Python each time the graph runs, because "
            f"shapes or branches depend on data ({shown}): slower, and torch.compile stops there",
            "nothing to do if that is what the model is",
        )


def _few(found: Mapping[str, T]) -> list[tuple[str, T]]:
    return list(found.items())[:3]


def _toml(names: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
