"""Propose how boxes of object detection are read, and the losses of a detector that predicts a set of them.

photos/  beside  annotations.json             data.image.boxes = "../annotations.json"
images/train  beside  labels/train            data.image.boxes = "../../labels/{source}"
outputs [batch, queries, classes] and [batch, queries, 4]      set_classes, set_l1, set_giou
a detector with a grid, recognised by its decoding             the loss of its family (dense_head.py)
one whose input is an image without a batch                    model.start = the batch that it makes (raw_outputs.py)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from onward.trainer.config.loss_rules import DENSE_LOSSES
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.data.images.image_sources import annotations_beside
from onward.trainer.data.reading import sources
from onward.trainer.data.reading.source_kinds import BOX_PAGE
from onward.trainer.errors import ConfigError
from onward.trainer.onnx_graph.files.index import dims_of, nodes_of
from onward.trainer.onnx_graph.surgery.surgery import apply_surgery
from onward.trainer.proposal.detectors.dense_head import DenseHead, recognise
from onward.trainer.proposal.detectors.raw_outputs import (
    RawOutputs,
    find_raw_outputs,
    image_input,
    measured_shapes,
)
from onward.trainer.proposal.inputs import num_axes, shown

if TYPE_CHECKING:
    from onward.trainer.data.images.box_annotations import Annotations
    from onward.trainer.proposal.draft import Draft
    from onward.trainer.proposal.source_summary import Facts
    from onward.trainer.proposal.targets import Target

SHARES = {"resize": "pad_grey", "mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}
PIXELS: Mapping[str, Mapping[str, object]] = {
    "yolov5": SHARES,
    "yolov8": SHARES,
    "yolov10": SHARES,
    "yolo26": SHARES,
    "yolo26_end2end": SHARES,
    "yolox": {**SHARES, "resize": "corner_grey", "scale": 1.0, "color": "bgr"},
    "fcos": {"resize": "corner_mean"},
    "retinanet": {"resize": "corner_mean"},
    "centernet": {"resize": "pad"},
}
"""Family -> the preprocessing of its own training, which is proposed unless a trial finds another one."""
NO_FILE = "is data.image.boxes the right place, and do its files have the names of the images?"
LARGE_STD = 2.0
"""Pixels from 0 to 1 have a smaller standard deviation; a file that divides by more takes pixels from 0 to 255."""
WEIGHTS = {"set_classes": 1.0, "set_l1": 5.0, "set_giou": 2.0}
"""Of the losses, as in DETR."""


def propose_boxes(draft: Draft, model: onnx.ModelProto, facts: Facts, found: Sequence[Target]) -> list[str]:
    """Propose the losses of boxes; return the columns that feed no input, [] if the data has no boxes.

    Raises ConfigError for a model that neither predicts a set of boxes nor has a grid that is recognised.
    """
    if not draft.value("data.image.boxes"):
        return []
    column = facts.data.image.box_column if facts.data.image else "boxes"
    labels = _annotations(facts)
    draft.set("data.label", column, f"the boxes of each image: {labels}" if labels else "the boxes of each image")
    if labels and labels.is_sparse:
        draft.notes.append(f"{labels}: {NO_FILE}")
    if draft.is_given("loss") or draft.is_given("loss.file"):
        return [column]
    sets = [target.info for target in found if num_axes(target.info) == 3]
    widths = {info.name: info.shape[2] if info.shape else None for info in sets}
    folder = Path(draft.value("model.path")).parent
    measured: Mapping[str, tuple[int, ...]] = {}
    if any(None in (info.shape or (None,))[1:] for info in sets):
        measured = measured_shapes(model, list(widths), folder)
        widths |= {name: shape[2] for name, shape in measured.items()}
    boxes = [info for info in sets if widths[info.name] == 4]
    scores = [info for info in sets if widths[info.name] != 4]
    raw = find_raw_outputs(model, folder)
    head = recognise(raw) if raw else None
    # boxes and scores of all cells of a grid look as those of a set do
    if head or len(boxes) != 1 or len(scores) != 1:
        _propose_dense(draft, model, facts, found, raw, head)
        return [column]
    names = [scores[0].name, boxes[0].name]
    shapes = f"outputs {shown(scores[0])} and {shown(boxes[0])}: a set of boxes"
    queries = measured[names[0]][1] if measured else 0
    _propose_set(draft, model, names, shapes, _has_no_object(draft, _class_names(facts), widths[names[0]]), queries)
    return [column]


def _propose_set(
    draft: Draft, model: onnx.ModelProto, names: Sequence[str], shapes: str, has_nothing: bool, queries: int
) -> None:
    """Propose the losses of a set. has_nothing: whether a score is that of no object. queries: 0 = as the file says."""
    kind, reason = ("", "") if has_nothing else ("sigmoid", "as many scores as classes")
    # such files have no score for no object, whatever the number of classes
    if any(node.op_type == "TopK" for node in nodes_of(model.graph)):
        kind, reason = "varifocal", "the file chooses its queries by their scores, as RT-DETR does"
    if not kind:
        draft.set("data.image.resize", "corner_mean", "as DETR and YOLOS are trained")
    for position, (name, weight) in enumerate(WEIGHTS.items()):
        draft.set(f"loss.{position}.name", name, "" if position else shapes)
        draft.set(f"loss.{position}.output", list(names), "")
        if weight != 1.0:
            draft.set(f"loss.{position}.weight", weight, "as in DETR")
        if kind:
            draft.set(f"loss.{position}.scores", kind, "" if position else reason)
    if queries and not kind:
        draft.set("loss.0.num_queries", queries, "counted by running the file, which does not declare them")
    draft.set("metrics", ["map", "map_50"], "")


def propose_start(draft: Draft, model: onnx.ModelProto) -> bool:
    """Propose `model.start`, with the pixels of its images, for a detector whose input has no batch.

    Return whether the file itself normalises the pixels, so that no other values need a trial.
    """
    image = None if draft.is_given("model.start") else image_input(model)
    # channels, height and width
    if image is None or len(dims_of(image) or ()) != 3:
        return False
    raw = find_raw_outputs(model, Path(draft.value("model.path")).parent)
    start = raw.start if raw else None
    if start is None:
        return False
    reason = f"the batch of one that the file makes of {image.name}, an image alone: training feeds batches of any size"
    draft.set("model.start", [start.name], reason)
    if start.std:
        is_bytes = max(start.std) > LARGE_STD
        draft.set("data.image.mean", list(start.mean), f"as the file normalises {image.name}, measured by running it")
        draft.set("data.image.std", list(start.std), "")
        if is_bytes:
            draft.set("data.image.scale", 1.0, f"{image.name} has pixels from 0 to 255")
    return bool(start.std)


def _propose_dense(
    draft: Draft,
    model: onnx.ModelProto,
    facts: Facts,
    found: Sequence[Target],
    raw: RawOutputs | None,
    head: DenseHead | None,
) -> None:
    """Propose the loss of the family of a detector with a grid. Raises ConfigError if none is recognised."""
    if head is None:
        listed = ", ".join(f"{target.info.name} {shown(target.info)}" for target in found) or "none of floats"
        candidates = f"; its last layers are {raw.described}" if raw else ""
        raise ConfigError(
            "boxes are learned by class scores [batch, queries, classes] and boxes [batch, queries, 4], as DETR has "
            f"them, or by the raw outputs of {', '.join(DENSE_LOSSES)}. The outputs are {listed}, and from no raw "
            f"outputs of one of these families does the file compute its boxes{candidates}; set loss.name, "
            "loss.output and loss.strides by hand, or name a loss of your own (loss.file=...); "
            f"{BOX_PAGE} says which detectors are trained"
        )
    draft.set("loss.name", head.loss.name, head.reason)
    draft.set("loss.output", list(head.loss.outputs), "the raw outputs, before boxes are decoded")
    draft.set("loss.strides", list(head.loss.strides), "pixels of the input for each cell")
    if head.loss.anchors:
        anchors = [[list(sides) for sides in level] for level in head.loss.anchors]
        draft.set("loss.anchors", anchors, "read from the boxes that the file computes")
    # what the file itself does to the pixels is known by now
    is_known = "data.image.mean" in draft.entries
    for key, value in PIXELS.get(head.loss.name, {}).items():
        if key == "resize" or not is_known:
            draft.set(f"data.image.{key}", value, f"as {head.loss.name} is trained")
    draft.set("metrics", ["map", "map_50"], "")
    names = _class_names(facts)
    if names and len(names) != head.num_classes:
        _propose_classes(draft, model, head, len(names))


def _propose_classes(draft: Draft, model: onnx.ModelProto, head: DenseHead, number: int) -> None:
    """Propose `model.num_classes`, or note that the data gets the first classes of a file that can have no others.

    Raises ConfigError if the file can have no others, and fewer than the data.
    """
    reason = f"the file has {head.num_classes} classes, the data others"
    new = {"output": head.loss.outputs, "loss": head.loss.name, "num_classes": number}
    copy = deepcopy(model)
    try:
        apply_surgery(copy, ModelConfig.model_validate({"path": draft.value("model.path"), **new}), seed=0)
    except ConfigError as error:
        if number > head.num_classes:
            raise
        draft.notes.append(f"{reason}: they are trained as the first {number} ({error.problems[0]})")
    else:
        draft.set("model.num_classes", number, f"{reason}: the layers of its scores begin anew")


def _annotations(facts: Facts) -> Annotations | None:
    place = facts.data.image.box_place if facts.data.image else ""
    return annotations_beside(sources.locate(facts.data.source, facts.data).files, place) if place else None


def _class_names(facts: Facts) -> set[str]:
    """Return the classes of annotations beside images; of a table, whose cells are read later, none."""
    found = _annotations(facts)
    if found is None:
        return set()
    if found.names:
        return set(found.names)
    return {box.name for boxes in found.boxes.values() for box in boxes}


def _has_no_object(draft: Draft, names: Collection[str], num_scores: int | None) -> bool:
    """Return whether one of the scores stands for no object: the last one, of one more than there are classes."""
    if not names:
        return True
    if num_scores == len(names):
        return False
    if num_scores is not None and num_scores <= len(names):
        draft.notes.append(_too_few_scores(num_scores, names))
    return True


def _too_few_scores(num_scores: int, names: Collection[str]) -> str:
    listed = ", ".join(sorted(names)[:10])
    return f"the model has {num_scores} scores for each box, and the data {len(names)} classes: {listed}"
