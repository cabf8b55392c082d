"""Let losses of scores read the scores where the file's output holds the probabilities that are computed from them.

    x --- ... --- logits --- Softmax --- probabilities        the first output of the file, which stays what it is
                    '------------------------------------     what the loss cross_entropy reads, if no setting says else

A loss of scores applies a softmax or a sigmoid of its own. Of probabilities it would apply a second one, and hardly
fall: cross_entropy of 3 classes could not go below 0.55. The choice is made once, when a run begins, and is kept in its
config.json as `model.output` (or `loss.output`): runs of earlier versions go on with what they read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from onward.trainer.config.distillation import SoftLoss, teacher_output
from onward.trainer.config.loss_rules import LOSS_RULES, SIGMOID, SOFTMAX
from onward.trainer.config.losses import LossConfig, key_of, with_outputs
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.teacher import TeacherConfig
from onward.trainer.config.urls import url_of
from onward.trainer.errors import Refused
from onward.trainer.onnx_graph.files.index import FLOAT_TYPES, Index, dims_of, known_types, opsets_of
from onward.trainer.onnx_graph.files.model_files import read_model
from onward.trainer.onnx_graph.probabilities import Activation, activation_of

OF_TEACHERS: Mapping[str, tuple[str, ...]] = {"kl": SOFTMAX, "bce": SIGMOID}
"""`teacher.loss` -> the same as `LossRule.applies`."""


@dataclass(frozen=True)
class _Output:
    """An output of a file, and the activation that computes it."""

    name: str
    found: Activation | None = None
    axis: int | None = None
    """The axis of a softmax, from 0; None for a sigmoid, or if the rank of the output is not known."""
    dims: tuple[int | None, ...] | None = None


def with_scores(config: RunConfig, local: RunConfig | None = None) -> RunConfig:
    """Return the configuration in which losses of scores name the scores, where nothing names what they read.

    local: the same configuration with local copies in place of URLs. The configuration itself if there is nothing to
    name, and if a file cannot be read, which is reported elsewhere.
    """
    where = local or config
    named = [*config.model.outputs, *(output for each in config.losses for output in each.outputs)]
    says_teacher = bool(config.teacher.path and config.teacher.output)
    # some loss must name no output, and nothing be said about that output by its name
    if says_teacher or "" not in named or url_of(where.model.path):
        return config
    try:
        outputs = _outputs(where.model.path)
        # a file without outputs is refused elsewhere
        if not outputs or not any(
            _fits(outputs[0], name, axis) for name, axis in _asked(config.teacher, config.losses)
        ):
            return config
        first = outputs[0]
        return _named(config, first, Path(where.teacher.path) if where.teacher.path else None)
    except (Refused, OSError):
        return config


def scores_said(before: RunConfig, after: RunConfig, local: RunConfig | None = None) -> Iterator[str]:
    """Yield a sentence for each loss that `with_scores` has given its tensor. local: as there."""
    if before.losses == after.losses and before.model == after.model:
        return
    first = _outputs((local or after).model.path)[0]
    assert first.found is not None
    read_before = _read_by(before.model, before.losses, before.teacher)
    read_after = _read_by(after.model, after.losses, after.teacher)
    for place, ((name, given), (_, read)) in enumerate(zip(read_before, read_after, strict=True)):
        # only what is read now and was not before is worth a sentence
        if given == read or read != first.found.scores:
            continue
        key = key_of(before.losses, place, "output") if len(before.losses) > 1 else "model.output"
        yield (
            f"the loss {name} reads {read!r}, the logits before {first.found.name}, since the output {first.name!r} "
            "holds probabilities; the exported file still has this output. To compute the loss from the "
            f"probabilities, set {key} = {first.name!r}"
        )


def losses_of_scores(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the losses that would read the scores behind the first output of a file, if nothing names what to read."""
    first = next(iter(_outputs_of(model)), None)
    if first is None:
        return ()
    return tuple(name for name in LOSS_RULES if _fits(first, name, None))


def _read_by(
    model: ModelConfig, losses: Sequence[LossConfig], teacher: TeacherConfig
) -> list[tuple[str, str | tuple[str, ...]]]:
    """Return (loss, the tensor that it reads) of each loss, or of what learns from a teacher alone."""
    if not losses:
        return [(teacher.loss, model.output)]
    return [(each.name, each.output) for each in losses]


def _asked(teacher: TeacherConfig, losses: Sequence[LossConfig]) -> list[tuple[str, int | None]]:
    """Return (loss, axis of the classes if it is set) of each loss that reads the first output without naming it."""
    if not losses:  # a teacher alone
        return [(teacher.loss, teacher.class_axis)]
    return [(each.name, each.class_axis) for each in losses if each.outputs == ("",)]


def _named(config: RunConfig, first: _Output, teacher: Path | None) -> RunConfig:
    """Return the configuration with the tensor that each loss reads, and the one of the teacher for it."""
    assert first.found is not None
    scores = first.found.scores
    losses = config.losses
    read = []
    for loss in losses:
        # beside a loss that names its output, "" would no longer be the first one
        default = scores if _fits(first, loss.name, loss.class_axis) else first.name
        read.append(loss.output or default)
    newly_named = [str(output) for output, loss in zip(read, losses, strict=True) if not loss.output]
    named = list(dict.fromkeys(newly_named)) or [scores]
    changed: dict[str, object] = {}
    if teacher is not None:
        output = _of_teacher(config.soft_losses, first, named, teacher)
        changed["teacher"] = config.teacher.model_copy(update={"output": output})
    # a single loss is written in the short form, model.output
    if len(losses) < 2:
        changed["model"] = config.model.model_copy(update={"output": scores})
    changed["loss"] = tuple(
        own.model_copy(update={"output": output}) for own, output in zip(config.loss, read, strict=False)
    )
    config = config.model_copy(update=changed)
    return config.model_copy(update={"model": with_outputs(config.model, config.losses)})


def _of_teacher(
    soft_losses: Sequence[SoftLoss], first: _Output, named: Sequence[str], path: Path
) -> str | dict[str, str]:
    """Return `teacher.output`, which is not set: the teacher's scores for the model's, else as its default is.

    named: what the losses read that named no output.
    """
    assert first.found is not None
    theirs = {each.name: each for each in _outputs(path)}
    pairs = dict[str, str]()
    for soft in soft_losses:
        if soft.matched:
            continue
        own = theirs[teacher_output(soft, first.name, list(theirs))]
        # the teacher's scores stand for the model's only where both become probabilities in the same way
        is_alike = own.found is not None and (own.found.kind == "sigmoid") == (first.found.kind == "sigmoid")
        for student in [soft.student] if soft.student else named:
            pairs[student] = own.name
            if own.found and is_alike and student == first.found.scores:
                pairs[student] = own.found.scores
    return next(iter(pairs.values())) if len(pairs) == 1 else pairs


def _fits(output: _Output, loss: str, class_axis: int | None) -> bool:
    """Return whether a loss applies the activation that has computed an output, along the same axis."""
    found = output.found
    rule = next((rule for name, rule in LOSS_RULES.items() if name == loss), None)
    applied = rule.applies if rule else OF_TEACHERS.get(loss, ())
    if found is None or found.kind not in applied:
        return False
    if found.kind == "sigmoid" and rule and rule.binary_scores:  # of several classes it applies a softmax
        return output.dims is not None and len(output.dims) > 1 and 1 in (output.dims[1], output.dims[-1])
    if found.kind == "sigmoid" or output.dims is None:
        return class_axis is None or found.kind == "sigmoid"
    rank = len(output.dims)
    # a CTC has its symbols on the last axis
    wanted = rank - 1 if rule and rule.labels == "sequences" else class_axis
    # a softmax over the rows is none over classes
    return output.axis != 0 and (wanted is None or wanted % rank == output.axis)


def _outputs(path: Path) -> Sequence[_Output]:
    """Return the outputs of a file. Raises OSError or UnsupportedModel."""
    found = path.stat()
    return _read(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@functools.lru_cache(maxsize=16)  # one command asks several times
def _read(path: Path, version: tuple[int, ...]) -> Sequence[_Output]:
    return _outputs_of(read_model(path))


def _outputs_of(model: onnx.ModelProto) -> Sequence[_Output]:
    index = Index(model.graph)
    found = {value.name: activation_of(index, value.name) for value in model.graph.output}
    # inferring types takes time, and only scores need it
    types = known_types(model) if any(found.values()) else {}
    return [_output(model, index, name, each, types) for name, each in found.items()]


def _output(
    model: onnx.ModelProto,
    index: Index,
    name: str,
    found: Activation | None,
    types: Mapping[str, onnx.ValueInfoProto],
) -> _Output:
    if found is None or found.kind == "log_softmax":
        return _Output(name)
    kind = types[found.scores].type.tensor_type.elem_type if found.scores in types else 0
    # what is computed from no node, or has no known type, cannot be what a loss reads
    if found.scores not in index.makers or kind not in FLOAT_TYPES:
        return _Output(name)
    dims = dims_of(types.get(name)) or dims_of(types.get(found.scores))
    if found.kind == "sigmoid" or dims is None:
        return _Output(name, found, None, tuple(dims) if dims else None)
    flattens = opsets_of(model).get("", 13) < 13 and not found.written_out
    # the default of Softmax was axis 1 before opset 13, and is the last one since
    axis = (found.axis if found.axis is not None else 1 if flattens else -1) % len(dims)
    if flattens and any(dim != 1 for dim in dims[axis + 1 :]):
        return _Output(name)  # until opset 13 one softmax is over all axes from this one on
    return _Output(name, found, axis, tuple(dims))
