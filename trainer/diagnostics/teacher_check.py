"""Check that a teacher's file fits the model: inputs, outputs and matched tensors, by what the files declare.

Needs no torch: the command line runs it before anything starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from onward.trainer.config.distillation import SoftLoss, soft_losses, teacher_output
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.teacher import TeacherConfig
from onward.trainer.config.urls import url_of
from onward.trainer.data.schema.class_axis import same_lengths
from onward.trainer.data.schema.signature import Signature, read_signature
from onward.trainer.errors import ConfigError, Refused
from onward.trainer.onnx_graph.files.index import did_you_mean, dims_of, known_types
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.onnx_graph.surgery.surgery import apply_surgery
from onward.trainer.quantities import shown_shape

Dims = Sequence[int | None]


def teacher_file_problems(
    teacher: TeacherConfig, model: ModelConfig, losses: Sequence[LossConfig], signature: Signature
) -> list[str]:
    """Return a sentence for everything in which the teacher does not fit the model; [] without a teacher.

    losses: those against labels, filled in. signature: of the trained part of the model.
    """
    given = teacher.path
    if not given or url_of(given):  # why it could not be fetched is known
        return []
    path = Path(given)
    if not path.is_file():
        return [f"teacher.path: there is no file {path}"]
    if not os.access(path, os.R_OK):
        return [f"teacher.path: no permission to read {path}"]
    try:
        theirs = read_signature(path)
        ours = read_model(model.path)
        # a new head has other classes; its values do not matter here
        apply_surgery(ours, model, seed=0)
    except Refused as error:
        return [f"teacher.path: {problem}" for problem in error.problems]
    problems = [*_input_problems(teacher, signature, theirs)]
    own = known_types(ours)
    other = known_types(read_model(path))
    # what the loss reads if nothing is named: the output of [model], else the first of the file
    first = (list(filter(None, model.outputs)) or [signature.outputs[0].name])[0]
    for soft in soft_losses(teacher, model, losses):
        try:
            wanted = teacher_output(soft, first, [info.name for info in theirs.outputs])
        except ConfigError as error:
            problems += error.problems
            continue
        student = soft.student or first
        if soft.labels_of is not None and losses[soft.labels_of].outputs == ("",) and student != first:
            problems.append(
                f"teacher.output names {student!r}, but the loss reads the first output, {first!r}; name what the loss "
                "reads in model.output"
            )
        missing = [
            f"{setting}: {whose} has no tensor {name!r}{did_you_mean(name, known)}"
            for setting, whose, name, known in (
                (_setting(soft), "the model", student, own),
                (_setting(soft), "the teacher", wanted, other),
            )
            if name not in known
        ]
        problems += missing
        if not missing:
            problems += _shape_problems(soft, (student, dims_of(own[student])), (wanted, dims_of(other[wanted])))
    if teacher.mask and teacher.mask not in (names := [info.name for info in signature.inputs]):
        problems.append(f"teacher.mask {teacher.mask!r} is no input of the model{did_you_mean(teacher.mask, names)}")
    return list(dict.fromkeys(problems))


def _setting(soft: SoftLoss) -> str:
    """Return the setting that names the tensors of a loss against the teacher."""
    return "teacher.match" if soft.matched else "teacher.output"


def _input_problems(teacher: TeacherConfig, signature: Signature, theirs: Signature) -> Iterator[str]:
    """Yield what is wrong with the inputs of the teacher, which are inputs of the model. theirs: of its file."""
    ours = {info.name: info for info in signature.inputs}
    mapped = teacher.inputs
    for name in mapped:
        if name not in (known := [info.name for info in theirs.inputs]):
            yield f"teacher.inputs names {name!r}, which is not an input of the teacher{did_you_mean(name, known)}"
    for info in theirs.inputs:
        source = mapped.get(info.name, info.name)
        if source not in ours:
            yield (
                f"teacher: the model has no input {source!r}, which the teacher reads; the model's inputs are "
                f"{', '.join(ours)}: set teacher.inputs, such as {{{info.name} = {next(iter(ours))!r}}}"
            )
            continue
        own = ours[source]
        # floating-point types are converted into each other; indices are not
        if ("int" in own.dtype) != ("int" in info.dtype):
            yield f"teacher: input {info.name!r} takes {info.dtype}, but the model's {source!r} {own.dtype}"
        if own.shape is not None and info.shape is not None and not same_lengths(own.shape[1:], info.shape[1:]):
            yield (
                f"teacher: input {info.name!r} is {shown_shape(info.shape)}, but the model's {source!r} is "
                f"{shown_shape(own.shape)}; both read the same values, so that a teacher that needs others, such as "
                "larger images, cannot be used"
            )


def _shape_problems(soft: SoftLoss, own: tuple[str, Dims | None], theirs: tuple[str, Dims | None]) -> Iterator[str]:
    """Yield why two tensors cannot be compared. own, theirs: name, and lengths of the axes, None = not declared."""
    (name, ours), (other, shape) = own, theirs
    if soft.matched or ours is None or shape is None:  # matched ones may be projected (model/teacher/teacher_model.py)
        return
    own_lengths = [dim for dim in ours[1:] if dim != 1]
    teacher_lengths = [dim for dim in shape[1:] if dim != 1]
    if not same_lengths(own_lengths, teacher_lengths):
        yield (
            f"teacher.output: the model's {name!r} is {shown_shape(ours)}, but the teacher's {other!r} is "
            f"{shown_shape(shape)}; both must have the same classes: name another output of the teacher, or set "
            "model.num_classes"
        )
