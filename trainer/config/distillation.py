"""The losses against a teacher: one for each output that is learnt, and one for each pair of matched tensors.

    hard losses     RunConfig.losses          read outputs of the model, and labels
    soft losses     RunConfig.soft_losses     read outputs of the model, and outputs of the teacher

With `model.loss = "teacher"` there are no hard losses. The soft losses read outputs that the training graph has and the
file does not (model/teacher/teacher_model.py): they are named after the place of the loss in `soft_losses`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.teacher import TeacherConfig
from onward.trainer.errors import ConfigError

TEACHER_ONLY = "teacher"
"""The value of `model.loss` of a run without labels."""

Kind = Literal["kl", "bce", "mse"]


@dataclass(frozen=True)
class SoftLoss:
    """One loss against the teacher."""

    place: int
    """Among the soft losses of the run."""
    student: str
    """The tensor of the model that learns, by its name in the file; "" = the first output."""
    teacher: str
    """The tensor that it learns, by its name in the teacher's file; "" = not named."""
    kind: Kind
    weight: float
    temperature: float
    matched: bool
    """Whether the tensors are inside the two models, where a projection may be between them."""
    labels_of: int | None = None
    """The hard loss whose labels say which targets count; None if no label does."""
    unlabelled: bool = False
    """Whether targets without a label count as well."""
    mask: str = ""
    """The input that says which targets count, without labels."""
    class_axis: int | None = None

    @property
    def own_output(self) -> str:
        """The output of the training graph with what the model computes."""
        return f"matched:{self.place}" if self.matched else self.student

    @property
    def teacher_output(self) -> str:
        """The output of the training graph with what the teacher computes."""
        return f"teacher:{self.place}"


def soft_losses(teacher: TeacherConfig, model: ModelConfig, losses: Sequence[LossConfig]) -> tuple[SoftLoss, ...]:
    """Return the losses against the teacher, none without one. losses: the hard ones, filled in."""
    if not teacher.path:
        return ()
    pairs = dict(teacher.outputs)
    if list(pairs) == [""]:  # the outputs that the losses read
        read = [output for loss in losses for output in loss.outputs]
        pairs = dict.fromkeys(read or list(model.outputs) or [""], pairs[""])
    soft = [_soft_loss(place, *pair, teacher, losses) for place, pair in enumerate(pairs.items())]
    for student, wanted in teacher.match.items():
        tensor, weight = (wanted, 1.0) if isinstance(wanted, str) else wanted
        soft.append(SoftLoss(len(soft), student, tensor, "mse", weight, 1.0, matched=True))
    return tuple(soft)


def _soft_loss(place: int, student: str, wanted: str, teacher: TeacherConfig, losses: Sequence[LossConfig]) -> SoftLoss:
    # the hard loss on the same output says how it is compared, unless teacher.loss does
    beside = _loss_of(student, losses)
    hard = None if beside is None else losses[beside]
    kind: Kind = "mse"
    if teacher.loss != "auto":
        kind = teacher.loss
    elif hard and hard.rule.teacher:
        kind = hard.rule.teacher
    # the labels of the hard loss say which targets count, and its axis has the classes of the teacher, too
    labels_of = beside if hard and hard.has_class_axis else None
    class_axis = teacher.class_axis
    if hard and hard.class_axis is not None:
        class_axis = hard.class_axis
    return SoftLoss(
        place,
        student,
        wanted,
        kind,
        teacher.weight,
        teacher.temperature,
        matched=False,
        labels_of=labels_of,
        unlabelled=teacher.unlabelled,
        mask=teacher.mask,
        class_axis=class_axis,
    )


def _loss_of(student: str, losses: Sequence[LossConfig]) -> int | None:
    """Return the place of the loss that reads an output; None if none does.

    Only the file says which output is the first, so one loss that reads it is taken for that of the named output;
    diagnostics/teacher_check.py refuses another one.
    """
    if [each.outputs for each in losses] == [("",)]:
        return 0
    return next((at for at, each in enumerate(losses) if student in each.outputs), None)


def teacher_output(soft: SoftLoss, first: str, known: Sequence[str]) -> str:
    """Return the tensor of the teacher's file that a soft loss reads. Raises ConfigError if it is not clear.

    first: the model's first output; known: the teacher's outputs.
    """
    if soft.teacher:
        return soft.teacher
    name = soft.student or first
    if name in known or len(known) == 1:
        return name if name in known else known[0]
    raise ConfigError(
        f"the teacher has no output {name!r}, but {', '.join(known)}; say in teacher.output which of them {name!r} is "
        "to learn"
    )


def cache_problems(teacher: TeacherConfig, data: DataConfig) -> Iterable[str]:
    """Yield why a teacher's outputs cannot be computed once for each row."""
    if not teacher.path or teacher.cache == "none":
        return
    key = f"teacher.cache {teacher.cache!r} computes the teacher's outputs once for each row"
    if data.image and data.image.augment != type(data.image.augment)():
        yield f"{key}, but data.image.augment changes the images in each epoch; set teacher.cache = 'none'"
    if data.text and data.text.is_masked:
        task = data.text.task
        yield f"{key}, but data.text.task {task!r} draws other words in each epoch; set teacher.cache = 'none'"


def teacher_problems(teacher: TeacherConfig, model: ModelConfig, losses: Sequence[LossConfig]) -> Iterable[str]:
    """Yield what is wrong with [teacher]. losses: the hard ones, filled in."""
    alone = model.loss == TEACHER_ONLY
    if not teacher.path:
        if alone:
            yield 'model.loss "teacher" learns from a teacher alone, but teacher.path is empty; set it'
        # a setting that was written down as its default does no harm
        for name in teacher.changed("path"):
            yield f"teacher.{name} has no effect without teacher.path; name the teacher's file"
        return
    if not isinstance(teacher.output, str):
        for output in teacher.outputs:
            if not alone and _loss_of(output, losses) is None and teacher.loss == "auto":
                yield (
                    f"teacher.output names {output!r}, which no loss reads, so that it is not known how to compare it; "
                    "set teacher.loss to kl (scores of classes), bce (yes-or-no labels) or mse (numbers)"
                )
    for each in losses:
        if teacher.loss == "auto" and not each.rule.teacher:
            yield (
                f"the loss {each.name!r} does not say what its output is; set teacher.loss to kl (scores of classes), "
                "bce (yes-or-no labels) or mse (numbers)"
            )
    if alone and teacher.loss == "auto":
        yield (
            'model.loss "teacher": nothing says what the output is; set teacher.loss to kl (scores of classes), '
            "bce (yes-or-no labels) or mse (numbers)"
        )
    if alone and teacher.unlabelled:
        yield 'teacher.unlabelled is for data with labels, but model.loss is "teacher": remove it'
    soft = soft_losses(teacher, model, losses)
    if teacher.mask and any(each.labels_of is not None for each in soft):
        yield f"teacher.mask {teacher.mask!r} is for data without labels; the labels say which targets count: remove it"
    if teacher.unlabelled and not any(each.labels_of is not None for each in soft):
        yield "teacher.unlabelled needs labels that are classes: no soft loss leaves targets out; remove it"
    if teacher.class_axis is not None and all(each.kind != "kl" for each in soft):
        yield f"teacher.class_axis {teacher.class_axis} is for teacher.loss kl; remove it"
