"""Propose how boxes of object detection are read, and the losses of a detector that predicts a set of them.

photos/  beside  annotations.json             data.image.boxes = "../annotations.json"
images/train  beside  labels/train            data.image.boxes = "../../labels/{source}"
outputs [batch, queries, classes] and [batch, queries, 4]      set_classes, set_l1, set_giou
"""

from __future__ import annotations

from collections.abc import Sequence

from onward.trainer.data.images.box_annotations import read_annotations
from onward.trainer.data.reading import sources
from onward.trainer.data.reading.source_kinds import BOX_PAGE
from onward.trainer.data.schema.allowed_files import folder_of
from onward.trainer.errors import ConfigError
from onward.trainer.proposal.draft import Draft
from onward.trainer.proposal.inputs import num_axes, shown
from onward.trainer.proposal.source_summary import Facts
from onward.trainer.proposal.targets import Target

WEIGHTS = {"set_classes": 1.0, "set_l1": 5.0, "set_giou": 2.0}
"""Of the losses, as in DETR."""


def propose_boxes(draft: Draft, facts: Facts, found: Sequence[Target]) -> list[str]:
    """Propose the losses of boxes; return the columns that feed no input, [] if the data has no boxes.

    Raises ConfigError for a model without the two outputs that these losses read.
    """
    if not draft.value("data.image.boxes"):
        return []
    column = facts.data.image.box_column if facts.data.image else "boxes"
    draft.set("data.label", column, "the boxes of each image")
    if draft.is_given("loss") or draft.is_given("loss.file"):
        return [column]
    sets = [target.info for target in found if num_axes(target.info) == 3]
    widths = {info.name: info.shape[2] if info.shape else None for info in sets}
    boxes = [info for info in sets if widths[info.name] == 4]
    scores = [info for info in sets if widths[info.name] != 4]
    if len(boxes) != 1 or len(scores) != 1:
        listed = ", ".join(f"{target.info.name} {shown(target.info)}" for target in found) or "none of floats"
        raise ConfigError(
            "boxes are learned by class scores [batch, queries, classes] and boxes [batch, queries, 4], as DETR has "
            f"them, but the outputs are {listed}; name a loss of your own (loss.file=...), or the two outputs; "
            f"{BOX_PAGE} says which detectors are trained"
        )
    names = [scores[0].name, boxes[0].name]
    has_nothing = _names_no_object(draft, facts, widths[scores[0].name])
    for position, (name, weight) in enumerate(WEIGHTS.items()):
        reason = f"outputs {shown(scores[0])} and {shown(boxes[0])}: a set of boxes" if not position else ""
        draft.set(f"loss.{position}.name", name, reason)
        draft.set(f"loss.{position}.output", names, "")
        if weight != 1.0:
            draft.set(f"loss.{position}.weight", weight, "as in DETR")
        if not has_nothing:
            draft.set(f"loss.{position}.scores", "sigmoid", "" if position else "as many scores as classes")
    draft.set("metrics", ["map", "map_50"], "")
    return [column]


def _names_no_object(draft: Draft, facts: Facts, num_scores: int | None) -> bool:
    """Return whether one of the scores stands for no object: the last one, of one more than there are classes."""
    place = facts.data.image.box_place if facts.data.image else ""
    if not place:  # of a table, whose cells are read later
        return True
    images = [name for name, _ in sources.locate(facts.data.source, facts.data).files]
    found = read_annotations(folder_of(facts.data.source), images, place)
    names = set(found.names)
    if not names:
        names = {box.name for boxes in found.boxes.values() for box in boxes}
    if num_scores == len(names):
        return False
    if num_scores is not None and num_scores <= len(names):
        draft.notes.append(
            f"the model has {num_scores} scores for each box, and the data {len(names)} classes: "
            f"{', '.join(sorted(names)[:10])}"
        )
    return True
