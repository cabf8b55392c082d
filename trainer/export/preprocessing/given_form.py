"""Compare a file as it was given, before anything is rewritten, with the module that is trained.

Where the file is in training form, its nodes compute another thing than inference does, by their nature:

    the file as it is    BatchNormalization by each batch, Dropout and stochastic depth draw
      without what draws       compared with the module, whose BatchNorm modules are in training mode    must agree
    the inference form         compared with the module in evaluation mode (OnnxRunner.compare)           must agree
    the file as it is          compared with the module in evaluation mode: how far both forms are apart, which is told
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import onnx

from onward.trainer.errors import ExportRefused
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.model_file import ModelFile
from onward.trainer.onnx_graph.surgery.strip_training import TrainingForm
from onward.trainer.onnx_import.imported_graph import ImportedGraph, statistics_kept
from onward.trainer.onnx_import.lowering.runtime_node import RuntimeNode
from onward.trainer.onnx_import.ops.batch_norm import BatchNorm, BatchStatistics
from onward.trainer.run.records import ExporterWarning


@dataclass(frozen=True)
class GivenFile:
    """The part of the file that is trained, as it was given, and what it computes in training form."""

    model: ModelFile | onnx.ModelProto
    form: TrainingForm
    without_draws: ModelFile | onnx.ModelProto
    """The same without the nodes that draw random numbers; `model` itself if there is none."""


def difference_of_forms(given: GivenFile, module: ImportedGraph, data: EvaluationData, *, tolerance: float) -> float:
    """Return how far the file as it is, is off the module in evaluation mode, of the output's largest value.

    Leaves the module in evaluation mode. Raises ExportRefused if what the file computes in training form is not what
    the module computes in training mode, so that its nature does not explain the difference.
    """
    # nodes that Python computes have no training mode that could be switched
    if given.form.norms and not any(isinstance(each, RuntimeNode) for each in module.modules()):
        runner = OnnxRunner(given.without_draws, data)
        with _norms_in_training(module):
            problems = runner.compare(module, batches=1, tolerance=tolerance, alone=False)
        if problems:
            raise ExportRefused([f"{problem} (in training form, as the file is)" for problem in problems])
    module.eval()
    runner = OnnxRunner(given.model, data)
    problems = runner.compare(module, batches=1, tolerance=tolerance, alone=False)
    # a difference that no training form explains
    if problems and not (given.form.norms or given.form.draws):
        raise ExportRefused(problems)
    return runner.parity


def warning_of_forms(form: TrainingForm, difference: float, runtime: str) -> ExporterWarning:
    """Return what is said of a file whose two forms differ."""
    kinds = [
        f"{form.norms} BatchNormalization nodes normalise by each batch" if form.norms else "",
        f"{form.draws} nodes draw random numbers" if form.draws else "",
    ]
    return ExporterWarning(
        key="training_form",
        what=(
            f"the file is in training form ({', '.join(filter(None, kinds))}): as it is, {runtime} computes values "
            f"that are {difference:.2g} of the largest output away from its inference form, on the first rows"
        ),
        remedy=(
            "nothing to do if the inference form is meant: evaluation, the exported file and all figures of this run "
            "are of that form; if the file is meant to be used as it is, say in which form by exporting it again"
        ),
    )


@contextmanager
def _norms_in_training(module: ImportedGraph) -> Iterator[None]:
    """Let every BatchNorm normalise by the batch, frozen ones included, and nothing else be in training mode."""
    module.eval()
    norms = [each for each in module.modules() if isinstance(each, BatchNorm | BatchStatistics)]
    frozen = {each: each.frozen for each in norms if isinstance(each, BatchNorm)}
    try:
        with statistics_kept(module):
            for each in norms:
                each.train()
            for each in frozen:
                each.frozen = False
            yield
    finally:
        for each, value in frozen.items():
            each.frozen = value
        module.eval()
