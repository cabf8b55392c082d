"""Warn of outputs that a loss cannot read, or reads less well than the scores behind them, and of trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx

from onward.trainer.onnx_graph.outputs import describe_type, is_numeric, score_tensors, unreadable_output
from onward.trainer.run.records import ExporterWarning


def output_warnings(model: onnx.ModelProto) -> Iterator[ExporterWarning]:
    """Yield a warning for the first output, which the loss reads by default, and for those that are not computed."""
    first = model.graph.output[0].name
    if problem := unreadable_output(model, first):
        what, _, remedy = problem.partition("; ")
        yield ExporterWarning(key="label_output", what=what, remedy=remedy)
    elif len(model.graph.output) > 1:  # else `graph_warnings` has it
        yield from _probabilities(model.graph, first)
    if kept := [value for value in model.graph.output if not is_numeric(value)]:
        yield ExporterWarning(
            key="kept_outputs",
            what=(
                "outputs that are not numbers stay in the file, but training does not compute them: "
                f"{', '.join(f'{value.name} ({describe_type(value)})' for value in kept)}"
            ),
            remedy="nothing, if the loss reads another tensor; they are computed from it in the exported file",
        )


def graph_warnings(graph: onnx.GraphProto) -> Iterator[ExporterWarning]:
    """Yield the warnings of a graph or of the part that is trained: probabilities as its only output, and trees."""
    if len(graph.output) == 1:  # of several, it is not known here which one the loss reads
        yield from _probabilities(graph, graph.output[0].name)
    trees = Counter(node.op_type for node in graph.node if node.op_type.startswith("TreeEnsemble"))
    if trees:
        shown = ", ".join(f"{number} {operator}" for operator, number in trees.items())
        yield ExporterWarning(
            key="trees",
            what=f"{shown}: computed exactly but not trained, and no gradient reaches what comes before",
            remedy="train the other weights of the file; trees themselves need the library that made them",
        )


def _probabilities(graph: onnx.GraphProto, output: str) -> Iterator[ExporterWarning]:
    """Yield a warning if an output is computed by a softmax or a sigmoid."""
    if (scores := next(score_tensors(graph, [output]), None)) and scores[0] != output:
        yield ExporterWarning(
            key="probabilities",
            what=f"output {output!r} holds probabilities, but the losses cross_entropy and bce_with_logits take scores",
            remedy=f"set model.output to {scores[0]!r} ({scores[1]})",
        )
