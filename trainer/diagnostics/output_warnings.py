"""Warn of outputs that a loss cannot read, or reads less well than the scores behind them."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from onward.trainer.onnx_graph.outputs import describe_type, is_numeric, score_tensors, unreadable_output
from onward.trainer.run.records import ExporterWarning


def output_warnings(model: onnx.ModelProto, part: onnx.GraphProto, output: str = "") -> Iterator[ExporterWarning]:
    """Yield a warning for the tensor that the loss reads, and for outputs of the file that are not computed.

    part: the graph that is trained. output: `model.output`, which has been checked; "" = the first output of the file.
    """
    first = model.graph.output[0].name
    if not output and (problem := unreadable_output(model, first)):
        what, _, remedy = problem.partition("; ")
        yield ExporterWarning(key="label_output", what=what, remedy=remedy)
    else:
        yield from _probabilities(part, output or first)
    if output:
        return
    if kept := [value for value in model.graph.output if not is_numeric(value)]:
        yield ExporterWarning(
            key="kept_outputs",
            what=(
                "outputs that are not numbers stay in the file, but training does not compute them: "
                f"{', '.join(f'{value.name} ({describe_type(value)})' for value in kept)}"
            ),
            remedy="nothing, if the loss reads another tensor; they are computed from it in the exported file",
        )


def _probabilities(graph: onnx.GraphProto, output: str) -> Iterator[ExporterWarning]:
    """Yield a warning if an output is computed by a softmax or a sigmoid."""
    if (scores := next(score_tensors(graph, [output]), None)) and scores[0] != output:
        yield ExporterWarning(
            key="probabilities",
            what=f"output {output!r} holds probabilities, but the losses cross_entropy and bce_with_logits take scores",
            remedy=f"set model.output to {scores[0]!r} ({scores[1]})",
        )
