"""Compare the untrained file under onnxruntime with the imported module, on the first rows of the data.

The file is the user's own, as it is: a node that is imported or rewritten wrongly is found before it is trained. After
training, export makes the same comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import onnx

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.errors import ExportRefused
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.measuring.fixed_noise import noise_inside_bodies
from onward.trainer.export.measuring.onnx_runner import OnnxRunner
from onward.trainer.export.model_file import ModelFile, proto_of, trained_part
from onward.trainer.export.preprocessing.given_form import GivenFile, difference_of_forms, warning_of_forms
from onward.trainer.model.trainable import TrainableModel
from onward.trainer.onnx_graph.files.index import locations
from onward.trainer.onnx_graph.surgery.preprocessing_nodes import begin_at_numbers
from onward.trainer.onnx_graph.surgery.strip_training import strip_training, training_form
from onward.trainer.onnx_graph.surgery.surgery import extract_subgraph, trains_subgraph
from onward.trainer.quantities import gib
from onward.trainer.rehearsal.findings import Parity

COPIED_BYTES = 1 << 30
"""A changed graph is not compared if more external data than this would have to be copied beside it."""


class NotCompared(Exception):
    """Why the file was not compared, as a clause."""


def compare_untrained(
    trainable: TrainableModel,
    model: ModelConfig,
    losses: Sequence[LossConfig],
    export: ExportConfig,
    data: EvaluationData,
    folder: Path,
) -> Parity:
    """Compare over the first row and over the first batch of the data; the graph is the user's, as it is.

    Where the file is in training form, its inference form is compared, and its training form with the module in
    training mode. folder: for temporary files. Raises ExportRefused when they differ by more than `export.tolerance`
    and the rounding of the kernels (export/measuring/kernel_rounding.py), or no runtime can run the file, and
    NotCompared.
    """
    form = training_form(trainable.model, trainable.base)
    if form:
        compared = _inference_form(trainable, model, folder / "inference")
    else:
        compared = _as_given(trainable, model, losses, folder)
    runner = OnnxRunner(compared, data)
    trainable.module.eval()
    problems = runner.compare(trainable.module, batches=1, tolerance=export.tolerance)
    if problems:
        raise ExportRefused([*problems, *noise_inside_bodies(proto_of(compared))])
    if not form:
        return Parity(runner.parity, runner.rounding, runner.runtime)
    # a file that draws numbers in training form is compared without the nodes that draw
    without_draws = _inference_form(trainable, model, folder / "norms", norms=False) if form.draws else None
    given = _as_given(trainable, model, losses, folder)
    file = GivenFile(given, form, without_draws or given)
    apart = difference_of_forms(file, trainable.module, data, tolerance=export.tolerance)
    # `not <=`: NaN must be said, too
    said = (warning_of_forms(form, apart, runner.runtime),) if not apart <= export.tolerance else ()
    return Parity(runner.parity, runner.rounding, runner.runtime, said)


def part_in_inference_form(
    trainable: TrainableModel, settings: ModelConfig, losses: Sequence[LossConfig], folder: Path
) -> ModelFile | onnx.ModelProto:
    """Return what the module computes, as a file: the graph behind pre-processing. Raises NotCompared."""
    settings = begin_at_numbers(trainable.model, settings)
    if training_form(trainable.model, trainable.base):
        return _inference_form(trainable, settings, folder)
    return _as_given(trainable, settings, losses, folder)


def _as_given(
    trainable: TrainableModel, settings: ModelConfig, losses: Sequence[LossConfig], folder: Path
) -> ModelFile | onnx.ModelProto:
    """Return the trained part of the graph, in which nothing is changed but what [model] asks for."""
    model = trainable.model
    adds_units = any(loss.output_units == "standardised" for loss in losses)
    changes_weights = bool(settings.num_classes or settings.untie)
    if changes_weights or adds_units or trains_subgraph(model, settings):
        return _part(model, trainable, settings, folder)
    return ModelFile(settings.path, model)


def _inference_form(
    trainable: TrainableModel, settings: ModelConfig, folder: Path, *, norms: bool = True
) -> ModelFile | onnx.ModelProto:
    """Return the trained part of the graph as inference computes it; norms: BatchNormalization, too."""
    model = deepcopy(trainable.model)
    # the tensors that the trained part begins and ends with keep their names
    kept = tuple(filter(None, (*begin_at_numbers(model, settings).start, *settings.outputs)))
    strip_training(model, keep=kept, base=trainable.base, norms=norms)
    return _part(model, trainable, settings, folder)


def _part(
    model: onnx.ModelProto, trainable: TrainableModel, settings: ModelConfig, folder: Path
) -> ModelFile | onnx.ModelProto:
    copied = sum((trainable.base / name).stat().st_size for name in locations(extract_subgraph(model, settings)))
    if copied > COPIED_BYTES:
        raise NotCompared(f"{gib(copied)} of external data would have to be copied for it")
    folder.mkdir(parents=True, exist_ok=True)
    return trained_part(model, settings.path, folder, settings)
