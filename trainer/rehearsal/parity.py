"""Compare the untrained file under onnxruntime with the imported module, on the first rows of the data.

A file that is imported wrongly is then found before it is trained; after training, export makes the same comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx

from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import ExportRefused
from onward.trainer.export.export import trained_part
from onward.trainer.export.model_file import ModelFile
from onward.trainer.export.onnx_runner import EvaluationData, OnnxRunner
from onward.trainer.model.trainable import TrainableModel
from onward.trainer.onnx_graph.index import locations
from onward.trainer.onnx_graph.preprocessing import begin_at_numbers
from onward.trainer.onnx_graph.stochastic_depth import random_nodes
from onward.trainer.onnx_graph.strip_training import strip_training
from onward.trainer.onnx_graph.surgery import extract_subgraph, trains_subgraph

COPIED_BYTES = 1 << 30
"""A changed graph is not compared if more external data than this would have to be copied beside it."""


class NotCompared(Exception):
    """Why the file was not compared, as a clause."""


@dataclass(frozen=True)
class Parity:
    """What a comparison found, relative to an output's greatest value."""

    difference: float
    """The greatest one of the file from the module."""
    rounding: float
    """What the runtime's kernels round, of a file with quantized weights; 0 if it had not to be measured."""
    runtime: str
    """What ran the file."""

    def __str__(self) -> str:
        return self.runtime + (f", whose kernels round by {self.rounding:.2g}," if self.rounding else "")


def compare_untrained(trainable: TrainableModel, config: RunConfig, data: EvaluationData, folder: Path) -> Parity:
    """Compare over the first row and over the first batch of the data.

    Changes `trainable.model` to its inference form. folder: for temporary files. Raises ExportRefused when they differ
    by more than `export.tolerance` and the rounding of the kernels (export/kernel_rounding.py), or no runtime can run
    the file, and NotCompared.
    """
    file = _inference_form(trainable, config, folder)
    runner = OnnxRunner(file, data)
    trainable.module.eval()
    problems = runner.compare(trainable.module, batches=1, tolerance=config.export.tolerance)
    if problems and (names := random_nodes(file.proto if isinstance(file, ModelFile) else file)):
        problems.append(f"{len(names)} nodes draw random numbers ({', '.join(names[:5])}); export with module.eval()")
    if problems:
        raise ExportRefused(problems)
    return Parity(runner.parity, runner.rounding, runner.runtime)


def _inference_form(trainable: TrainableModel, config: RunConfig, folder: Path) -> ModelFile | onnx.ModelProto:
    """Return the trained part of the graph as inference computes it: the file itself where nothing is changed."""
    model, settings = trainable.model, config.model
    kept = tuple(filter(None, (*begin_at_numbers(model, settings).start, *settings.outputs)))
    removed = strip_training(model, keep=kept, base=trainable.base)
    if not (removed or settings.num_classes or settings.untie or trains_subgraph(model, settings)):
        return ModelFile(settings.path, model)
    copied = sum((trainable.base / name).stat().st_size for name in locations(extract_subgraph(model, settings)))
    if copied > COPIED_BYTES:
        raise NotCompared(f"{copied / 2**30:.3g} GiB of external data would have to be copied for it")
    return trained_part(model, settings.path, folder, settings)
