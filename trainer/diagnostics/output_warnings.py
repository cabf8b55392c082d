"""Warn of outputs that a loss cannot read, or reads less well than the scores behind them."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from onward.trainer.diagnostics.exporter_warnings import probabilities
from onward.trainer.onnx_graph.outputs import describe_type, is_numeric, unreadable_output
from onward.trainer.run.records import ExporterWarning


def output_warnings(model: onnx.ModelProto) -> Iterator[ExporterWarning]:
    """Yield a warning for the first output, which the loss reads by default, and for those that are not computed."""
    first = model.graph.output[0].name
    if problem := unreadable_output(model, first):
        what, _, remedy = problem.partition("; ")
        yield ExporterWarning(key="label_output", what=what, remedy=remedy)
    elif len(model.graph.output) > 1:  # else `exporter_warnings` has it
        yield from probabilities(model.graph, first)
    if kept := [value for value in model.graph.output if not is_numeric(value)]:
        yield ExporterWarning(
            key="kept_outputs",
            what=(
                "outputs that are not numbers stay in the file, but training does not compute them: "
                f"{', '.join(f'{value.name} ({describe_type(value)})' for value in kept)}"
            ),
            remedy="nothing, if the loss reads another tensor; they are computed from it in the exported file",
        )
