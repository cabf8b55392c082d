"""Look at a run with a teacher: whether it is the model itself, and whether its outputs can be stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onward.trainer.config.distillation import SoftLoss
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.teacher import TeacherConfig
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.data.storage.first_rows import FirstRows
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.rehearsal.findings import Findings
from onward.trainer.run.records import ExporterWarning


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
