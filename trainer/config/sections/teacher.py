"""The settings of distillation: [teacher], a trained model whose outputs the model learns beside its labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PositiveFloat, field_validator

from onward.trainer.config.section import Section
from onward.trainer.config.urls import Location


class TeacherConfig(Section):
    """A teacher (distillation, arXiv:1503.02531): it runs beside the model, in inference form and untrained, and its
    outputs are targets of the model's. The exported file holds nothing of it."""

    path: Location = ""
    """The ONNX file of the teacher, as `model.path`; empty = no teacher."""
    output: str | Mapping[str, str] = ""
    """The teacher's output that the model's output learns; a table {model's output = teacher's output} for several.
    Empty = the one of the same name, or the only one."""
    inputs: Mapping[str, str] = {}
    """The teacher's inputs that have another name in the model: {teacher's input = model's input}."""
    weight: PositiveFloat = 1.0
    """What the loss against the teacher is multiplied by before it is added to the others (`loss.weight`)."""
    loss: Literal["auto", "kl", "bce", "mse"] = "auto"
    """`kl`: T^2 x the Kullback-Leibler divergence of softmax(teacher / T) and softmax(model / T), for scores of
    classes. `bce`: the same of sigmoids, for yes-or-no labels. `mse`: the mean square of the difference. `auto` = as
    fits the loss of the same output; without one (`model.loss = "teacher"`) it must be set."""
    temperature: PositiveFloat = 2.0
    """T of `kl` and `bce`: above 1 the classes that the teacher finds unlikely count more."""
    class_axis: int | None = None
    """`kl` without labels, of an output with more than two axes: the axis of the classes, the rows being axis 0."""
    unlabelled: bool = False
    """Learn from the teacher also at targets whose label is `ignore_index`: rows without a label. false = leave them
    out, as the loss against the labels does: padding."""
    mask: str = ""
    """The input with 0 where outputs do not count, such as `attention_mask`, for data without labels."""
    cache: Literal["none", "float16", "float32"] = "none"
    """Compute the teacher's outputs once for each row, before training, and store them in the run directory in this
    type; `none` = compute them in every step. Each rank then runs the undivided teacher for a while. Not for data that
    is drawn anew in each epoch (augmentation, masked words), nor for outputs whose length varies."""
    match: Mapping[str, str | tuple[str, PositiveFloat]] = {}
    """Tensors inside the two models that are matched, too, by the mean square of the difference: {model's tensor =
    teacher's tensor}, or [teacher's tensor, weight], by which the mean is multiplied before it is added to the loss.
    Where the two differ in the length of one axis, a projection (a matrix without bias) is trained with the model; it
    is in checkpoints, and never in the exported file."""

    @field_validator("match", mode="before")
    @classmethod
    def _is_a_table(cls, given: Any) -> Any:
        """Read the empty list of earlier versions, which had a table for each pair."""
        if isinstance(given, list | tuple) and given:
            raise ValueError("is one table, {student's tensor = teacher's tensor}, or = [teacher's tensor, weight]")
        return given or {}

    @property
    def outputs(self) -> Mapping[str, str]:
        """The model's outputs that `output` names -> the teacher's; "" = not named."""
        return {"": self.output} if isinstance(self.output, str) else self.output
