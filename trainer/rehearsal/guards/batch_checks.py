"""Check labels, the optimizer's settings and a teacher against the model, with the first rows at hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from onward.trainer.config.distillation import SoftLoss
from onward.trainer.config.losses import LossConfig, key_of
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.teacher import TeacherConfig
from onward.trainer.config.sections.training import OptimizerConfig
from onward.trainer.config.update_rules import UPDATE_RULES
from onward.trainer.data.label_units import are_far
from onward.trainer.data.schema.columns import BYTES, Array
from onward.trainer.data.schema.fitted import LabelledRows
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.data.schema.target_counts import count_targets
from onward.trainer.data.storage.first_rows import FirstRows
from onward.trainer.errors import few
from onward.trainer.model.losses.loss_formulas import FORMULAS, LossInputs
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights
from onward.trainer.optim.optimizers import settings_problems
from onward.trainer.optim.weight_settings import settings_of
from onward.trainer.parallel.matrices import find_matrices
from onward.trainer.rehearsal.findings import Findings
from onward.trainer.run.records import ExporterWarning

WORSE_THAN_THE_MEAN = 4.0
"""A loss that is so many times that of predicting the mean of the labels is of a model in other units."""


def label_warnings(losses: Sequence[LossConfig], rows: LabelledRows, loss: float) -> Iterator[ExporterWarning]:
    """Yield a warning if the only loss compares raw labels that are far from 0 and 1, and from the output.

    rows: the first ones of the data. loss: that of the untrained model on some of them.
    """
    if len(losses) != 1 or losses[0].standardise_label != "none":
        return
    (entry,) = losses
    if "standardise_label" not in entry.rule.takes:
        return
    for name in entry.columns:
        column = rows.columns.get(name)
        if column is None or column.variable:
            continue
        if not column.holds_numbers or column.dtype == BYTES:
            continue
        labels = np.asarray(rows.read(np.arange(rows.num_rows))[name], np.float64)
        present = labels[np.isfinite(labels)]
        if not are_far(labels):
            continue
        mean = float(present.mean())
        deviation = float(present.std())
        # the loss of a model that always predicts the mean
        of_the_mean = _loss_of(entry, present, mean)
        if loss > WORSE_THAN_THE_MEAN * of_the_mean:
            key = key_of(losses, 0, "standardise_label")
            yield ExporterWarning(
                key="label_units",
                what=(
                    f"label {name!r} has mean {mean:.4g} and standard deviation {deviation:.4g}, and the untrained "
                    f"model a loss of {loss:.4g}, where predicting the mean has {of_the_mean:.4g}: most of training "
                    "goes into reaching the mean, at usual learning rates"
                ),
                remedy=f'set {key} = "standard", so that the loss compares standardised numbers',
            )
            return


def _loss_of(entry: LossConfig, labels: Array, value: float) -> float:
    """Return the loss of predicting one value for all labels [n]."""
    known = torch.from_numpy(labels)
    inputs = LossInputs(entry, [torch.full_like(known, value)], known, len(known))
    return float(FORMULAS[entry.name](inputs)) / float(count_targets(known, len(known), entry))


# -- check the optimizer's settings against the weights: patterns, learning rate, which weights Muon takes


def update_problems(optimizer: OptimizerConfig, module: ImportedGraph) -> list[str]:
    """Return what is wrong with the settings by pattern, for the weights that are trained."""
    shapes = {name: tuple(tensor.shape) for name, tensor in named_weights(module).items() if tensor.requires_grad}
    # patterns are checked against the trained weights alone
    problems = list(settings_problems(optimizer, shapes, shapes))
    if optimizer.name == "muon" and not _by_muon(optimizer, module):
        problems.append(
            "optimizer.name 'muon': no trained weight is a matrix of a hidden layer; use adamw, or choose weights "
            "or kernels with [[optimizer.weights]] rule = 'muon'"
        )
    return problems


def update_warnings(optimizer: OptimizerConfig, module: ImportedGraph) -> Iterator[ExporterWarning]:
    """Yield what may not be intended: an unusual learning rate, and Muon's choice of weights."""
    # with Muon's `match_rms_adamw` the rate is on the scale of AdamW
    low, high = UPDATE_RULES[optimizer.name].rates
    if not low <= optimizer.learning_rate <= high and (optimizer.name, optimizer.muon.scale) != (
        "muon",
        "match_rms_adamw",
    ):
        yield ExporterWarning(
            key="learning_rate",
            what=f"optimizer.learning_rate {optimizer.learning_rate:g} is unusual for {optimizer.name}, which is used "
            f"with rates from {low:g}" + (f" to {high:g}" if high < math.inf else ""),
            remedy="set optimizer.learning_rate, or find it with a short run at each of several rates",
        )
    if optimizer.name == "muon":
        trained = [name for name, tensor in named_weights(module).items() if tensor.requires_grad]
        chosen = _by_muon(optimizer, module)
        others = [name for name in trained if name not in chosen]
        yield ExporterWarning(
            key="muon",
            what=f"Muon updates {len(chosen)} of {len(trained)} weights ({few(chosen)}), AdamW the others "
            f"({few(others)}) with {optimizer.muon.adamw_learning_rate:g}",
            remedy="to change it: [[optimizer.weights]] pattern = '...', rule = 'muon' or 'adamw'",
        )


def _by_muon(optimizer: OptimizerConfig, module: ImportedGraph) -> list[str]:
    outputs = find_matrices(module)
    trained = [name for name, tensor in named_weights(module).items() if tensor.requires_grad]
    return [name for name in trained if settings_of(optimizer, name, outputs=outputs.get(name)).rule == "muon"]


# -- look at a run with a teacher: whether it is the model itself, and whether its outputs can be stored


def same_teacher(model: ModelConfig, teacher: TeacherConfig) -> list[ExporterWarning]:
    """Return a warning if the teacher is the very file that is trained."""
    given = teacher.path
    if not given or model_digest(Path(given)) != model_digest(model.path):
        return []
    what = "the teacher is the same file as the model, so that before training both compute the same"
    remedy = "it keeps the model near to what it was; name another file in teacher.path if it is to learn from one"
    return [ExporterWarning(key="same_teacher", what=what, remedy=remedy)]


def check_cache(
    teacher: TeacherConfig, soft_losses: Sequence[SoftLoss], rows: FirstRows, trained: ImportedGraph, findings: Findings
) -> None:
    """Refuse to store a teacher's outputs whose length follows that of the rows, which are padded with their batch."""
    varying = [name for name, column in rows.columns.items() if column.variable]
    if not teacher.path or teacher.cache == "none" or not varying:
        return
    for soft in soft_losses:
        shape = trained.output_shapes[soft.teacher_output]
        # outputs of a fixed length, such as classes, can be stored
        if shape is None or None in shape[1:]:
            findings.refuse(
                f"teacher.cache {teacher.cache!r}: the rows of {', '.join(varying)} have lengths of their own, "
                f"and so have the teacher's outputs {soft.teacher or soft.student or 'for them'}, as they are padded "
                "with their batch; set teacher.cache = 'none'"
            )
