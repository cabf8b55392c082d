"""Warn of outputs that a loss cannot read, or reads less well than the scores behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from onward.trainer.data.scores_read import losses_of_scores
from onward.trainer.onnx_graph.outputs import (
    describe_type,
    is_numeric,
    score_tensors,
    selected_output,
    unreadable_output,
)
from onward.trainer.run.records import ExporterWarning

SELECTED = "selected_output"
"""The key of the warning about an output that holds what a detector has chosen."""


def output_warnings(
    model: onnx.ModelProto, part: onnx.GraphProto, output: str = "", *, is_run: bool = False
) -> Iterator[ExporterWarning]:
    """Yield a warning for the tensor that the loss reads, and for outputs of the file that are not computed.

    part: the graph that is trained. output: `model.output`, which has been checked; "" = the first output of the file.
    is_run: whether a run reads this output, so that what it reads by default has been decided (data/scores_read.py).
    """
    first = model.graph.output[0].name
    if not output and (problem := unreadable_output(model, first)):
        what, _, remedy = problem.partition("; ")
        yield ExporterWarning(key="label_output", what=what, remedy=remedy)
    else:
        # what a run would read by itself is said only where nothing has decided yet
        by_default = () if is_run or output else losses_of_scores(model)
        yield from _probabilities(part, output or first, by_default)
    what, remedy = selected_output(model, output)
    if what:
        yield ExporterWarning(key=SELECTED, what=what, remedy=remedy)
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


def _probabilities(graph: onnx.GraphProto, output: str, by_default: Sequence[str]) -> Iterator[ExporterWarning]:
    """Yield a warning if an output is computed by a softmax or a sigmoid.

    by_default: the losses with which a run reads the scores without being told.
    """
    scores = next(score_tensors(graph, [output]), None)
    # the output holds the scores themselves
    if scores is None or scores[0] == output:
        return
    if by_default:
        named = f"{', '.join(by_default[:-1])} and {by_default[-1]}" if len(by_default) > 1 else by_default[0]
        yield ExporterWarning(
            key="probabilities",
            what=(
                f"output {output!r} holds probabilities: a run with the loss {named} reads {scores[0]!r}, "
                f"{scores[1].partition(', for')[0]}, and the exported file still has the output"
            ),
            remedy=f"nothing to do; to compute such a loss from the probabilities, set model.output = {output!r}",
        )
        return
    yield ExporterWarning(
        key="probabilities",
        what=f"output {output!r} holds probabilities, but the losses cross_entropy and bce_with_logits take scores",
        remedy=f"set model.output to {scores[0]!r} ({scores[1]})",
    )
