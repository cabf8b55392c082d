"""Warn about what exporters do to the weights of a model that is to be trained, and name the export that avoids it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import onnx

from onward.trainer.diagnostics.audit_input import AuditInput
from onward.trainer.diagnostics.graph_warnings import GRAPH_WARNINGS
from onward.trainer.diagnostics.merged_weights import (
    folded_products,
    merged_weights,
    removed_biases,
    separated_weights,
)
from onward.trainer.errors import few
from onward.trainer.onnx_graph.exporter_names import is_exporter_name
from onward.trainer.onnx_graph.files.index import HALF_TYPES, element_type_name
from onward.trainer.onnx_graph.files.stored_protos import stored_protos
from onward.trainer.onnx_graph.surgery.blocked_layout import DOMAIN as BLOCKED
from onward.trainer.onnx_import.quantization.quantized_weights import integer_names
from onward.trainer.onnx_import.roles.roles import Role
from onward.trainer.run.records import ExporterWarning

T = TypeVar("T")

RECIPE = (
    "torch.onnx.export(module.train(), ..., dynamo=True, optimize=False), or with the legacy exporter "
    "training=TrainingMode.TRAINING, do_constant_folding=False"
)
"""The export that keeps names, ties, Dropout and BatchNormalization."""


def refused_warnings(found: Iterable[ExporterWarning], accept: Sequence[str]) -> list[str]:
    """Return a sentence for each warning that changes what is trained and is not in `accept` (`model.accept`)."""
    changing = [warning for warning in found if warning.changes_training]
    return [
        f'{warning.what}; {warning.remedy}; or, to train it so, set model.accept = ["{warning.key}"]'
        for warning in changing
        if warning.key not in accept
    ]


def exporter_warnings(audit: AuditInput) -> Iterator[ExporterWarning]:
    """Yield a warning for everything that is allowed but perhaps not intended."""
    for check in (
        _nothing_to_train, _folded_batch_norm, _merged_weights, _separated_weights, _unrecorded_weights,
        _removed_biases, _copies, _tables, _made_up_names, _no_dropout, _halves, _quantized, _integer_weights,
        _mostly_frozen, _blocked_layout, *GRAPH_WARNINGS,
    ):  # fmt: skip
        yield from check(audit)


def _nothing_to_train(audit: AuditInput) -> Iterator[ExporterWarning]:
    if audit.stored and not audit.trained():
        # such nodes hint at weights that the file makes when it runs, and does not store
        made = len(audit.nodes("ConstantOfShape", "RandomNormal", "RandomUniform", "DequantizeLinear"))
        yield ExporterWarning(
            key="nothing_to_train",
            what=f"no stored tensor is a weight; {made} nodes make tensors of their own",
            remedy="train the model this one was made from: its weights must be stored as floats",
        )


def _folded_batch_norm(audit: AuditInput) -> Iterator[ExporterWarning]:
    convolutions = audit.nodes("Conv", "ConvTranspose")
    # an absent bias is no third input, or one without a name
    biased = [node for node in convolutions if any(node.input[2:])]
    # one BatchNormalization that is left shows that the exporter folds none
    if not biased or audit.nodes("BatchNormalization"):
        return
    made_up = sum(is_exporter_name(node.input[1]) or is_exporter_name(node.input[2]) for node in biased)
    sure = f"; {made_up} of them have made-up names, so it had" if made_up else ""
    yield ExporterWarning(
        key="folded_batch_norm",
        what=(
            f"{len(biased)} convolutions have a bias and there is no BatchNormalization: if the model had any, the "
            f"exporter folded it into them{sure}. The biases are trained; running statistics are gone"
        ),
        remedy=f"to keep BatchNormalization, export with {RECIPE}",
    )


def _merged_weights(audit: AuditInput) -> Iterator[ExporterWarning]:
    found = merged_weights(audit.model.graph, audit.stored, audit.roles)
    # merged frozen weights stay equal, so only changing ones matter
    changing = {*audit.trained(), *(name for name, role in audit.roles.items() if role.kind == "statistic")}
    # a function says itself that its weight is one, however often it is called
    changing -= {tensor.name for tensor in audit.inner if isinstance(tensor.scope, onnx.FunctionProto)}
    if found := {name: parts for name, parts in found.items() if name in changing}:
        shown = "; ".join(f"{name} (by {len(parts)}: {few(parts, 3)})" for name, parts in _few(found))
        yield ExporterWarning(
            key="merged",
            what=(
                f"{len(found)} weights are read by several layers, though they are probably meant to be separate: "
                f"exporters merge parameters of equal value. They train as one: {shown}"
            ),
            remedy=f"set model.untie = {_toml(found)}, or export with {RECIPE}",
            changes_training=True,
        )


def _separated_weights(audit: AuditInput) -> Iterator[ExporterWarning]:
    trained = set(audit.trained())
    roles = {name: role for name, role in audit.roles.items() if name in trained}
    # buffers, such as running statistics, do not train and cannot drift apart
    kinds = audit.records.weights
    folded = {}
    for name, origins in audit.records.folded.items():
        folded[name] = [origin for origin in origins if kinds[origin] == "parameter"]
    found = separated_weights(audit.model.graph, audit.stored, roles, audit.records.originals)
    found += [names for names in folded_products(roles, folded) if names not in found]
    if found:
        yield ExporterWarning(
            key="separated",
            what=(
                f"{len(found)} weights were used several times by the network, and the exporter folded something else "
                f"into each use: {'; '.join(' and '.join(names) for names in found[:3])}. They train apart"
            ),
            remedy=f"to train each as one weight, export with {RECIPE}",
            changes_training=True,
        )


def _unrecorded_weights(audit: AuditInput) -> Iterator[ExporterWarning]:
    """Warn of trained tensors without a record in a file in which the exporter recorded every weight."""
    if not audit.records.weights:
        return
    # a new head (model.num_classes) has the name of the one that it replaces
    made = {f"{name}.head" for name in audit.records.kinds}
    recorded = audit.records.kinds.keys() | made
    if found := [name for name in audit.trained() if name not in recorded]:
        yield ExporterWarning(
            key="unrecorded",
            what=(
                f"{len(found)} trained tensors are no weights of the exported network by what its exporter wrote: "
                f"{few(found, 3)}. Another tool has computed them, perhaps "
                "from several weights, and they are trained as weights of their own"
            ),
            remedy=f"to train the weights of the network, export with {RECIPE} and train that file",
        )


def _removed_biases(audit: AuditInput) -> Iterator[ExporterWarning]:
    if found := removed_biases(audit.model.graph, audit.records.weights):
        yield ExporterWarning(
            key="removed",
            what=(
                f"{len(found)} biases of the network are not in the file and cannot be trained, because the exporter "
                f"removes biases of zeros: {few(found, 3)}"
            ),
            remedy=f"to train them, export with {RECIPE}",
            changes_training=True,
        )


def _copies(audit: AuditInput) -> Iterator[ExporterWarning]:
    if audit.copies:
        shown = "; ".join(f"{name} of {of}" for name, (of, _) in _few(audit.copies))
        yield ExporterWarning(
            key="copies",
            what=(
                f"{len(audit.copies)} weights are stored a second time, as exporters do with tied ones: {shown}. "
                "They are trained as one, and both are written"
            ),
            remedy="to train them apart, set model.tie = false",
        )


def _tables(audit: AuditInput) -> Iterator[ExporterWarning]:
    frozen = {}
    for name, role in audit.roles.items():
        # what the file says is no guess that could be wrong
        is_guessed = role.kind == "frozen" and not role.written
        if is_guessed and name in audit.stored and audit.stored[name].numel() > 1:
            frozen[name] = audit.stored[name].numel()
    if frozen:
        yield ExporterWarning(
            key="frozen",
            what=f"{sum(frozen.values()):,} numbers in {len(frozen)} tensors stay frozen: {_largest(audit, frozen)}",
            remedy="this is guessed; to train one that is a weight after all, give its full name in model.train",
        )


def _made_up_names(audit: AuditInput) -> Iterator[ExporterWarning]:
    if found := [name for name in audit.trained() if is_exporter_name(name)]:
        original = audit.records.originals.get(found[0], "")
        yield ExporterWarning(
            key="made_up_names",
            what=(
                f"{len(found)} trained weights have names the exporter made up, such as {found[0]}"
                f"{f' ({original})' if original else ''}: patterns over the module's own names do not find them"
            ),
            remedy=f"to keep the names, export with {RECIPE}",
        )


TRANSFORMER = ("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "Attention")


def _no_dropout(audit: AuditInput) -> Iterator[ExporterWarning]:
    # a softmax that is an output is that of a classifier, not of attention
    softmaxes = [node for node in audit.nodes("Softmax") if node.output[0] not in _outputs(audit)]
    # a single norm or softmax is also that of other networks
    if not audit.nodes("Dropout") and (len(audit.nodes(*TRANSFORMER)) > 1 or len(softmaxes) > 1):
        yield ExporterWarning(
            key="no_dropout",
            what="a transformer without Dropout nodes: an exporter removes them from a module that is not in train()",
            remedy=(
                "graph.dropout = 0.1 puts dropout on embeddings, residual branches and attention weights (not into the "
                f"written file); to keep the model's own, export with {RECIPE}"
            ),
        )


def _halves(audit: AuditInput) -> Iterator[ExporterWarning]:
    halves = [proto for _, proto in stored_protos(audit.model.graph) if proto.data_type in HALF_TYPES]
    if found := [proto for proto in halves if proto.dims]:
        name = element_type_name(found[0].data_type).lower()
        yield ExporterWarning(
            key="half_precision",
            what=(
                f"{len(found)} tensors are stored in {name}: they are trained in fp32 and rounded once, when they are "
                "written; updates below the rounding are lost then"
            ),
            remedy="to keep them, export in fp32 and let export.variants make the half-precision file",
        )


def _quantized(audit: AuditInput) -> Iterator[ExporterWarning]:
    if found := [name for name, role in audit.roles.items() if role.reason.startswith("stored as integers")]:
        yield ExporterWarning(
            key="quantized",
            what=f"{len(found)} weights are quantized ({found[0]}, ...) and stay frozen",
            remedy=(
                "train the model it was quantized from; export.variants quantizes the result; or put adapters beside "
                "them (lora.weights)"
            ),
        )


def _integer_weights(audit: AuditInput) -> Iterator[ExporterWarning]:
    integers = integer_names(audit.model.graph)
    if found := [name for name in audit.trained() if name in integers]:
        yield ExporterWarning(
            key="integer_weights",
            what=(
                f"{len(found)} trained weights are stored as integers ({found[0]}, ...): they are trained in fp32, "
                "computed as the integers nearest to them, and written as these integers with the scales of the file. "
                "Updates that add up to less than half a scale are lost in the written file"
            ),
            remedy="to keep them, train the model it was quantized from; export.variants quantizes the result",
        )


LARGE_PART = 0.1
"""Where more of the numbers than this cannot be trained for the way in which they are stored, a run must accept it."""


def _mostly_frozen(audit: AuditInput) -> Iterator[ExporterWarning]:
    """Warn of weights that no setting can train, unless the settings leave out others as well."""
    trained = [name for name, role in audit.roles.items() if role.kind == "trained"]
    trainable = [name for name in trained if name not in audit.copies]
    untrainable = [name for name, role in audit.roles.items() if _is_untrainable(role)]
    # a weight with an adapter is trained through it
    frozen = {name: audit.numbers_of(name) for name in untrainable if f"{name}.lora_a" not in audit.roles}
    total = sum(frozen.values()) + sum(map(audit.numbers_of, trainable))
    # settings that leave out weights show that somebody has chosen what is trained
    if len(audit.trained()) < len(trainable) or sum(frozen.values()) <= LARGE_PART * total:
        return
    yield ExporterWarning(
        key="mostly_frozen",
        what=(
            f"{sum(frozen.values()):,} of the {total:,} numbers of weights stay frozen, because of how the file stores "
            f"them: {_largest(audit, frozen)}"
        ),
        remedy=(
            "train the model in floating point, if you have it, and quantize the result (export.variants); or train "
            "adapters beside quantized weights (lora.weights)"
        ),
        changes_training=True,
    )


def _is_untrainable(role: Role) -> bool:
    return role.kind == "frozen" and role.reason.startswith(("stored as integers", "stored in ", "a result of "))


def _blocked_layout(audit: AuditInput) -> Iterator[ExporterWarning]:
    if found := [node for node in audit.model.graph.node if node.domain == BLOCKED]:
        yield ExporterWarning(
            key="blocked_layout",
            what=(
                f"{len(found)} nodes are in onnxruntime's blocked layout ({BLOCKED}): their weights are stored for the "
                "processor that optimised the file, and are read as this processor does; the exported file runs on "
                "such processors only"
            ),
            remedy="optimise the model with ORT_ENABLE_EXTENDED rather than ORT_ENABLE_ALL",
        )


def _few(found: Mapping[str, T]) -> list[tuple[str, T]]:
    return list(found.items())[:3]


def _largest(audit: AuditInput, sizes: Mapping[str, int]) -> str:
    """Return the largest of some tensors, with their numbers of elements and the reasons of their roles."""
    largest = dict(sorted(sizes.items(), key=lambda item: -item[1]))
    return "; ".join(f"{name} ({size:,}: {audit.roles[name].reason})" for name, size in _few(largest))


def _toml(names: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _outputs(audit: AuditInput) -> set[str]:
    return {value.name for value in audit.model.graph.output}
