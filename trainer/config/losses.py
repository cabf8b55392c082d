"""The losses of a run: `[loss]` is one, `[[loss]]` one of several that are added up.

What an entry leaves out is read from the short form of one loss (`model.loss`, `model.output`, `model.ignore_index`,
`data.label`). `RunConfig.losses` holds the entries with everything filled in, and is what all code reads:

    [model] loss = "mse"                   ->  losses = (LossConfig(name="mse", output="", label="label", ...),)

    [[loss]] output = "boxes", name = "l1"     losses = (LossConfig(name="l1", output="boxes", ...),
    [[loss]] output = "kinds"              ->            LossConfig(name="cross_entropy", output="kinds", ...))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from onward.trainer.config.loss_rules import LOSS_RULES, LossName, LossRule
from onward.trainer.config.named_files import NamedFile, named_file
from onward.trainer.config.section import Length, NonNegativeInt, Section, as_tuple
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.model import ModelConfig


class LabelUnits(Section):
    """How the numbers of a label become those that a loss compares: (label - center) / scale, of log(1 + label) first
    with `log`. One number for all elements of a label, or one for each position of its first axis."""

    center: tuple[float, ...]
    """What is subtracted."""
    scale: tuple[PositiveFloat, ...]
    """What the difference is divided by."""
    log: bool = False
    """Whether log(1 + label) is taken before."""


class LossConfig(Section):
    """A loss: what it is, the output that it reads, and the labels that it compares it with. Several `[[loss]]` are
    added up: the loss of a step is the sum of weight x mean over the targets of each."""

    name: LossName | Literal[""] = ""
    """The loss; empty = `model.loss`. `huber`, `quantile`: of numbers. `focal`: of yes-or-no labels that are rare.
    `dice`: of segmentation masks, by sample. `giou`: of boxes (x1, y1, x2, y2). `ctc`: of sequences [B, T, C] with
    shorter labels. `cosine`: two outputs, alike or not (label 1 or -1). `triplet`: three outputs, without labels.
    `info_nce`: two outputs whose rows belong together, without labels. `set_classes`, `set_l1`, `set_giou`: of a
    detector that predicts a set of boxes (DETR), two outputs: class scores and boxes. `yolov5`, `yolov8`, `yolov10`,
    `yolo26`, `yolo26_end2end`, `yolox`, `fcos`, `retinanet`, `ssd`, `centernet`: of a detector with a grid, its raw
    outputs. `file`: your own."""
    file: str = ""
    """Your own loss: "my_loss.py:function", or an ONNX file with the inputs output and labels."""
    output: str | tuple[str, ...] = ""
    """The tensor that the loss reads, as in `model.output`; empty = `model.output`. Several for cosine, triplet,
    info_nce and the losses of boxes."""
    label: str | tuple[str, ...] = ""
    """The column (or columns) that the loss compares with; empty = `data.label`."""
    weight: PositiveFloat = 1.0
    """What the loss is multiplied by before several are added up."""
    class_axis: int | None = None
    """The axis of the output that has the classes, the rows being axis 0; not set = found from the shapes of output and
    labels, and refused where several axes fit."""
    ignore_index: int | None = None
    """Targets with this label are left out of the loss and of its mean (labels that are classes only); not set =
    `model.ignore_index`."""
    standardise_label: Literal["none", "standard", "robust", "log"] | LabelUnits = "none"
    """mse, l1, huber, quantile: compare label and output in other units, fitted on the labels of the training rows:
    `standard` = mean 0, standard deviation 1; `robust` = median 0, interquartile range 1; `log` = `standard` of
    log(1 + label), for labels from 0 on. The exported file, its metrics and all predictions are in the label's own
    units: where the graph computes standardised numbers, nodes behind its output turn them back."""
    output_units: Literal["auto", "standardised", "label"] = "auto"
    """With `standardise_label`, what the file computes as it comes in: `standardised` numbers, as a model with fresh
    weights does, or numbers in the units of the `label`, as a trained model may. `auto` = what is nearer to the labels
    of the first rows, which the rehearsal finds and the run keeps."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """cross_entropy: the share of each label that is spread over all classes."""
    class_weights: tuple[NonNegativeFloat, ...] | Literal["balanced"] = ()
    """cross_entropy, bce_with_logits: a weight for each class. The mean of a cross-entropy divides by the sum of the
    weights of its targets, as torch's does. `balanced` = rows / (classes x rows of the class) in the training data."""
    positive_weights: tuple[NonNegativeFloat, ...] = ()
    """bce_with_logits: what the terms of positive labels are multiplied by, for each label (or one for all)."""
    delta: PositiveFloat = 1.0
    """huber: where the square ends and the absolute value begins."""
    quantiles: tuple[Annotated[float, Field(gt=0.0, lt=1.0)], ...] = (0.5,)
    """quantile: those that the last axis of the output predicts."""
    alpha: Annotated[float, Field(ge=-1.0, le=1.0)] = 0.25
    """focal, set_classes, fcos, retinanet: the weight of positive labels, 1 - alpha that of negative ones; below 0 =
    none."""
    gamma: NonNegativeFloat = 2.0
    """focal, set_classes, fcos, retinanet: how much less labels count that are predicted well."""
    scores: Literal["softmax", "sigmoid", "varifocal"] = "softmax"
    """set_classes, set_l1, set_giou: how class scores are read, which decides how boxes are assigned, too: `softmax`
    over the classes and one for no object, which is the last (DETR, YOLOS), or a `sigmoid` for each class, with the
    focal loss (Deformable DETR); `varifocal` = the same towards the overlap of the box (RT-DETR, D-FINE)."""
    num_queries: NonNegativeInt = 0
    """set_classes: the boxes that the model predicts for each image; 0 = as its file says."""
    image_size: tuple[Length, Length] | None = None
    """set_classes and losses of a grid: width and height of an image in the pixels by which the metrics map_small,
    map_medium and map_large divide objects; not set = those of the model's input."""
    strides: tuple[PositiveFloat, ...] = ()
    """Losses of a grid: for each level the pixels of the model's input from one cell to the next."""
    anchors: tuple[tuple[tuple[PositiveFloat, PositiveFloat], ...], ...] = ()
    """yolov5, retinanet, ssd: for each level width and height of the anchors of a cell, in pixels of the model's
    input."""
    smooth: NonNegativeFloat = 1.0
    """dice: added to the overlap and to the sizes, so that classes that are absent have no loss."""
    blank: NonNegativeInt = 0
    """ctc: the class that stands for no label."""
    input_lengths: str = ""
    """ctc: the column with the number of time steps of the output that each row has, the others being padding; empty =
    all of them, in every row."""
    margin: NonNegativeFloat | None = None
    """triplet: how much farther the third output must be than the second; not set = 1. cosine: the similarity from
    which unlike rows count; not set = 0."""
    temperature: PositiveFloat = 0.07
    """info_nce: what the similarities are divided by."""
    label_type: Literal["auto", "float32", "int64"] = "auto"
    """The type of the labels. file: what your loss is given; `auto` = float32. cross_entropy: `float32` = probabilities
    of the classes, of the output's shape, as torch's cross_entropy takes them; `auto` = numbers of classes."""
    count: str = ""
    """file: the function of your Python file that counts the targets, count(labels, size); empty = one for each row."""

    @property
    def rule(self) -> LossRule:
        """What the loss is, of an entry that is filled in."""
        assert self.name
        return LOSS_RULES[self.name]

    @property
    def num_terms(self) -> int:
        """The sums that the loss returns, each of which is divided by its own number of targets."""
        return 1 + len(self.strides) if self.rule.by_level else 1

    @property
    def is_own(self) -> bool:
        """Whether the loss is a function or an ONNX file of the user's."""
        return self.rule.labels == "own"

    @property
    def takes_boxes(self) -> bool:
        """Whether the labels may be the boxes of an image, of any number."""
        return self.is_own or self.rule.labels == "objects"

    @property
    def named(self) -> NamedFile:
        """What `file` names."""
        return named_file("loss.file", self.file)

    @property
    def ignored(self) -> int:
        """`ignore_index`, of an entry that is filled in."""
        assert self.ignore_index is not None
        return self.ignore_index

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that it reads; "" = the first of the graph."""
        return as_tuple(self.output)

    @property
    def columns(self) -> tuple[str, ...]:
        """The label's columns; empty when there are no labels."""
        return as_tuple(self.label) if self.takes_labels else ()

    @property
    def takes_labels(self) -> bool:
        """Whether the loss compares its output with labels."""
        return self.rule.labels != "none"

    @property
    def soft_labels(self) -> bool:
        """Whether the labels are probabilities of classes."""
        return self.rule.labels == "classes" and self.label_type == "float32"

    @property
    def has_classes(self) -> bool:
        """Whether the labels are numbers of classes, int64."""
        return self.rule.labels in ("classes", "sequences") and not self.soft_labels

    @property
    def has_class_axis(self) -> bool:
        """Whether one axis of the output has the scores of classes, and the labels have the others."""
        return self.rule.labels == "classes" and not self.soft_labels

    @property
    def label_dtype(self) -> Literal["float32", "int64"]:
        """The element type of the labels."""
        return "int64" if self.has_classes or self.label_type == "int64" else "float32"

    @property
    def label_units(self) -> LabelUnits | None:
        """In which units label and output are compared; None = their own. Data completes the setting before."""
        if isinstance(self.standardise_label, LabelUnits):
            return self.standardise_label
        assert self.standardise_label == "none", "loss.standardise_label is not completed from the data"
        return None

    @property
    def is_plain(self) -> bool:
        """Whether it is the mean of -log p(label) over the labels that are not ignored, and nothing else."""
        changed = self.label_smoothing or self.class_weights or self.soft_labels
        return self.rule.sharded_logits and not changed


def export_problems(losses: Sequence[LossConfig]) -> Iterable[str]:
    """Yield why the variant `training` cannot write these losses into its files."""
    for place, each in enumerate(losses):
        if each.rule.no_onnx:
            yield (
                f"export.variants 'training' has no ONNX form of {key_of(losses, place, 'name')} {each.name!r}: "
                f"{each.rule.no_onnx}; leave the variant out"
            )
        if each.is_own and each.file and each.named.is_code:
            yield (
                f"export.variants 'training' has no ONNX form of {key_of(losses, place, 'file')} {each.file!r}: it is "
                "Python; write the loss as an ONNX file, or leave the variant out"
            )


def setting_problems(losses: Sequence[LossConfig]) -> Iterable[str]:
    """Yield what is wrong with the settings of single losses, which are filled in."""
    takers = {}
    for name in LossConfig.model_fields:
        takers[name] = [loss for loss, rule in LOSS_RULES.items() if name in rule.takes]
    for place, each in enumerate(losses):
        key = functools.partial(key_of, losses, place)
        for name, allowed in takers.items():
            # every entry that is filled in has an ignored label
            if not allowed or each.name in allowed or name == "ignore_index":
                continue
            if getattr(each, name) != LossConfig.model_fields[name].default:
                yield f"{key(name)} {getattr(each, name)!r} is for {' and '.join(allowed)}, not for {each.name}"
        if each.output_units != "auto" and each.standardise_label == "none":
            yield f"{key('output_units')} {each.output_units!r} needs {key('standardise_label')}"
        if each.name == "teacher":
            yield f"{key('name')} 'teacher' takes no [loss]; write model.loss = \"teacher\" and remove [loss]"
        if each.is_own and not each.file:
            yield f"{key('name')} 'file' needs {key('file')}: \"my_loss.py:function\" or an ONNX file"
        if each.named.is_code and each.named.function and not each.named.function.isidentifier():
            yield (
                f"{key('file')} {each.file!r} names neither a function of a Python file nor an ONNX file; write "
                '"my_loss.py:function" or "my_loss.onnx"'
            )
        if each.count and each.file and not each.named.is_code:
            yield f"{key('count')} names a function of a Python file, but {key('file')} is an ONNX file; remove it"
        elif each.count and not each.count.isidentifier():
            yield f"{key('count')} {each.count!r} is not the name of a function of {key('file')}"
        wanted = each.rule.num_outputs
        if each.rule.own_divisor and len(losses) > 1:
            yield (
                f"{key('name')} {each.name!r} counts by what it is divided when it is computed, so it is the only loss "
                "of a run; remove the others"
            )
        for name in ("strides", "anchors"):
            if name in each.rule.takes and not getattr(each, name):
                yield f"{key('name')} {each.name!r} needs {key(name)}; `onward init MODEL IMAGES` reads the file"
        yield from _grid_problems(each, key)
        if wanted and len(each.outputs) != wanted:
            found = len(each.outputs)
            yield f"{key('output')}: {each.name} reads {wanted} outputs of the graph, not {found}; name them"
        # each yes-or-no label has classes of its own, whose balance is a weight of the positives
        if "positive_weights" in each.rule.takes and each.class_weights == "balanced":
            yield f"{key('class_weights')} 'balanced' is for cross_entropy; {each.name} has positive_weights"
        if each.soft_labels and each.class_weights == "balanced":
            yield f"{key('class_weights')} 'balanced' counts labels that are classes, not probabilities"


def _grid_problems(loss: LossConfig, key: Callable[[str], str]) -> Iterable[str]:
    """Yield what is wrong with the levels of a detector with a grid."""
    if loss.anchors and len(loss.anchors) != len(loss.strides):
        yield f"{key('anchors')} has {len(loss.anchors)} levels, but {key('strides')} {len(loss.strides)}"
    if any(not level for level in loss.anchors):
        yield f"{key('anchors')} has a level without anchors; give each level at least one [width, height]"
    tensors, levels, roles = len(loss.outputs), len(loss.strides), len(loss.rule.roles)
    if loss.strides and tensors not in (levels, levels * roles):
        yield (
            f"{key('output')} names {tensors} tensors, but {key('strides')} has {levels} levels, of one tensor or "
            f"{roles} each: {', '.join(loss.rule.roles)}"
        )
    if loss.name == "centernet" and len(loss.strides) > 1:
        yield f"{key('strides')} has {len(loss.strides)} levels, but centernet reads one heat map"


def filled(model: ModelConfig, data: DataConfig, loss: Sequence[LossConfig]) -> tuple[LossConfig, ...]:
    """Return every loss with name, output, label and ignored label filled in from the short form."""
    if model.loss == "teacher" and not loss:  # nothing but what the teacher computes is learnt
        return ()
    entries = tuple(loss) or (LossConfig(),)
    outputs: Sequence[str | tuple[str, ...]] = (model.output,) * len(entries)
    if not isinstance(model.output, str) and len(entries) > 1:
        outputs = model.output
    # model.output may name fewer tensors than there are losses, which `contradictions` reports later
    outputs = (*outputs, *("",) * len(entries))
    losses = []
    for entry, output in zip(entries, outputs, strict=False):
        name = entry.name or ("file" if entry.file else model.loss)
        ignored = model.ignore_index if entry.ignore_index is None else entry.ignore_index
        update = {
            "name": name,
            "output": entry.output or output,
            "label": entry.label or data.label,
            "ignore_index": ignored,
        }
        losses.append(entry.model_copy(update=update))
    return tuple(losses)


def with_outputs(model: ModelConfig, losses: Sequence[LossConfig]) -> ModelConfig:
    """Return [model] with the outputs that the filled losses read, and of one loss its name, for surgery."""
    if not losses:
        return model
    outputs = tuple(output for each in losses for output in each.outputs)
    found: dict[str, object] = {"output": outputs[0] if len(set(outputs)) == 1 else outputs}
    if len(losses) == 1:
        found["loss"] = losses[0].name
    return model.model_copy(update=found)


def titles(losses: Sequence[LossConfig], output_names: Sequence[str] = ()) -> list[str]:
    """Return what metrics of each loss are named after: its output, and its name where several losses read the output.

    Of a loss that reads several outputs it is its name alone.

    output_names: those of the graph, for a loss that reads the first one without naming it.
    """
    first = output_names[0] if output_names else "first"
    outputs = []
    for loss in losses:
        # MLflow's names may not have a + between outputs
        outputs.append((loss.outputs[0] or first) if len(loss.outputs) == 1 else loss.name)
    names = [
        output if outputs.count(output) == 1 else f"{output}/{loss.name}"
        for output, loss in zip(outputs, losses, strict=True)
    ]
    # losses of one name on one output are told apart by their number alone
    return [name if names.count(name) == 1 else f"{name}/{place}" for place, name in enumerate(names)]


def key_of(losses: Sequence[LossConfig], place: int, setting: str) -> str:
    """Return how messages name a setting of a loss: `loss.weight`, or `loss.1.weight` where there are several."""
    return f"loss.{setting}" if len(losses) < 2 else f"loss.{place}.{setting}"


def unchosen_units(losses: Sequence[LossConfig], why: str) -> Iterable[str]:
    """Yield a sentence for each loss with `output_units` to be chosen where nothing can be tried; why: a clause."""
    for place, each in enumerate(losses):
        if each.standardise_label != "none" and each.output_units == "auto":
            key = key_of(losses, place, "output_units")
            yield (
                f"{key} 'auto' runs the model on the first rows, but {why}; set it to 'standardised' for a model with "
                "fresh weights, or to 'label' for one whose outputs are in the units of the labels"
            )


def contradictions(model: ModelConfig, data: DataConfig, loss: Sequence[LossConfig]) -> Iterable[str]:
    """Yield a sentence for each setting of a loss that the short form sets differently."""
    own = tuple(output for each in loss for output in each.outputs)
    # a single loss may read several outputs, and several losses one each
    names_several = not isinstance(model.output, str) and len(loss) > 1
    if names_several and len(model.output) != len(loss) and model.output != own:
        yield f"model.output names {len(model.output)} tensors, but there are {len(loss)} [[loss]]; name one for each"
        return
    shorts: list[tuple[str, str, object, object]] = [
        ("name", "model.loss", model.loss, ModelConfig.model_fields["loss"].default),
        ("ignore_index", "model.ignore_index", model.ignore_index, ModelConfig.model_fields["ignore_index"].default),
        ("label", "data.label", data.label, DataConfig.model_fields["label"].default),
    ]
    for place, each in enumerate(loss):
        output = model.output
        if model.output == own:  # as a validated configuration has them
            output = each.output
        elif not isinstance(model.output, str) and len(loss) > 1:
            output = model.output[place]
        for setting, short, value, default in (*shorts, ("output", "model.output", output, "")):
            given = getattr(each, setting)
            # an entry that says the same as the short form, or nothing, contradicts nothing
            if given not in ("", None, value) and value != default:
                yield (
                    f"{key_of(loss, place, setting)} is {given!r}, but its short form {short} is {value!r}; set one "
                    "of the two"
                )
