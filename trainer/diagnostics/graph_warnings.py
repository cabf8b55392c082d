"""Warn about how a graph computes: what is drawn, depends on the batch or on lengths, or is not what ONNX says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from onward.trainer.diagnostics.audit_input import AuditInput
from onward.trainer.errors import few
from onward.trainer.onnx_graph.files.index import dims_of, known_types, nodes_inside
from onward.trainer.onnx_graph.surgery.preprocessing_nodes import WITHOUT_GRADIENT
from onward.trainer.onnx_graph.surgery.stochastic_depth import find_branches, random_nodes
from onward.trainer.onnx_graph.surgery.training_norms import training_norms
from onward.trainer.onnx_import.roles.graph_flow import COMPUTED_STATISTIC
from onward.trainer.run.records import ExporterWarning


def _random_nodes(audit: AuditInput) -> Iterator[ExporterWarning]:
    found = find_branches(audit.model, audit.base)
    kinds = Counter(branch.kind for branch in found)
    if number := kinds["stochastic depth"]:
        # branches usually have rates that rise with the depth; equal ones are named once
        rates = sorted({f"{1 - branch.keep:.2g}" for branch in found if branch.kind == "stochastic depth"}, key=float)
        yield ExporterWarning(
            key="random",
            what=(
                f"{number} branches with stochastic depth, driven by train()/eval() (dropped at a rate of "
                f"{', '.join(rates)})"
            ),
            remedy="nothing to do: it is removed from the exported file (the variant `training` keeps it)",
        )
    if number := kinds["dropout written out"]:
        yield ExporterWarning(
            key="random",
            what=f"{number} dropouts written as elementary nodes, driven by train()/eval()",
            remedy="nothing to do: it is removed from the exported file (the variant `training` keeps it)",
        )
    # random nodes that belong to none of the branches above
    if names := random_nodes(audit.model, found):
        yield ExporterWarning(
            key="random",
            what=(
                f"{len(names)} nodes draw random numbers, in evaluation, too ({few(names)}): not a recognised dropout; "
                "results differ from run to run"
            ),
            remedy=(
                "nothing to do if the noise belongs to the model: it is drawn anew for each sample and epoch, and in "
                "evaluation always alike. If it is meant for training alone, export with module.eval(); graph.dropout "
                "regularises instead"
            ),
        )


def _training_mode(audit: AuditInput) -> Iterator[ExporterWarning]:
    norms = training_norms(audit.model)
    # a placeholder stands where the file stores statistics that nothing has ever updated
    if running := [norm for norm in norms if not norm.placeholder]:
        yield ExporterWarning(
            key="training_mode",
            what=(
                f"{len(running)} BatchNormalization nodes are in training mode: onnxruntime normalises with each "
                "batch's own statistics where it runs the file as it is"
            ),
            remedy=(
                "nothing to do: their statistics are running ones, which evaluation and the exported file use "
                "(the variant `training` keeps the form)"
            ),
        )
    if own := [norm for norm in norms if norm.placeholder]:
        yield ExporterWarning(
            key="batch_statistics",
            what=(
                f"{len(own)} BatchNormalization nodes normalise by their own input, in evaluation and in the exported "
                f"file, too, and what they store as mean and variance is not used ({own[0].result}: "
                f"{own[0].placeholder})"
            ),
            remedy=(
                "nothing to do if this is meant; if their statistics are running ones, export with module.eval(). "
                "Where the bias has the values of the stored mean, onnxruntime 1.31 needs "
                "disabled_optimizers=['ConstantSharing']"
            ),
        )


def _frozen_statistics(audit: AuditInput) -> Iterator[ExporterWarning]:
    if found := [name for name, role in audit.roles.items() if role.reason == COMPUTED_STATISTIC]:
        yield ExporterWarning(
            key="frozen_statistics",
            what=(
                f"{len(found)} running statistics reach their BatchNormalization through arithmetic ({found[0]}, ...): "
                "it normalises by them, in training, too, and they are never updated"
            ),
            remedy="nothing to do to train with these statistics; to update them, store what the node reads",
        )


def _fixed_batch(audit: AuditInput) -> Iterator[ExporterWarning]:
    use = audit.batch
    because = f" ({audit.batch.reason})" if audit.batch.reason else ""
    if not use.declared:
        return
    # "own": each row is computed by itself, so that filled rows change nothing; "joint": rows see each other
    rows = f"{use.declared} row{'s' if use.declared > 1 else ''}"
    needed = f"it is trained at this batch alone{because}: every micro-batch must have {rows}"
    trained = {
        "any": f"it is trained at any size{because}",
        "own": needed + (", and fewer are filled up with rows that do not count" if use.declared > 1 else ""),
        "joint": f"{needed}, and no rows may be added to fewer",
    }
    yield ExporterWarning(
        key="fixed_batch",
        what=f"the file declares a batch of {use.declared}: {trained[use.kind]}; elsewhere it is run {rows} at a time",
        remedy="export with a dynamic batch: dynamic_shapes (dynamo) or dynamic_axes (legacy)",
    )


def _runtime_nodes(audit: AuditInput) -> Iterator[ExporterWarning]:
    if audit.runtime_nodes:
        shown = ", ".join(f"{count} {operator}" for operator, count in audit.runtime_nodes.most_common(3))
        yield ExporterWarning(
            key="runtime_nodes",
            what=(
                f"{sum(audit.runtime_nodes.values())} nodes are computed by Python each time the graph runs, because "
                f"shapes or branches depend on data ({shown}): slower, and torch.compile stops there"
            ),
            remedy="nothing to do if that is what the model is; if an input is dynamic in a dimension that has one "
            "length only, declare it: python -m onnxruntime.tools.make_dynamic_shape_fixed",
        )


def _lengths(audit: AuditInput) -> Iterator[ExporterWarning]:
    if audit.assumptions:
        others = f", and {len(audit.assumptions) - 1} more equations" if audit.assumptions[1:] else ""
        yield ExporterWarning(
            key="lengths",
            what=f"the graph is imported for inputs at which {audit.assumptions[0]}{others}; it refuses others",
            remedy="nothing to do if the data has such lengths; `onward doctor MODEL DATA` tries them",
        )


def _trees(audit: AuditInput) -> Iterator[ExporterWarning]:
    found = Counter(node.op_type for node in audit.model.graph.node if node.op_type in WITHOUT_GRADIENT)
    if found:
        shown = ", ".join(f"{number} {operator}" for operator, number in found.items())
        yield ExporterWarning(
            key="trees",
            what=f"{shown}: computed by onnxruntime when the data is read, and not trained, nor is what comes before",
            remedy="train the other weights of the file; these need the library that made them",
        )


def _squeezed_batch(audit: AuditInput) -> Iterator[ExporterWarning]:
    """Name what drops a dynamic length of 1, whose rank onnxruntime decides when the graph runs."""
    without_axes = []
    for node in audit.nodes("Squeeze"):
        # an attribute until opset 12, an input from then on
        has_axes = any(node.input[1:]) or any(attribute.name == "axes" for attribute in node.attribute)
        if not has_axes:
            without_axes.append(node)
    # shape inference walks the whole graph, so it runs only where a node needs it
    types = known_types(audit.model) if without_axes else {}
    dims = {node.name or node.output[0]: dims_of(types.get(node.input[0])) for node in without_axes}
    found = []
    for name, lengths in dims.items():
        if lengths is None or None in lengths:
            found.append(name)
    if found:
        yield ExporterWarning(
            key="squeezed_batch",
            what=(
                f"{len(found)} Squeeze nodes have no axes and read dynamic lengths ({', '.join(found[:3])}): at a batch"
                " of 1 onnxruntime drops the batch, and the module keeps it; any other length of 1 is refused then"
            ),
            remedy="export with the axes, such as x.squeeze(-1) in place of x.squeeze()",
        )


def _beyond_onnx(audit: AuditInput) -> Iterator[ExporterWarning]:
    if found := audit.departures:
        yield ExporterWarning(
            key="beyond_onnx",
            what=f"onnxruntime runs the file, and ONNX's checker refuses it: {'; '.join(found[:5])}",
            remedy="nothing to do; other tools may refuse it. What is called put right is so in the exported file",
        )


def _conv_biases(audit: AuditInput) -> Iterator[ExporterWarning]:
    read = [node.input[2] for node in audit.nodes("Conv", "ConvTranspose") if len(node.input) > 2]
    biases = [name for name in dict.fromkeys(read) if name in audit.stored]
    if found := [name for name in biases if audit.stored[name].ndim != 1]:
        name = found[0]
        shape = list(audit.stored[found[0]].shape)
        yield ExporterWarning(
            key="conv_bias",
            what=(
                f"{len(found)} biases of convolutions have not one axis, such as {name} {shape}: onnxruntime opens the "
                "file, but neither it nor torch computes these nodes"
            ),
            remedy=f"store {name} as [{audit.stored[name].numel()}] in the file (numpy's reshape(-1)), others alike",
        )


def _unread_inputs(audit: AuditInput) -> Iterator[ExporterWarning]:
    graph = audit.model.graph
    stored = {tensor.name for tensor in graph.initializer}
    given = {value.name for value in graph.output}
    read = {name for node in nodes_inside(graph.node) for name in node.input} | given
    if unread := [value.name for value in graph.input if value.name not in read | stored]:
        yield ExporterWarning(
            key="unread_inputs",
            what=f"no node reads the input{'s' * (len(unread) > 1)} {', '.join(unread[:5])}",
            remedy=(
                "nothing to do if the model needs none; exporters also merge inputs that were given the same tensor: "
                "export with a tensor of its own for each"
            ),
        )


GRAPH_WARNINGS = (
    _random_nodes, _training_mode, _frozen_statistics, _fixed_batch, _runtime_nodes, _lengths, _trees, _squeezed_batch,
    _beyond_onnx, _conv_biases, _unread_inputs,
)  # fmt: skip
